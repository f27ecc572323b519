"""Puts our DistributedDataParallel where scripts and libraries look for torch's, in this process and its children.

As soon as torch has been imported, in whichever process: children inherit a folder of PYTHONPATH, whose `sitecustomize`
calls `install`. PACELINE_DDP=off leaves torch's own class.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType

from paceline.ddp import after_import

VARIABLE, OFF, TORCHS = "PACELINE_DDP", "off", "torch"  # torch's: ours, with torch's sums, for comparisons
MODULE, CLASS = "paceline.ddp.module", "DistributedDataParallel"
OPTIMIZER, FUSED = "PACELINE_DDP_OPTIMIZER", "fused"  # of `paceline.ddp.fused`
# `paceline.ddp.stopwatch` times the script, and logs what it found after these words
TIMED, FOUND = "PACELINE_DDP_TIMED", "steps of DistributedDataParallel timed: "
# who starts the processes of a script that makes its process group itself: `paceline run`, or the script's library
STARTED_BY, RUN, SCRIPT = "PACELINE_DDP_STARTED_BY", "run", "script"
RANKS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"
LIGHTNING = "lightning.fabric", "lightning_fabric"
ELASTIC = "TORCHELASTIC_RUN_ID"  # by which Lightning knows that all processes are started for it
INHERITED = str(Path(__file__).parent / "inherited")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a process and its children have the class; ``given``: its other variables."""
    if given.get(VARIABLE) == OFF and not given.get(STARTED_BY):
        return {}
    before = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path and path != INHERITED]
    return {"PYTHONPATH": os.pathsep.join([INHERITED, *before])}


# of torch's errors, where a script asks for nccl on a machine without a GPU
NO_GPU = "doesn't have NCCL built in", "ProcessGroupNCCL is only supported with GPUs"


def install() -> None:
    _say_who_starts()
    _hint_at_gloo()
    after_import.call("accelerate", _together)
    for name in LIGHTNING:
        after_import.call(name, _all_are_started)
    if os.environ.get(VARIABLE) != OFF:
        after_import.call("torch", replace)


def _say_who_starts() -> None:
    starts = os.environ.get(STARTED_BY)
    if starts == SCRIPT:
        for name in (*RANKS, STARTED_BY):  # its children are given ranks by it
            os.environ.pop(name, None)
    elif starts == RUN:
        _as_torchrun()
        if name := _interface():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _as_torchrun() -> None:
    """Its other variables, of processes that have their ranks."""
    if all(name in os.environ for name in RANKS):
        rank, size, each = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        sizes = os.environ.get("PACELINE_LOCAL_SIZES", "").split(",")  # where nodes have unlike numbers
        num_nodes = len(sizes) if len(sizes) > 1 else int(size) // max(1, int(each))
        os.environ.setdefault(ELASTIC, "paceline")
        os.environ.setdefault("GROUP_WORLD_SIZE", str(num_nodes))
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("NAME", "default")):
            os.environ.setdefault(f"ROLE_{name}", value)


def _hint_at_gloo() -> None:
    before = sys.excepthook

    def hinted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if any(words in str(error) for words in NO_GPU):
            from paceline.report.log import log

            log.error("this process has no GPU, which nccl needs; init_process_group('gloo') trains on CPUs")

    sys.excepthook = hinted


def _all_are_started() -> None:
    """Lightning waits for processes that nobody starts where it is given a local rank alone. Its own children have no
    rank."""
    if all(name in os.environ for name in RANKS):
        os.environ.setdefault(ELASTIC, "paceline")


def _together() -> None:
    """Without a GPU, Accelerate's processes train each alone, without a warning, unless configured for CPUs."""
    import torch

    if os.environ.get("WORLD_SIZE", "1") == "1" or torch.accelerator.is_available():
        return
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    state = getattr(sys.modules["accelerate"], "PartialState", None)  # which does not read the variable
    if state is None:
        return
    init = state.__init__

    @functools.wraps(init)
    def on_cpus(self: object, cpu: bool = False, **options: object) -> None:
        asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
        init(self, cpu or asked, **options)

    state.__init__ = on_cpus


def _interface() -> str:
    """The network interface on the route to rank 0, empty if that is a loopback one. Gloo takes the address of the
    host's name instead, which Debian resolves to 127.0.1.1."""
    import psutil

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        used = line.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == used for each in addresses) and not used.startswith("127."):
                return name
    return ""


def replace() -> None:
    import torch.distributed
    from torch.nn import parallel

    if torch.distributed.is_available():
        for home in (parallel, parallel.distributed):
            home.__class__ = _Asked


class _Asked(ModuleType):
    """A module of torch's which has our class from the first time that anyone asks for it. Not before: a module of ours
    that is being imported may be what imports torch, and ours needs that module whole."""

    @property
    def DistributedDataParallel(self) -> object:
        ours = getattr(importlib.import_module(MODULE), CLASS, None)  # another thread waits until it is whole
        return vars(self)[CLASS] if ours is None else _put(ours)

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: object) -> None:
        self.__class__ = ModuleType  # type: ignore[assignment]
        vars(self)[CLASS] = value

    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, (self.__name__,)


def _put(ours: object) -> object:
    """In both at once: torch's forward marks the class that its module has at that moment."""
    from torch.nn import parallel

    for home in (parallel, parallel.distributed):
        if isinstance(home, _Asked):
            home.DistributedDataParallel = ours
    return ours
