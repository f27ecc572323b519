"""Hardware of this machine: cores, caches, memory, processor. Read from the kernel; needs nothing but Python.

A container's limits count, not the host's: the cores this process may run on, and what its cgroup allows.
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

# what changes which numerics pay; all other flags are noise in a fingerprint
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class Machine:
    """*Units*: bytes. ``cores`` are those usable here; ``gpus``: always (), as in the digests of older plans."""

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
        """Equal where a plan may be used again: another host name or kernel is no other machine."""
        facts = dataclasses.replace(self, name="", kernel="", memory_bytes=self.memory_bytes >> 28)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

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
    words = _cpu_info()
    return Machine(
        platform.node(),
        words.get("model name") or words.get("Model") or platform.machine(),
        num_cores,
        min(num_cores, len(siblings)),
        max(1, len(nodes)),
        _cache_bytes(usable[0]),
        memory_bytes(),
        tuple(flag for flag in FLAGS if flag in (words.get("flags") or words.get("Features") or "").split()),
        platform.release(),
        any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    )


def memory_bytes() -> int:
    """Of the machine, or what the cgroup allows where that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in cgroup_limits.cgroups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (text := cgroup_limits.read(folder / name)).isdigit():
                limits.append(int(text))
    return min(limits)


def _cpu_info() -> dict[str, str]:
    """Of the first processor."""
    pairs = (line.partition(":") for line in cgroup_limits.read("/proc/cpuinfo").partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cache_bytes(core: int) -> int:
    """The largest cache that the core sees."""
    units = {"K": 10, "M": 20, "G": 30}
    sizes = [0]
    for size in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*/size"):
        text = cgroup_limits.read(size)
        if text[:-1].isdigit():
            sizes.append(int(text[:-1]) << units.get(text[-1], 0))
    return max(sizes)
