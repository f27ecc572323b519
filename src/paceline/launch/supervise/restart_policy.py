"""Restart policy: whether a failed run is started again from its newest checkpoint, and after what delay.

A restart helps after transient failures of processes, machines or networks, not after an error of the script. If two
consecutive starts fail with the same error after the same number of steps, the run is not restarted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.launch.signals import RESUME_CODE
from paceline.report.log import log

RESTARTS = 3  # default limit; restarts from before a start that ran for STABLE_AFTER_S are not counted
STABLE_AFTER_S = 3600.0
RETRY_DELAY_S = 1.0  # before the first restart; it doubles with each further one
# the parts of an error that differ from start to start: addresses, ports, process ids, free bytes
NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

Fault = tuple[str, int | None]  # an error, and the number of steps done before it


def fault(code: int, status: Mapping[str, Any]) -> Fault | None:
    """The fault of a process with this exit code and `process_status`; None: other processes failed before it."""
    if status.get("link") or code == RESUME_CODE:
        return None
    return str(status.get("error") or f"exit code {code}"), status.get("step")


@dataclass(frozen=True)
class Ending:
    """How one start of the run ended. ``begun``: a process had joined; ``killed``: a signal ended a process, or its
    machine failed; ``done``: a node had finished the script, so a fault is not retried."""

    code: int
    faults: frozenset[Fault] = frozenset()
    begun: bool = False
    killed: bool = False
    done: bool = False


class Restarts:
    """Counts the restarts of a run: at most ``limit`` in a row."""

    def __init__(self, limit: int):
        self.limit, self._count, self._started_s = limit, 0, time.monotonic()
        self._has_begun, self._previous_faults = False, frozenset[Fault]()

    def after(self, ending: Ending) -> float | None:
        """Seconds to wait before the restart; None: no restart. Logs the restart, or why there is none."""
        begun, previous = self._has_begun or ending.begun, self._previous_faults
        faults = {(NUMBERS.sub("#", error), step): error for error, step in ending.faults}
        self._has_begun, self._previous_faults = begun, frozenset(faults)
        if not self.limit or not ending.code or (ending.done and faults):
            return None
        if not (begun or ending.killed):  # an error that users must fix
            log.error("the run failed before training began: not started again (--restarts)")
            return None
        if repeated := faults.keys() & previous:
            step = next(iter(repeated))[1]
            where = "before its first step" if not step else f"after {step} steps"
            same = faults[next(iter(repeated))]
            log.error(f"the run failed twice {where} with the same error ({same}): not started again")
            return None
        if time.monotonic() - self._started_s > STABLE_AFTER_S:
            self._count = 0
        if self._count == self.limit:
            log.error(f"the run failed with exit code {ending.code}, after {self.limit} restarts (--restarts): it ends")
            return None
        pause_s = RETRY_DELAY_S * 2.0**self._count
        self._count += 1
        self._started_s = time.monotonic() + pause_s
        what = f"the run failed with exit code {ending.code}; it resumes from its newest checkpoint in {pause_s:g} s"
        log.warning(f"{what} (restart {self._count} of {self.limit})")
        return pause_s
