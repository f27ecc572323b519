"""A damaged checkpoint is rejected with the name of the file; no code from a file is ever executed."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.checkpoint import checkpoint
from paceline.checkpoint.checkpoint import CheckpointError, newest, read, read_newest, write

SRC = Path(paceline.__file__).parent
FILES = (checkpoint.WEIGHTS, checkpoint.STATE, checkpoint.TREE)


@pytest.fixture
def two(tmp_path):
    """Two small checkpoints; the tests damage the second one."""
    for step in (1, 2):
        write(tmp_path, step, {"w": torch.arange(5.0)}, {"turn": step, "moments": [torch.ones(9)], "name": "x"})
    return tmp_path


def damaged(run, name):
    """Reading names the damaged file; the previous checkpoint is used, and a message reports it."""
    path = newest(run) / name
    with pytest.raises(CheckpointError, match=name) as raised:
        read(newest(run))
    assert str(path) in str(raised.value)
    found = read_newest(run)
    assert found.state["turn"] == 1
    assert found.damaged == (str(raised.value),)
    return str(raised.value)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_refused_by_name(two, name):
    path = newest(two) / name
    good = path.read_bytes()
    for place in range(0, len(good), 3):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        assert "is damaged" in damaged(two, name)


@pytest.mark.parametrize("name", FILES)
def test_another_length_is_refused_by_name(two, name):
    path = newest(two) / name
    good = path.read_bytes()
    for data in (b"", good[:1], good[: len(good) // 2], good[:-1], good + b"\0"):
        path.write_bytes(data)
        assert "is damaged" in damaged(two, name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_name(two, name):
    (newest(two) / name).unlink()
    assert "is missing" in damaged(two, name)


def test_a_file_of_another_checkpoint_is_refused_by_name(two):
    for name in (checkpoint.WEIGHTS, checkpoint.STATE):
        shutil.copy(export_of(two, name), newest(two) / name)
        assert "sha256" in damaged(two, name)
        write(two, 2, {"w": torch.arange(5.0)}, {"turn": 2, "moments": [torch.ones(9)], "name": "x"})


def export_of(run, name):
    """A complete file of the same size and format, with other values."""
    other = run / "other"
    path = write(other, 2, {"w": torch.zeros(5)}, {"turn": 2, "moments": [torch.zeros(9)], "name": "x"})
    return path / name


def test_all_damaged_is_told_one_by_one(two):
    for path in sorted(two.iterdir()):
        (path / checkpoint.TREE).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete") as raised:
        read_newest(two)
    assert [f"{n}/checkpoint.json is missing" in str(raised.value) for n in ("00000001", "00000002")] == [True, True]


def test_another_format_is_told_and_no_older_checkpoint_taken_for_it(two):
    path = newest(two) / checkpoint.TREE
    body = path.read_bytes().replace(b'"format": 1', b'"format": 2')
    body = body[: body.rindex(b'"sha256"')]
    path.write_bytes(body + checkpoint._seal(body))
    for attempt in (lambda: read(newest(two)), lambda: read_newest(two)):
        with pytest.raises(ValueError, match=r"checkpoint\.json has format 2, .*reads format 1: install"):
            attempt()


# Nothing of a file is ever run.


def test_no_module_here_can_unpickle_or_evaluate():
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec", "compile", "load_module"}
    forbidden |= {"torch.load", "torch.save", "np.load", "np.save", "literal_eval"}
    for path in [*sorted((SRC / "checkpoint").glob("*.py")), SRC / "train" / "classify.py"]:
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module or "", *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Call):
                found.add(ast.unparse(node.func))
        found = {word for name in found for word in (name, name.split(".")[0]) if word}
        assert not found & forbidden, path
        assert "re.compile" in found or path.name != "checkpoint.py", "the test sees calls"


def test_reading_runs_nothing(two):
    read_newest(two)  # whatever is imported late is imported now
    events, listening = [], [True]
    sys.addaudithook(lambda event, _: events.append(event) if listening[0] else None)
    try:
        read_newest(two)
    finally:
        listening[0] = False
    assert "open" in events
    assert not {"exec", "compile", "import", "pickle.find_class", "marshal.loads", "subprocess.Popen"} & set(events)
