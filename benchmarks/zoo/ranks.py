"""One case, trained by processes that are forked for it: they need not import anything, and nothing of theirs stays."""

from __future__ import annotations

import importlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from zoo.case import Case

LATER = (  # what training imports when it begins, and each process would import again
    "torch._dynamo",
    "paceline.session",
    "paceline.engine.processes",
    "paceline.exchange.allreduce",
    "paceline.codec.none",
    "paceline.link.gloo",
)
SEED, LIMIT_S, GRACE_S = 1, 240.0, 5.0


@dataclass
class Trained:
    """What one process has after training: parameters and buffers by name, losses; or why it has not. ``said``: its
    lines on standard error."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    error: str = ""
    said: str = ""


def together(case: Case, environments: Sequence[Mapping[str, str]], join: Callable[..., Any]) -> list[Trained]:
    """One process for each of ``environments``. One that has not ended after LIMIT_S is ended."""
    for each in LATER:
        importlib.import_module(each)
    with tempfile.TemporaryDirectory(prefix="paceline-zoo-") as folder:
        paths = [Path(folder) / str(i) for i in range(len(environments))]
        pids = [_fork(case, each, join, path) for each, path in zip(environments, paths, strict=True)]
        late = _wait(pids)
        return [_read(path, pid in late) for path, pid in zip(paths, pids, strict=True)]


def _fork(case: Case, environment: Mapping[str, str], join: Callable[..., Any], path: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment)
        with open(path.with_suffix(".err"), "w") as said:
            os.dup2(said.fileno(), 2)
            os.dup2(said.fileno(), 1)
        trained = train(case, join)
        sys.stdout.flush()
        sys.stderr.flush()
        torch.save(trained.__dict__, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        code = 0
    finally:
        os._exit(code)  # the parent's own ends are not this one's


def prepare() -> None:
    """In float64, from the same weights."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    random.seed(SEED)  # Keras draws its layers' seeds from it


def train(case: Case, join: Callable[..., Any]) -> Trained:
    prepare()
    trained = Trained()
    try:
        models, losses = case.train(join)
        trained.losses = [float(each) for each in losses]
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        trained.error = f"{type(error).__name__}: {error}"
        return trained
    for i, model in enumerate(models):
        moves = dict(model.named_parameters())
        trained.parameters |= {f"{i}.{name}": each.detach().clone() for name, each in moves.items()}
        trained.buffers |= {f"{i}.{name}": each.detach().clone() for name, each in model.named_buffers()}
    return trained


def _wait(pids: Sequence[int]) -> set[int]:
    """Those that had to be ended."""
    left, late, end = set(pids), set[int](), time.monotonic() + LIMIT_S
    while left:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        if left and time.monotonic() > end:
            late |= left
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            end += GRACE_S
        time.sleep(0.005)
    return late


def _read(path: Path, late: bool) -> Trained:
    said = path.with_suffix(".err")
    text = said.read_text(errors="replace") if said.exists() else ""
    if path.exists():
        return Trained(**torch.load(path, weights_only=True) | {"said": text})
    last = (text.strip() or "it said nothing").splitlines()[-1]
    return Trained(error=f"not ended after {LIMIT_S:.0f} s: {last}" if late else f"died: {last}", said=text)


def of_nodes(count: int) -> list[dict[str, str]]:
    """``count`` nodes of one process, on this machine."""
    base = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    base |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "PACELINE_ENGINE": "sequential", "PACELINE_SHARES": "equal"}
    return [base | {"RANK": str(rank), "GROUP_RANK": str(rank)} for rank in range(count)]


def of_processes(count: int) -> list[dict[str, str]]:
    """One node of ``count`` processes."""
    base = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "PACELINE_ENGINE": f"processes:{count}"}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GROUP_RANK": "0"}
    return [base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
