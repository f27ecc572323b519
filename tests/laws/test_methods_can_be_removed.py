"""No line outside of a method's own files knows it: without them all else is imported, listed, planned and trained."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCES = Path(paceline.__file__).parent
REMOVED = {
    ("codec", "lowrank"): ("codec/lowrank.py",),
    ("codec", "qsgd"): ("codec/qsgd.py",),
    ("exchange", "diloco"): ("exchange/diloco.py",),
    ("exchange", "server"): ("exchange/server.py",),
    ("engine", "pipeline"): ("engine/pipeline.py", "engine/compute/pipeline_schedule.py"),
}
REST = """
import importlib, pkgutil, sys, paceline
for each in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if each.name.rpartition(".")[2] != "__main__":
        importlib.import_module(each.name)
import torch
room, name = sys.argv[1:]
weights = []
for method in (name, None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {room: name} if method else {}
    try:
        with paceline.join(model, optimizer, torch.nn.functional.mse_loss, batch_size=4, **how) as pace:
            pace.step((torch.ones(4, 4), torch.zeros(4, 2)))
    except ValueError as error:
        print("refused", error)
    else:
        print("trained", method)
"""


@pytest.mark.dear
@pytest.mark.parametrize(("room", "name"), REMOVED, ids=[name for _, name in REMOVED])
def test_all_else_goes_on_without_it(tmp_path, room, name):
    shutil.copytree(SOURCES, tmp_path / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    for path in REMOVED[room, name]:
        (tmp_path / "paceline" / path).unlink()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def said(*words):
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert name not in said("-m", "paceline", "list").split()
    refused, trained = said("-c", REST, room, name).strip().splitlines()
    assert refused.startswith("refused")
    assert name in refused
    assert trained == "trained None"
    planned = said("-m", "paceline", "plan", "--model", "small", "--budget", "5")
    assert "<- chosen" in planned
    assert f"{name}:" not in planned
