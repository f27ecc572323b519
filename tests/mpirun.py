"""Commands under a real mpirun, all on this machine."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
# what killed ranks share would stay behind in /dev/shm
_segments = tempfile.TemporaryDirectory(prefix="mpirun-")
WAYS = {
    "shared memory": ("--mca", "btl", "self,sm", "--mca", "btl_sm_backing_directory", _segments.name),
    "sockets": ("--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"),
}


def found() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def unavailable() -> str:
    """Why nothing can be run under mpirun here, or an empty string."""
    if not importlib.util.find_spec("mpi4py"):
        return "needs mpi4py: pip install 'paceline[mpi]'"
    return "" if found() else "needs the command 'mpirun': pip install 'paceline[mpi]'"


def command(size: int, *words: Any, way: str = "shared memory", options: tuple[str, ...] = ()) -> list[str]:
    """This Python with ``words``, as ``size`` processes."""
    here = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1")
    return [str(found()), *here, *WAYS[way], *options, "-n", str(size), sys.executable, *map(str, words)]
