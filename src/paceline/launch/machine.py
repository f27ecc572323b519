"""Hardware of this machine: cores, caches, memory, processor, read from the kernel with the standard library alone.

A container's limits apply, not the host's: the cores that this process may run on, and the limits of its cgroup.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.engine.node import cgroup_limits

# flags that decide which reduced precision is faster; a fingerprint ignores all others
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class Machine:
    """*Units*: bytes. ``cores``: those that this process may use; ``gpus``: always (), as in digests of older plans."""

    name: str = ""
    cpu: str = ""
    cores: int = 1
    physical_cores: int = 1
    numa_nodes: int = 1
    cache_bytes: int = 0
    memory_bytes: int = 0
    flags: tuple[str, ...] = ()
    kernel: str = ""
    compiler: bool = False
    gpus: tuple[str, ...] = ()

    def digest(self) -> str:
        """Equal for machines that can share a plan; the host name and the kernel are not included."""
        comparable = dataclasses.replace(self, name="", kernel="", memory_bytes=self.memory_bytes >> 28)
        return hashlib.sha256(repr(comparable).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.name}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB"


def survey() -> Machine:
    usable = sorted(os.sched_getaffinity(0))
    num_cores = min(len(usable), cgroup_limits.cores() or len(usable))
    siblings = {
        cgroup_limits.read(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or str(core)
        for core in usable
    }
    nodes = {
        node.name
        for node in Path("/sys/devices/system/node").glob("node[0-9]*")
        if any((node / f"cpu{core}").exists() for core in usable)
    }
    info = _cpu_info()
    return Machine(
        platform.node(),
        info.get("model name") or info.get("Model") or platform.machine(),
        num_cores,
        min(num_cores, len(siblings)),
        max(1, len(nodes)),
        _cache_bytes(usable[0]),
        memory_bytes(),
        tuple(flag for flag in FLAGS if flag in (info.get("flags") or info.get("Features") or "").split()),
        platform.release(),
        any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    )


def memory_bytes() -> int:
    """The machine's memory, or the cgroup's limit if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in cgroup_limits.cgroups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (text := cgroup_limits.read(folder / name)).isdigit():
                limits.append(int(text))
    return min(limits)


def _cpu_info() -> dict[str, str]:
    """The entries of the first processor in /proc/cpuinfo."""
    pairs = (line.partition(":") for line in cgroup_limits.read("/proc/cpuinfo").partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cache_bytes(core: int) -> int:
    """The size of the largest cache of a core."""
    units = {"K": 10, "M": 20, "G": 30}
    sizes = [0]
    for size in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*/size"):
        text = cgroup_limits.read(size)
        if text[:-1].isdigit():
            sizes.append(int(text[:-1]) << units.get(text[-1], 0))
    return max(sizes)
