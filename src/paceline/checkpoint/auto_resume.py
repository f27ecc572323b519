"""Automatic resume: a restarted run loads its newest checkpoint, also where its script does not call `restore`.

PACELINE_RESUME=1, set by the launcher, requests this. The first call of `batches` in any join restores all joins that
exist by then. A script that calls `restore` on one of them must restore the others itself. Calls of `batches` that had
ended before the checkpoint yield nothing. A checkpoint of a later join is restored by that join; so the training before
it in the script is repeated.
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


_pending: list[Joined] = []  # joins that have not restored a checkpoint yet
_numbers = itertools.count()
_random: dict[int, Any] = {}  # random state by the join's number, as restored from its checkpoint
_by_script: list[bool] = []  # not empty once the script has called `restore`


def register(pace: Joined, late: bool) -> None:
    """Numbers a join, in the order of the script. Raises ValueError for an invalid value of the variable."""
    pace.run.number = next(_numbers)
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} is neither 1 nor 0; set it to one of these, or unset it")
    if value == "1" and not (_by_script or pace.run.watched or late):
        _pending.append(pace)


def on_script_restore(pace: Joined, found: bool) -> None:
    """Called when the script calls `restore`: cancels the automatic resume."""
    if not (_by_script or found) and pace in _pending:
        _report(pace.run, "the script's restore() found no checkpoint: the run begins at step 0")
    _by_script.append(True)
    _pending.clear()


def begin() -> None:
    """Restores all pending joins when the data begin. Collective: every process calls it with the same joins."""
    paces = _pending.copy()
    _pending.clear()
    for pace in paces:
        run = pace.run
        if run.folder is None:
            _report(run, "there is no checkpoint, since the run has no folder (--out): it begins at step 0")
        elif pace.resume_unasked():
            _random[run.number] = rng.state()
            _report(run, f"resumed from the checkpoint of step {run.num_steps} in {run.folder}", logging.INFO)
        else:
            _report(run, f"there is no checkpoint of this training in {run.folder}: it begins at step 0")


def restore_random(run: RunState) -> None:
    """Resets the random state to that of the checkpoint, at the call of `batches` in which the checkpoint was made."""
    if (random := _random.pop(run.number, None)) is not None:
        rng.set_state(random)


def on_step_without_data(pace: Joined) -> None:
    """A step without `batches`: only the script could know the position in its data, so this join is not resumed."""
    if pace in _pending:
        _pending.remove(pace)
        _report(
            pace.run,
            "not resumed, since this loop does not use pace.batches(): begins at step 0; call pace.restore() in it",
        )


def _report(run: RunState, text: str, level: int = logging.WARNING) -> None:
    if run.leader:
        log.log(level, text)
        run.record.write("hint", text=text)
