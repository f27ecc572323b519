"""A function in several processes, as from a notebook: by `paceline.launch`, whose name a package has as well."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

import paceline
from paceline.launch import function

SESSION = """
import json, os
import torch
import paceline

rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
scale = 3.0

def train(steps, scaled=True):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset((rows * scale if scaled else rows).double(), torch.arange(24) % 3)
    loss = torch.nn.functional.cross_entropy
    with paceline.join(model, optimizer, loss, batch_size=8) as pace:
        for batch in pace.batches(data, epochs=steps):
            pace.step(batch)
    return os.environ["WORLD_SIZE"] if "WORLD_SIZE" in os.environ else "1", model.weight.detach()

alone = train(2)[1]
told = paceline.launch(train, 2, processes=2)
print(json.dumps([[size, float((weight - alone).abs().max())] for size, weight in told]))
"""


def test_a_function_of_this_session_trains_in_two_processes_as_in_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-"], input=SESSION, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for size, gap in json.loads(done.stdout.splitlines()[-1]):
        assert size == "2"
        assert gap < 1e-12


def fails(rank_that_does):
    import os

    if int(os.environ["RANK"]) == rank_that_does:
        raise KeyError("where it went wrong")


def test_a_process_that_fails_is_told_and_its_error_stands_above(capfd):
    with pytest.raises(RuntimeError, match=r"a process failed \(exit code 1\)"):
        paceline.launch(fails, 1)
    assert "where it went wrong" in capfd.readouterr().err


def exits(how):
    import os
    import signal
    import sys

    {
        "sys.exit(4)": lambda: sys.exit(4),
        "sys.exit('no data')": lambda: sys.exit("no data"),
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "os._exit": lambda: os._exit(3),
    }[how]()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sys.exit(4)", r"process 0 called sys\.exit\(4\) before the function returned \(exit code 4\)"),
        ("sys.exit('no data')", r"process 0 called sys\.exit\('no data'\) .*\(exit code 1\)"),
        ("SIGKILL", r"a process was ended by SIGKILL, as where memory runs out \(exit code 137\), .*no error"),
        ("os._exit", r"exit code 3 and without an error of Python's, as by os\._exit"),
    ],
)
def test_a_process_that_leaves_no_error_is_told_by_its_exit(how, said):
    """Story: of each it was said that its error stood above, where nothing stood."""
    with pytest.raises(RuntimeError, match=said):
        paceline.launch(exits, how, processes=1)


def sleeps_beside_one_that_fails():
    import os
    import time
    from pathlib import Path

    if os.environ["RANK"] == "1":
        Path(os.environ["FAILED_AT"]).touch()
        raise KeyError("where it went wrong")
    time.sleep(30)


def test_the_caller_hears_within_two_seconds_of_one_that_fails(monkeypatch, tmp_path):
    """Story: it waited 15 s for the others, which slept."""
    failed = tmp_path / "failed"
    monkeypatch.setenv("FAILED_AT", str(failed))
    with pytest.raises(RuntimeError, match="its error stands above"):
        paceline.launch(sleeps_beside_one_that_fails)
    assert time.time() - failed.stat().st_mtime < 4  # two, and what a busy machine needs


def test_arguments_by_name_are_told_how_to_be_passed():
    with pytest.raises(
        TypeError, match=r"got rank=1; write launch\(functools\.partial\(fails, rank=1\), processes=2\)"
    ):
        paceline.launch(fails, rank=1, processes=2)


@pytest.mark.parametrize("what", ["train.py", 3, None])
def test_what_is_no_function_is_refused_at_once(what):
    for launch in (paceline.launch, function.launch):
        with pytest.raises(TypeError, match=rf"launch takes a function and its arguments, got {type(what).__name__}"):
            launch(what)


def test_what_cannot_be_sent_is_told():
    with pytest.raises(ValueError, match=r"cannot send 'fails', its arguments.*make models, datasets and files inside"):
        paceline.launch(fails, threading.Lock())


@pytest.mark.parametrize("processes", [0, -1, 1.5, "2"])
def test_a_number_of_processes_is_whole(processes):
    with pytest.raises(ValueError, match="processes is a whole number from 1"):
        paceline.launch(fails, 0, processes=processes)


def test_one_of_several_starts_no_others(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="call the function itself"):
        paceline.launch(fails, 0)


def test_another_thread_is_refused():
    told = []

    def work():
        with pytest.raises(ValueError, match="main thread"):
            paceline.launch(fails, 0)
        told.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert told


def test_without_cloudpickle_a_function_of_a_session_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    def here():
        pass

    here.__module__ = "__main__"
    with pytest.raises(ValueError, match="pip install cloudpickle"):
        function._packed(here, ())
    assert function._packed(fails, (1,))
