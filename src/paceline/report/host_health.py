"""Symptoms of a slow node on this machine: busy cores, a limit, short memory, late data.

*Cost*: one look at the process table every EVERY_S, or more rarely, so that it takes a thousandth of a core at most.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.report.activity import Activity

EVERY_S = 5.0
SHARE = 0.001  # of one core
TAKEN = 0.1  # of the cores, or of the time, before it is worth a word
LATE = 0.3  # of a step, waiting for data
SWAPPED_PER_S = 100.0  # pages
NAMED, MOST = 0.1, 2  # of a core, before another program is named; of them


@dataclass(frozen=True)
class HostSample:
    """The kernel's counters at one moment. *Units*: seconds, all of them growing; ``spent`` by process."""

    at_s: float
    busy_s: float = 0.0
    stolen_s: float = 0.0
    spent: dict[int, tuple[str, float, int]] = field(default_factory=dict)  # (name, seconds, its last core)
    ours: frozenset[int] = frozenset()
    stopped_s: float = 0.0  # by the limit of the cgroup
    memory_s: float = 0.0  # in which something waited for memory
    swapped: float = 0.0  # pages


class HostHealth:
    """Keeps ``activity.signs`` up to date from a thread of its own until `stop`.

    ``roots``: the node's processes, which count as its own with all below them. ``root``: where /proc and /sys are."""

    def __init__(
        self, activity: Activity, roots: Callable[[], Sequence[int]] = lambda: (os.getpid(),), root: Path = Path("/")
    ):
        self.activity, self.roots, self.root = activity, roots, root
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._limit = _limit_file(root)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline signs", daemon=True)

    def start(self) -> HostHealth:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._ending.set()

    def _run(self) -> None:
        cost_s = 0.0
        before = self.look()
        while not self._ending.wait(max(EVERY_S, cost_s / SHARE)):
            begin_s = time.thread_time()
            now = self.look()
            cost_s = time.thread_time() - begin_s
            self.activity.signs = [*self.compare(before, now), *self._data()]
            before = now

    def look(self) -> HostSample:
        """What cannot be read on this machine is left out."""
        found = HostSample(time.monotonic())
        for part in (self._cores, self._programs, self._stopped, self._memory):
            with contextlib.suppress(OSError, ValueError, IndexError):
                found = replace(found, **part())
        return found

    def _cores(self) -> dict[str, Any]:
        mine = self.cores()
        busy = stolen = 0
        for line in self._read("proc/stat").splitlines():
            name, *words = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in mine:
                user, nice, system, _, _, _, _, steal, *_ = map(int, words)
                busy += user + nice + system  # interrupts are nobody's
                stolen += steal
        return {"busy_s": busy / self._ticks, "stolen_s": stolen / self._ticks}

    def cores(self) -> set[int]:
        """On which the node's processes may run."""
        found = set[int]()
        for pid in self.roots():
            with contextlib.suppress(OSError):
                found |= os.sched_getaffinity(pid)
        return found

    def _programs(self) -> dict[str, Any]:
        spent, parents = dict[int, tuple[str, float, int]](), dict[int, int]()
        for name in os.listdir(self.root / "proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError):
                head, _, rest = self._read(f"proc/{name}/stat").rpartition(")")
                words = rest.split()
                parents[int(name)] = int(words[1])
                seconds = (int(words[11]) + int(words[12])) / self._ticks
                spent[int(name)] = head.partition("(")[2], seconds, int(words[36])
        ours = {*self.roots(), *(child.pid for child in multiprocessing.active_children() if child.pid)}
        for pid in parents:
            line = list(_line(pid, parents))
            if ours.intersection(line):
                ours.update(line[: next(i for i, each in enumerate(line) if each in ours)])
        return {"spent": spent, "ours": frozenset(ours)}

    def _stopped(self) -> dict[str, Any]:
        if self._limit is None:
            return {}
        numbers = dict(line.split() for line in self._limit.read_text().splitlines())
        micro, nano = numbers.get("throttled_usec"), numbers.get("throttled_time", 0)
        return {"stopped_s": int(nano) / 1e9 if micro is None else int(micro) / 1e6}

    def _memory(self) -> dict[str, Any]:
        found = {}
        with contextlib.suppress(OSError):
            some = self._read("proc/pressure/memory").splitlines()[0]
            found["memory_s"] = int(some.rpartition("total=")[2]) / 1e6
        numbers = dict(line.split() for line in self._read("proc/vmstat").splitlines())
        return {**found, "swapped": float(int(numbers.get("pswpin", 0)) + int(numbers.get("pswpout", 0)))}

    def _read(self, path: str) -> str:
        return (self.root / path).read_text(errors="replace")

    def compare(self, before: HostSample, now: HostSample) -> list[str]:
        """The signs that two looks show, the gravest first."""
        passed_s, cores = now.at_s - before.at_s, self.cores()
        count = len(cores)
        if passed_s <= 0 or not count:
            return []
        gained = {pid: now.spent[pid][1] - before.spent.get(pid, ("", 0.0, 0))[1] for pid in now.spent}
        own_s = sum(seconds for pid, seconds in gained.items() if pid in now.ours)
        others = max(0.0, now.busy_s - before.busy_s - own_s) / passed_s
        stolen = (now.stolen_s - before.stolen_s) / passed_s
        found = []
        if others > TAKEN * count:
            there = [pid for pid, (_, _, core) in now.spent.items() if core in cores and pid not in now.ours]
            most = sorted(there, key=gained.__getitem__, reverse=True)[:MOST]
            named = [(now.spent[pid][0], pid, gained[pid] / passed_s) for pid in most]
            who = ", ".join(f"{name}, pid {pid}: {used:.1f}" for name, pid, used in named if used > NAMED)
            found.append((others / count, f"other programs use {others:.1f} of its {count} cores ({who or 'unseen'})"))
        if stolen > TAKEN * count:
            found.append((stolen / count, f"its host gave {stolen:.1f} of its {count} cores to others (steal)"))
        if (stopped_s := now.stopped_s - before.stopped_s) > TAKEN * passed_s:
            words = f"the processor limit of its cgroup stopped it for {stopped_s:.1f} s of {passed_s:.1f} s"
            found.append((stopped_s / passed_s, words))
        if (memory_s := now.memory_s - before.memory_s) > TAKEN * passed_s:
            share = memory_s / passed_s
            found.append((share, f"memory is short: something waited for it in {100 * share:.0f} % of the time"))
        if (swapped := (now.swapped - before.swapped) / passed_s) > SWAPPED_PER_S:
            found.append((1.0, f"memory is short: {swapped:.0f} pages per second go to or from swap"))
        return [words for _, words in sorted(found, reverse=True)]

    def _data(self) -> Iterator[str]:
        step_s, input_s = self.activity.step_s, self.activity.input_s
        if step_s and input_s > LATE * step_s:
            yield f"its data comes late: {100 * min(1.0, input_s / step_s):.0f} % of a step is waiting for it"


def _line(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """A process, its parent, and so on."""
    for _ in range(len(parents)):
        yield pid
        if pid not in parents:
            return
        pid = parents[pid]


def _limit_file(root: Path) -> Path | None:
    """Where the kernel counts how long the limit of this process's cgroup has stopped it."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "cpu" not in kinds.split(","):
                continue
            home = root / "sys/fs/cgroup" / ("cpu" if kinds else "")
            for folder in (home / path.lstrip("/"), home):
                with contextlib.suppress(OSError):
                    if "throttled" in (folder / "cpu.stat").read_text():
                        return folder / "cpu.stat"
    return None
