"""Restart policy: whether a failed run is started again from its newest checkpoint, and after how long.

What has killed processes, machines or networks may pass. An error of the script does not: where the same one ends two
starts in a row, after the same number of steps, it ends the run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.launch.signals import RESUME_CODE
from paceline.report.log import log

RESTARTS = 3  # of a run, as long as it does not train for STABLE_AFTER_S in between
STABLE_AFTER_S = 3600.0
RETRY_DELAY_S = 1.0  # before the first; before each later one twice as long
# what differs from start to start in an error: addresses, ports, process ids, free bytes
NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

Fault = tuple[str, int | None]  # an error, and after how many steps


def fault(code: int, said: Mapping[str, Any]) -> Fault | None:
    """Of a process that ended with this exit code and reported this (`process_status`); None: others were lost."""
    if said.get("link") or code == RESUME_CODE:
        return None
    return str(said.get("error") or f"exit code {code}"), said.get("step")


@dataclass(frozen=True)
class Ending:
    """How a start of the run ended. ``begun``: a process had joined; ``killed``: one was ended by a signal, or its
    machine was lost; ``done``: a node had finished the script, so only what is lost is resumed, not what fails."""

    code: int
    faults: frozenset[Fault] = frozenset()
    begun: bool = False
    killed: bool = False
    done: bool = False


class Restarts:
    """At most ``most`` of them."""

    def __init__(self, most: int):
        self.most, self._count, self._began_s = most, 0, time.monotonic()
        self._begun, self._before = False, frozenset[Fault]()

    def after(self, ending: Ending) -> float | None:
        """Seconds to wait before the next start; None: there is none, and a line says why."""
        begun, before = self._begun or ending.begun, self._before
        faults = {(NUMBERS.sub("#", error), step): error for error, step in ending.faults}
        self._begun, self._before = begun, frozenset(faults)
        # a script that fails before it has joined has an error that users must fix
        if not self.most or not ending.code or (ending.done and faults) or not (begun or ending.killed):
            return None
        if again := faults.keys() & before:
            step = next(iter(again))[1]
            where = "before its first step" if not step else f"after {step} steps"
            same = faults[next(iter(again))]
            log.error(f"the run failed twice {where} with the same error ({same}): not started again")
            return None
        if time.monotonic() - self._began_s > STABLE_AFTER_S:
            self._count = 0
        if self._count == self.most:
            log.error(f"the run failed with exit code {ending.code}, after {self.most} restarts (--restarts): it ends")
            return None
        pause_s = RETRY_DELAY_S * 2.0**self._count
        self._count += 1
        self._began_s = time.monotonic() + pause_s
        what = f"the run failed with exit code {ending.code}; it resumes from its newest checkpoint in {pause_s:g} s"
        log.warning(f"{what} (restart {self._count} of {self.most})")
        return pause_s
