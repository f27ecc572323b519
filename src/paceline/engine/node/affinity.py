"""Which cores each process of a node works on: whole physical cores, and neighbours on one NUMA node.

Affinity is narrowed for all threads of the process that have the mask it began with, and given back. A container may
see all cores of a machine and use the time of a few: there are no more threads than these.

Memory that a step frees stays with the process, for the next step. glibc gives it back and asks for it again, page by
page: of a small convolutional net's step, that was a third. Only the heap is kept, and at most KEPT_BYTES of it unused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def physical(cpus: set[int], root: Path = CPUS) -> list[list[int]]:
    """The cpus of each physical core together, cores of one NUMA node side by side. Unknown: each its own core."""
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
    """(cpus of this one of ``size``, intra-op threads for them). With fewer cpus than processes each has all.
    ``allowed``: by `cgroup_limits.cores`, to all of them."""
    cores = physical(cpus, root)
    if len(cores) < size:
        cores = [[cpu] for core in cores for cpu in core]
    if len(cores) < size:
        return cpus, 1
    mine = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
    return {cpu for core in mine for cpu in core}, min(len(mine), max(1, allowed // size) if allowed else len(mine))


def move(source: set[int], target: set[int]) -> None:
    """Every thread of this process that may run on exactly ``source`` may run on ``target`` from now on."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.sched_getaffinity(int(task)) == source:
                os.sched_setaffinity(int(task), target)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 128 << 20
LARGE_BYTES = 32 << 20  # the largest that glibc takes


def keep() -> bool:
    """Whether the heap is kept from now on: on glibc, and where the user has not set it otherwise."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
