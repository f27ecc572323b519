"""No line outside of a method's own files knows it: without them all else is imported, listed, planned and trained."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCES = Path(paceline.__file__).parent
REMOVED = {
    "lowrank": ("codec", "codec/lowrank.py"),
    "qsgd": ("codec", "codec/qsgd.py"),
    "diloco": ("exchange", "exchange/diloco.py"),
    "server": ("exchange", "exchange/server.py"),
    "pipeline": ("engine", "engine/pipeline.py", "engine/stages"),
}
REST = """
import importlib, json, pkgutil, sys, paceline
for each in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if each.name.rpartition(".")[2] != "__main__":
        importlib.import_module(each.name)
import torch
for method in [*json.loads(sys.argv[1]), {}]:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with paceline.join(model, optimizer, torch.nn.functional.mse_loss, batch_size=4, **method) as pace:
            pace.step((torch.ones(4, 4), torch.zeros(4, 2)))
    except ValueError as error:
        print("refused", error)
    else:
        print("trained", method)
"""


@pytest.mark.dear
def test_all_else_goes_on_without_them(tmp_path):
    shutil.copytree(SOURCES, tmp_path / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    for _, *paths in REMOVED.values():
        for path in paths:
            place = tmp_path / "paceline" / path
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    how = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}

    def said(*words):
        done = subprocess.run([sys.executable, *words], **how, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert not REMOVED.keys() & set(said("-m", "paceline", "list").split())
    asked = json.dumps([{room: name} for name, (room, *_) in REMOVED.items()])
    *refused, trained = said("-c", REST, asked).strip().splitlines()
    assert trained == "trained {}"
    assert len(refused) == len(REMOVED)
    for name, line in zip(REMOVED, refused, strict=True):
        assert line.startswith("refused")
        assert name in line
    planned = said("-m", "paceline", "plan", "--model", "small", "--budget", "5")
    assert "<- chosen" in planned
    assert "pipeline:" not in planned
