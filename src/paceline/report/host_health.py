"""Symptoms of a slow node on this machine: busy cores, a limit, short memory, late data.

*Cost*: one scan of the process table every EVERY_S, or less often, so that it takes at most MAX_COST of a core.
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
MAX_COST = 0.001  # of one core
THRESHOLD = 0.1  # of the cores, or of the time, above which a symptom is reported
LATE_SHARE = 0.3  # of a step, waiting for data
SWAPPED_PER_S = 100.0  # pages
MIN_NAMED, MAX_NAMED = 0.1, 2  # cores that a program uses to be named; programs named


@dataclass(frozen=True)
class HostSample:
    """The kernel's counters at one moment. *Units*: cumulative seconds; ``spent`` by process."""

    at_s: float
    busy_s: float = 0.0
    stolen_s: float = 0.0
    spent: dict[int, tuple[str, float, int]] = field(default_factory=dict)  # (name, seconds, its last core)
    ours: frozenset[int] = frozenset()
    stopped_s: float = 0.0  # throttled by the cgroup's limit
    memory_s: float = 0.0  # in which some process waited for memory
    swapped: float = 0.0  # pages


class HostHealth:
    """Keeps ``activity.symptoms`` up to date from a thread of its own until `stop`.

    ``roots``: the node's own processes, together with all their descendants. ``root``: the folder of /proc and /sys."""

    def __init__(
        self, activity: Activity, roots: Callable[[], Sequence[int]] = lambda: (os.getpid(),), root: Path = Path("/")
    ):
        self.activity, self.roots, self.root = activity, roots, root
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._limit = _limit_file(root)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline signs", daemon=True)

    def start(self) -> HostHealth:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        cost_s = 0.0
        before = self.sample()
        while not self._stop.wait(max(EVERY_S, cost_s / MAX_COST)):
            begin_s = time.thread_time()
            after = self.sample()
            cost_s = time.thread_time() - begin_s
            self.activity.symptoms = [*self.compare(before, after), *self._data()]
            before = after

    def sample(self) -> HostSample:
        """The counters now; those that cannot be read on this machine are left out."""
        found = HostSample(time.monotonic())
        for part in (self._cores, self._programs, self._stopped, self._memory):
            with contextlib.suppress(OSError, ValueError, IndexError):
                found = replace(found, **part())
        return found

    def _cores(self) -> dict[str, Any]:
        allowed = self.cores()
        busy = stolen = 0
        for line in self._read("proc/stat").splitlines():
            name, *ticks = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in allowed:
                user, nice, system, _, _, _, _, steal, *_ = map(int, ticks)
                busy += user + nice + system  # interrupts belong to no process
                stolen += steal
        return {"busy_s": busy / self._ticks, "stolen_s": stolen / self._ticks}

    def cores(self) -> set[int]:
        """The cores on which the node's processes may run."""
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
                head, _, tail = self._read(f"proc/{name}/stat").rpartition(")")
                fields = tail.split()
                parents[int(name)] = int(fields[1])
                seconds = (int(fields[11]) + int(fields[12])) / self._ticks
                spent[int(name)] = head.partition("(")[2], seconds, int(fields[36])
        ours = {*self.roots(), *(child.pid for child in multiprocessing.active_children() if child.pid)}
        for pid in parents:
            ancestors = list(_ancestors(pid, parents))
            if ours.intersection(ancestors):
                ours.update(ancestors[: next(i for i, each in enumerate(ancestors) if each in ours)])
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

    def compare(self, before: HostSample, after: HostSample) -> list[str]:
        """The symptoms that two samples show, the most severe first."""
        passed_s, cores = after.at_s - before.at_s, self.cores()
        count = len(cores)
        if passed_s <= 0 or not count:
            return []
        gained = {pid: after.spent[pid][1] - before.spent.get(pid, ("", 0.0, 0))[1] for pid in after.spent}
        own_s = sum(seconds for pid, seconds in gained.items() if pid in after.ours)
        others = max(0.0, after.busy_s - before.busy_s - own_s) / passed_s
        stolen = (after.stolen_s - before.stolen_s) / passed_s
        found = []
        if others > THRESHOLD * count:
            others_here = [pid for pid, (_, _, core) in after.spent.items() if core in cores and pid not in after.ours]
            busiest = sorted(others_here, key=gained.__getitem__, reverse=True)[:MAX_NAMED]
            named = [(after.spent[pid][0], pid, gained[pid] / passed_s) for pid in busiest]
            programs = ", ".join(f"{name}, pid {pid}: {used:.1f}" for name, pid, used in named if used > MIN_NAMED)
            text = f"other programs use {others:.1f} of its {count} cores ({programs or 'unseen'})"
            found.append((others / count, text))
        if stolen > THRESHOLD * count:
            found.append((stolen / count, f"its host gave {stolen:.1f} of its {count} cores to others (steal)"))
        if (stopped_s := after.stopped_s - before.stopped_s) > THRESHOLD * passed_s:
            text = f"the processor limit of its cgroup stopped it for {stopped_s:.1f} s of {passed_s:.1f} s"
            found.append((stopped_s / passed_s, text))
        if (memory_s := after.memory_s - before.memory_s) > THRESHOLD * passed_s:
            share = memory_s / passed_s
            found.append((share, f"memory is short: something waited for it in {100 * share:.0f} % of the time"))
        if (swapped := (after.swapped - before.swapped) / passed_s) > SWAPPED_PER_S:
            found.append((1.0, f"memory is short: {swapped:.0f} pages per second go to or from swap"))
        return [text for _, text in sorted(found, reverse=True)]

    def _data(self) -> Iterator[str]:
        step_s, input_s = self.activity.step_s, self.activity.input_s
        if step_s and input_s > LATE_SHARE * step_s:
            yield f"its data comes late: {100 * min(1.0, input_s / step_s):.0f} % of a step is waiting for it"


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """The process, its parent, and so on."""
    for _ in range(len(parents)):
        yield pid
        if pid not in parents:
            return
        pid = parents[pid]


def _limit_file(root: Path) -> Path | None:
    """The file in which the kernel counts for how long this process's cgroup was throttled."""
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
