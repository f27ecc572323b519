"""A node held to a part of its core's time: a CPU quota of a control group, or stopped and continued.

Version 1 or 2 of control groups, whichever has the processor here. Where neither can be written, the process is stopped
for its part of every 20 ms instead, which also stops what a quota would let run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_S = 0.02


@contextlib.contextmanager
def held(pid: int, fraction: float) -> Iterator[str]:
    """Gives how it is held, in words. ``fraction``: of one core."""
    with contextlib.ExitStack() as stack:
        try:
            how = stack.enter_context(_quota(pid, fraction))
        except OSError:
            how = stack.enter_context(_duty(pid, fraction))
        yield how


@contextlib.contextmanager
def _quota(pid: int, fraction: float) -> Iterator[str]:
    """Raises OSError where no group can be made."""
    version, root = _mounted()
    group = root / f"paceline-{os.getpid()}-{pid}"
    group.mkdir()
    period_us = round(PERIOD_S * 1e6)
    try:
        if version == 1:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(round(fraction * period_us)))
        else:
            (group / "cpu.max").write_text(f"{round(fraction * period_us)} {period_us}")
        (group / "cgroup.procs").write_text(str(pid))
        yield f"CPU quota of {fraction:.0%} of a core, control groups version {version}"
    finally:
        with contextlib.suppress(OSError):
            (root / "cgroup.procs").write_text(str(pid))
        for _ in range(50):  # a process that has ended leaves its group a little later
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


def _mounted() -> tuple[int, Path]:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, words = line.split()[:4]
        if kind == "cgroup" and "cpu" in words.split(","):
            return 1, Path(place)
    for place in re.findall(r"^\S+ (\S+) cgroup2 ", Path("/proc/mounts").read_text(), re.MULTILINE):
        root = Path(place)
        if "cpu" in (root / "cgroup.controllers").read_text().split():
            (root / "cgroup.subtree_control").write_text("+cpu")
            return 2, root
    raise OSError("no control group has the processor here")


@contextlib.contextmanager
def _duty(pid: int, fraction: float) -> Iterator[str]:
    done = threading.Event()

    def turn() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not done.wait(fraction * PERIOD_S):
                os.kill(pid, signal.SIGSTOP)
                done.wait((1 - fraction) * PERIOD_S)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    try:
        yield f"stopped for {1 - fraction:.0%} of every {PERIOD_S * 1e3:.0f} ms (no control group can be written here)"
    finally:
        done.set()
        thread.join()
