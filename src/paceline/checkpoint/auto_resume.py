"""A run that was started again resumes from its newest checkpoint, also where its script does not call `restore`.

PACELINE_RESUME=1 asks for that; the launcher sets it. It happens when the first `batches` of any join begins, for all
joins that are there then; a script that calls `restore` of one of them restores all by itself. Calls of `batches` that
had ended before the checkpoint give nothing. A checkpoint of a later join than the first is restored by that join: what
a script trains before is trained again.
"""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any, Protocol

from paceline.engine.compute import rng
from paceline.report.log import log
from paceline.step.run_state import RunState

VARIABLE = "PACELINE_RESUME"


class Joined(Protocol):
    """What a script has joined (`pace.Pace`)."""

    run: RunState

    def resume_unasked(self) -> bool: ...


_waiting: list[Joined] = []  # have joined, and restored nothing yet
_numbers = itertools.count()
_random: dict[int, Any] = {}  # by the join's number, after its checkpoint was restored
_by_script: list[bool] = []  # something, once the script has called `restore`


def enlist(pace: Joined, late: bool) -> None:
    """A join, in the order of the script. Raises ValueError for another value of the variable."""
    pace.run.number = next(_numbers)
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={said!r} is neither 1 nor 0; set it to one of these, or unset it")
    if said == "1" and not (_by_script or pace.run.watched or late):
        _waiting.append(pace)


def by_script(pace: Joined, found: bool) -> None:
    """The script has called `restore`."""
    if not (_by_script or found) and pace in _waiting:
        _say(pace.run, "the script's restore() found no checkpoint: the run begins at step 0")
    _by_script.append(True)
    _waiting.clear()


def begin() -> None:
    """The data begin. Every process must call it, with the same joins."""
    paces = _waiting.copy()
    _waiting.clear()
    for pace in paces:
        run = pace.run
        if run.folder is None:
            _say(run, "there is no checkpoint, since the run has no folder (--out): it begins at step 0")
        elif pace.resume_unasked():
            _random[run.number] = rng.state()
            _say(run, f"resumed from the checkpoint of step {run.num_steps} in {run.folder}", logging.INFO)
        else:
            _say(run, f"there is no checkpoint of this training in {run.folder}: it begins at step 0")


def arrive(run: RunState) -> None:
    """At the call of `batches` that the checkpoint was made in: what the script has drawn on the way is taken back."""
    if (random := _random.pop(run.number, None)) is not None:
        rng.set_state(random)


def missed(pace: Joined) -> None:
    """A step without `batches`: where its data stand, the script alone could say."""
    if pace in _waiting:
        _waiting.remove(pace)
        _say(
            pace.run,
            "not resumed, since this loop takes no pace.batches(): begins at step 0; call pace.restore() in it",
        )


def _say(run: RunState, what: str, level: int = logging.WARNING) -> None:
    if run.leader:
        log.log(level, what)
        run.record.write("hint", text=what)
