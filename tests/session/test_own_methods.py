"""Methods of one's own, without a fork: an object, "package.module:Class", or a package that brings them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import launching
import paceline
from paceline import registry
from paceline.codec import topk
from paceline.engine import sequential
from paceline.exchange import allreduce
from paceline.report.record import read

DOCS = Path(__file__).parents[2] / "docs"
SIGN = re.findall(r"```python\n(.*?)```", (DOCS / "adding-a-codec.md").read_text(), re.DOTALL)[0]
SCRIPT = """
import sys, torch, paceline
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8, codec=sys.argv[1],
                   engine="sequential", folder=sys.argv[2]) as pace:
    pace.step((torch.ones(8, 4), torch.arange(8) % 3))
    pace.save()
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder of modules that is on the path, as an installed package is."""
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "__init__.py").touch()
    (tmp_path / "stranger" / "sign.py").write_text(SIGN)
    about = tmp_path / "stranger-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[paceline.codec]\nsign = stranger.sign\nbroken = stranger.nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def join(**words):
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = {"engine": "sequential", **words}
    return paceline.join(model, optimizer, F.cross_entropy, batch_size=8, **words)


def test_objects_are_used_as_they_are(tmp_path):
    class Codec(topk.Codec):
        pass

    made = sequential.Engine(), allreduce.Exchange("bytes"), Codec(0.5)
    with join(engine=made[0], exchange=made[1], codec=made[2], folder=tmp_path) as pace:
        assert (pace.run.engine, pace.exchange, pace.run.codec) == made
        assert pace.run.methods["codec"].endswith("Codec")
        pace.step((torch.ones(8, 4), torch.arange(8) % 3))
    event = next(event for event in read(tmp_path) if event["event"] == "join")
    assert event["codec"].endswith("test_objects_are_used_as_they_are.<locals>.Codec")
    assert event["exchange"] == "paceline.exchange.allreduce:Exchange"


def test_a_class_of_a_module_takes_options_and_may_be_wrapped(stranger):
    codec = registry.parse("codec", "stranger.sign:Codec")
    assert codec.needs_feedback
    assert registry.parse("codec", "feedback/stranger.sign:Codec").inner.needs_feedback
    with pytest.raises(ValueError, match=r"codec 'stranger.sign:Codec': too many positional arguments"):
        registry.parse("codec", "stranger.sign:Codec:3")
    assert registry.says("codec", "stranger.sign:Codec", "fidelity") == "approximate"
    assert registry.head("stranger.sign:Codec:keep=1") == ("stranger.sign:Codec", "keep=1")
    assert registry.current("codec", "stranger.sign:Codec") == "stranger.sign:Codec"
    with join(codec="feedback/stranger.sign:Codec") as pace:
        assert pace.run.methods["codec"] == "feedback/stranger.sign:Codec"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("stranger.nowhere:Codec", r"codec stranger\.nowhere:Codec: No module named .*; accepted: package"),
        ("stranger.sign:Nothing", r"cannot get codec stranger\.sign:Nothing: .*no attribute 'Nothing'"),
        ("pathlib:Path", r"codec pathlib:Path is no class of paceline\.contract\.Codec"),
        ("Sign Codec", r"codec 'Sign Codec' is not of the form name\[:option,\.\.\.\].* package\.module:Class"),
        (3, r"codec is a name such as 'none', 'package\.module:Class', or an object of .*Codec, got 3"),
        (topk.Codec, r"codec is a name such as 'none', .*, got <class 'paceline\.codec\.topk\.Codec'>"),
    ],
)
def test_what_is_no_method_is_told_at_join(stranger, given, said):
    with pytest.raises(ValueError, match=said):
        join(codec=given)


@pytest.mark.dear
def test_a_package_adds_methods_by_entry_points(stranger, tmp_path):
    """Listed with its sentence, hinted at after a typing error, trained with; a broken one is not listed."""
    environment = {**os.environ, "PYTHONPATH": launching.python_path(stranger)}

    def call(*words, code=0):
        command = [sys.executable, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    listed = call("-m", "paceline", "list")
    assert re.search(r"^codec +sign +Signs times the mean magnitude; lossy, use under feedback$", listed, re.M)
    assert "broken" not in listed
    (tmp_path / "script.py").write_text(SCRIPT)
    call(str(tmp_path / "script.py"), "feedback/sign", str(tmp_path / "run"))
    (event,) = (event for event in read(tmp_path / "run") if event["event"] == "join")
    assert event["codec"] == "feedback/sign"
    assert "did you mean 'sign'?" in call(str(tmp_path / "script.py"), "sing", str(tmp_path / "other"), code=1)
