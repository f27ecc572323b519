"""Puts our DistributedDataParallel where scripts and libraries look for torch's, in this process and its children.

As soon as torch has been imported, in whichever process: children inherit a folder of PYTHONPATH, whose `sitecustomize`
calls `install`. PACELINE_DDP=off leaves torch's own class.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

VARIABLE, OFF, TORCHS = "PACELINE_DDP", "off", "torch"  # torch's: ours, with torch's sums, for comparisons
OWN = "own"  # the script makes its process group itself, and `paceline run` has started it
TIMED = "PACELINE_DDP_TIMED"  # the file in which `paceline.ddp.stopwatch` says what it found
INHERITED = str(Path(__file__).parent / "inherited")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a process and its children have the class; ``given``: its other variables."""
    if given.get(VARIABLE) == OFF:
        return {}
    before = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path and path != INHERITED]
    return {"PYTHONPATH": os.pathsep.join([INHERITED, *before])}


def install() -> None:
    if os.environ.get(VARIABLE) == OFF:
        return
    if os.environ.get(VARIABLE) == OWN and (name := _interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if "torch" in sys.modules:
        replace()
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


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
        from paceline.ddp.module import DistributedDataParallel

        for home in (parallel, parallel.distributed):
            home.DistributedDataParallel = DistributedDataParallel  # type: ignore[attr-defined]


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everyone else would, and has `replace` called when it is there. Many only look whether it is."""

    looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.looking = False
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, own: importlib.abc.Loader):
        self.own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__:
            module.__spec__.loader = module.__loader__ = self.own
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterTorch)]
        self.own.exec_module(module)
        replace()
