"""CPU affinity of each process of a node: whole physical cores, and neighbours on one NUMA node.

The affinity of all threads that have the process's initial mask is narrowed, and restored at the end. A container may
see all cores of a machine but have a CPU quota of fewer: threads are limited to the quota.

Heap memory that a step frees is kept for the next step. By default glibc returns it to the kernel and faults it in
again, page by page, a third of a small convolutional network's step. At most KEPT_BYTES are kept unused, and what a
codec needs besides.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def physical(cpus: set[int], root: Path = CPUS) -> list[list[int]]:
    """The CPUs of each physical core, cores of one NUMA node in sequence. Unknown topology: each CPU is a core."""
    cores: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(cpus):
        folder = root / f"cpu{cpu}"
        node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
        try:
            package, core = (int((folder / "topology" / n).read_text()) for n in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            package, core = -1, cpu
        cores.setdefault((node, package, core), []).append(cpu)
    return [cores[key] for key in sorted(cores)]


def share(rank: int, size: int, cpus: set[int], root: Path = CPUS, allowed: int = 0) -> tuple[set[int], int]:
    """(CPUs of process ``rank`` of ``size``, its intra-op threads). With fewer CPUs than processes each gets all.
    ``allowed``: the quota of all processes together, by `cgroup_limits.cores`."""
    cores = physical(cpus, root)
    if len(cores) < size:
        cores = [[cpu] for core in cores for cpu in core]
    if len(cores) < size:
        return cpus, 1
    own = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
    return {cpu for core in own for cpu in core}, min(len(own), max(1, allowed // size) if allowed else len(own))


def move(source: set[int], target: set[int]) -> None:
    """Sets the affinity of every thread of this process whose mask is exactly ``source`` to ``target``."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.sched_getaffinity(int(task)) == source:
                os.sched_setaffinity(int(task), target)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 128 << 20
LARGE_BYTES = 32 << 20  # the maximum that glibc accepts
MAX_INT = (1 << 31) - 1  # of malloc's options


def keep(more: int = 0) -> bool:
    """Keeps freed heap memory from now on, KEPT_BYTES and ``more``. False without glibc, or where the user has set its
    malloc options."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)) and bool(
        mallopt(M_TRIM_THRESHOLD, min(KEPT_BYTES + more, MAX_INT))
    )


def release() -> None:
    """Returns freed heap memory to the system, where glibc can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
