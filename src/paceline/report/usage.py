"""Resource usage of the machine during training: processors, memory, disks, network, GPUs, once a second.

The values of pidstat and sar, for the run's own processes and for the whole machine. docs/record.md names the fields.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from paceline.report.log import log
from paceline.report.record import Record

MAX_COST = 0.001  # of one core, for each probe: a probe that takes longer runs less often
STOP_S = 2.0
FINAL_S = 0.1
INNER = ("lo", "docker", "veth", "br-", "virbr")  # interfaces that do not leave the machine, or count twice
Fields = dict[str, Any]


class Usage:
    """Writes a ``usage`` event into a record every ``interval_s``, from a thread of its own, until `stop`.

    ``root`` is the process whose tree counts as the run: by default this process, or its parent where a launcher has
    started several processes on this node (LOCAL_WORLD_SIZE). A value that this machine does not provide is absent from
    the events and named in a ``hint``. No error is raised into training.

    *Cost*: below half a percent of one core, by construction: each of four probes (process table, processes, machine,
    PSS) waits a thousand times as long as it took, if that is more than its interval.
    """

    def __init__(self, record: Record, interval_s: float = 1.0, root: int | None = None):
        if not interval_s > 0:
            raise ValueError(f"interval_s must be more than 0 seconds, got {interval_s}")
        launched = os.environ.get("LOCAL_WORLD_SIZE", "1") not in ("", "0", "1")
        self.record, self.interval_s = record, interval_s
        tree = Tree(root or (os.getppid() if launched else os.getpid()))
        self._probes = [
            Probe(max(10.0, interval_s), [tree.scan]),
            Probe(interval_s, [tree.usage]),
            Probe(interval_s, [_Cores(), _memory, _Rates(_disks), _Rates(_network), _Rates(_switches), _gpus]),
            Probe(max(5.0, interval_s), [tree.pss]),
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline usage", daemon=True)

    def start(self) -> Usage:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Takes one last sample and ends the thread. Waits at most STOP_S."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def __enter__(self) -> Usage:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._sample()
            while not self._stop.wait(self.interval_s):
                self._sample()
            self._sample()
        except Exception as error:
            log.warning(f"resource usage is no longer recorded in the event log: {error!r}")

    def _sample(self) -> None:
        now, found = time.monotonic(), Fields()
        for probe in self._probes:
            found |= probe.take(now, self._stop.is_set())
            for hint in probe.hints:
                self.record.write("hint", text=hint)
            probe.hints.clear()
        if found:
            self.record.write("usage", **found)


class Probe:
    """Instruments that are read together, at most every ``every_s`` and as often as their cost allows."""

    def __init__(self, every_s: float, instruments: Iterable[Callable[[float], Fields]]):
        self.every_s, self.instruments, self.hints = every_s, list(instruments), list[str]()
        self.due, self.last = 0.0, 0.0

    def take(self, now: float, final: bool = False) -> Fields:
        """*Units*: ``now`` in monotonic seconds. A final reading is taken early, if the last one is FINAL_S ago."""
        since = now - self.last
        if now < self.due and not (final and since > FINAL_S):
            return {}
        start, found = time.thread_time(), Fields()
        for instrument in list(self.instruments):
            try:
                found |= instrument(since if self.last else 0.0)
            except Exception as error:
                self.instruments.remove(instrument)
                name = getattr(instrument, "__name__", type(instrument).__name__).strip("_").lower()
                self.hints.append(f"usage: {name} cannot be read on this machine ({error!r}); left out from here on")
        # 10 % tolerance: a timer that fires slightly early must not skip a reading
        self.due = now + max(0.9 * self.every_s, (time.thread_time() - start) / MAX_COST)
        self.last = now
        return found


class Tree:
    """Processor time and memory of a process and all its descendants."""

    def __init__(self, root: int):
        self.root = root
        self.spent: dict[psutil.Process, tuple[float, float]] = {}

    def scan(self, since: float) -> Fields:
        """Finds the processes. This is the expensive part, because it reads the whole process table."""
        known, self.spent = self.spent, {}
        try:
            root = psutil.Process(self.root)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return {}
        for process in found:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self.spent[process] = known.get(process, (times.user, times.system))
        return {}

    def usage(self, since: float) -> Fields:
        user = system = 0.0
        rss = 0
        for process, before in list(self.spent.items()):
            try:
                with process.oneshot():
                    times, resident = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                del self.spent[process]
                continue
            self.spent[process] = (times.user, times.system)
            user, system, rss = user + times.user - before[0], system + times.system - before[1], rss + resident
        fields: Fields = {"processes": len(self.spent), "rss_bytes": rss}
        if since:
            fields |= {"cpu_percent": 100 * (user + system) / since, "cpu_system_percent": 100 * system / since}
        return fields

    def pss(self, since: float) -> Fields:
        """Pages shared by k processes count 1/k in each, so the sum is the memory that the run occupies."""
        total = 0
        for process in list(self.spent):
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return {"pss_bytes": total}


class _Rates:
    """Turns cumulative counters into amounts per second; the first reading gives none."""

    def __init__(self, read: Callable[[], dict[str, int]]) -> None:
        self.read, self.__name__ = read, read.__name__
        self.before: dict[str, int] = {}

    def __call__(self, since: float) -> Fields:
        now = self.read()
        before, self.before = self.before, now
        if not before or not since:
            return {}
        return {f"{name}_per_s": max(0, value - before[name]) / since for name, value in now.items()}


def _disks() -> dict[str, int]:
    counted = psutil.disk_io_counters()
    if counted is None:
        raise OSError("no disk is counted")
    return {"disk_read_bytes": counted.read_bytes, "disk_written_bytes": counted.write_bytes}


def _network() -> dict[str, int]:
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if not name.startswith(INNER)]
    return {"net_sent_bytes": sum(c.bytes_sent for c in cards), "net_received_bytes": sum(c.bytes_recv for c in cards)}


def _switches() -> dict[str, int]:
    return {"context_switches": psutil.cpu_stats().ctx_switches}


class _Cores:
    """Share of time in which each core was busy, and the machine's waits for disks (iowait) and its host (steal)."""

    def __init__(self) -> None:
        self.before: list[Any] = []

    def __call__(self, since: float) -> Fields:
        now = psutil.cpu_times(percpu=True)
        before, self.before = self.before, now
        if len(before) != len(now):
            return {}
        spent = [
            {f: max(0.0, getattr(b, f) - getattr(a, f)) for f in b._fields} for a, b in zip(before, now, strict=True)
        ]
        for core in spent:
            core.pop("guest", None), core.pop("guest_nice", None)  # Linux counts them in user and nice already
        idle = [core["idle"] + core.get("iowait", 0.0) for core in spent]
        whole = [sum(core.values()) for core in spent]
        busy = [100 * (1 - i / w) if w else 0.0 for i, w in zip(idle, whole, strict=True)]
        total = sum(whole)
        fields: Fields = {
            "machine_cpu_percent": 100 * (1 - sum(idle) / total) if total else 0.0,
            "core_percents": [round(percent) for percent in busy],
        }
        for name in ("iowait", "steal"):
            if total and name in spent[0]:
                fields[f"{name}_percent"] = 100 * sum(core[name] for core in spent) / total
        return fields


def _memory(since: float) -> Fields:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "memory_used_bytes": memory.total - memory.available,
        "memory_available_bytes": memory.available,
        "swap_used_bytes": swap.used,
    }


def _gpus(since: float) -> Fields:
    """GPU usage, only where training has initialised CUDA: to initialise it here would cost hundreds of MB."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    gpus = []
    for index in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(index):
            continue  # not used by this process: a query would open a context there
        free, total = torch.cuda.mem_get_info(index)
        gpu: Fields = {"gpu": index, "memory_used_bytes": total - free, "memory_bytes": total}
        with contextlib.suppress(Exception):  # needs the package nvidia-ml-py, which is rarely installed
            gpu["percent"] = torch.cuda.utilization(index)
        gpus.append(gpu)
    return {"gpus": gpus}
