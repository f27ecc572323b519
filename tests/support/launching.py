"""Scripts of the tests, started as a user's would be."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from device import on_the_cpu
from nodes import build, gap, reference, rows

HERE = Path(__file__).parent
PATH = os.pathsep.join(str(path) for path in (HERE, *sorted(HERE.parent.iterdir())) if path.is_dir())
START = (
    "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[3:], sys.argv[1], int(sys.argv[2])))"
)


JOINED = str(HERE / "scripts" / "joined.py")


def command(script: str, *arguments: Any, engine: str, num_nodes: int = 1, strict: bool = False) -> list[str]:
    path = script if Path(script).is_absolute() else str(HERE / "scripts" / script)
    run = [sys.executable, "-W", "error" if strict else "ignore", path, *map(str, arguments)]
    return [sys.executable, "-c", START, engine, str(num_nodes), *run]


def python_path(*first: Any) -> str:
    """For PYTHONPATH: with what the tests' own processes start with."""
    return os.pathsep.join(filter(None, (*map(str, first), PATH, os.environ.get("PYTHONPATH"))))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), **more}


def unedited(command: Sequence[Any], folder: Path, **more: str) -> str:
    """What a Python command prints that knows nothing of paceline."""
    return from_outside([sys.executable, *command], folder, **more)


OURS = "PACELINE_", "ACCELERATE_", "SLURM_", "OMPI_", "PMIX_", "MASTER_"


def from_outside(command: Sequence[Any], folder: Path, **more: str) -> str:
    """What a command prints without variables of ours, of Accelerate's or of launchers."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(
        list(map(str, command)),
        env={**given, "OMP_NUM_THREADS": "1", **more},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(
    script: str, *arguments: Any, engine: str, num_nodes: int = 1, code: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Waits for the end, which must be with exit code ``code``; on success, a warning is an error."""
    done = subprocess.run(
        command(script, *arguments, engine=engine, num_nodes=num_nodes, strict=code == 0),
        env=environment(**on_the_cpu(engine), **more),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def small(folder: Path, *lines: str, before: str = "") -> Path:
    """A user's script: a small model, and what is done once it has joined."""
    head = (
        "import time, torch, paceline",
        before,
        "model = torch.nn.Linear(4, 2)",
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
        "with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8) as pace:",
    )
    script = folder / "train.py"
    script.write_text("\n".join([*head, *(f"    {line}" for line in lines), ""]))
    return script


def begin(*words: Any, cwd: Path | None = None, own_session: bool = False, **more: str) -> subprocess.Popen[str]:
    """The command `paceline`, for `finish`."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, words)],
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=own_session,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What it said on stdout and stderr until its end, which must be with this exit code."""
    try:
        output, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, output + errors
    return output, errors


def of_four(folder: Path) -> list[dict[str, Tensor]]:
    """What joined.py left there, by rank, on two nodes of two processes each."""
    return [torch.load(folder / f"{seat}.pt", weights_only=True) for seat in ("0", "0.1", "1", "1.1")]


@cache
def four_here() -> dict[str, Tensor]:
    """The weights to which the launcher of this machine trains joined.py so: those of one process, but for rounding."""
    with tempfile.TemporaryDirectory(prefix="paceline-test-four-") as folder:
        launch(JOINED, folder, engine="processes:2", num_nodes=2)
        first, *others = of_four(Path(folder))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    model = build(dtype=torch.float32)
    parts = [rows(6, rank, torch.float32) for rank in range(4)]
    whole = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    one, _ = reference(model, [whole] * 12, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert gap(first, one) < 1e-5
    assert gap(model.state_dict(), one) > 1e-2, "nothing was learned, so nothing is tested"
    return first


def assert_as_four_here(folder: Path) -> None:
    """All four of another launcher's processes have the bits of those that were started here."""
    for weights in of_four(folder):
        assert all(torch.equal(weights[name], tensor) for name, tensor in four_here().items())
