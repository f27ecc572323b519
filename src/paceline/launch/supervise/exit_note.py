"""Exit note of a process that joined no other process, written for the launcher.

The launcher puts a copy of this file, named sitecustomize.py, first on PYTHONPATH, so that Python imports it at the
start of every process of the run. It imports nothing of paceline and nothing large, and runs the machine's own
sitecustomize. A process notes "met" or "alone-PID" at its exit. A killed process notes nothing, and the launcher
reports a run as trained alone only if every process noted that it was alone.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
# libraries that have launchers and a rendezvous of their own
OTHERS = "horovod", "ray", "jax", "tensorflow", "torch_xla", "pyspark", "dask", "hivemind", "mpi4py.MPI"


def by_torch() -> bool:
    """Whether torch.distributed is initialised, or was, or may have been."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return False
    if c10d.is_initialized() or getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
        return True
    return getattr(c10d, "_default_pg_init_method", "unknown") is not None


def by_mpi() -> bool:
    try:
        with open("/proc/self/maps") as lines:
            return any("libmpi" in line for line in lines)
    except OSError:
        return True


def note(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, which inherited this exit handler
    met = by_torch() or any(name in sys.modules for name in OTHERS) or by_mpi()
    try:
        with open(os.path.join(FOLDER, "met" if met else f"alone-{pid}"), "w"):
            pass
    except OSError:
        pass  # the launcher has ended


def own() -> None:
    """Runs the machine's own sitecustomize, which this file hides."""
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec and spec.loader:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    atexit.register(note, os.getpid())
    own()
