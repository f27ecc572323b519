"""What a script's launcher is told (`report/process_status.py`): that it trains, its steps, and what ended it."""

from __future__ import annotations

import sys
from types import TracebackType

from paceline.ddp.lost_ranks import FAILED
from paceline.report import process_status


class Ending:
    """One for each process. ``steps``: forward passes of training that have begun."""

    def __init__(self) -> None:
        self.steps, self._before = 0, sys.__excepthook__

    def watch(self) -> None:
        """A model is wrapped: what ends the process from now on is told."""
        process_status.report(joined=True)
        if sys.excepthook != self._told:
            self._before, sys.excepthook = sys.excepthook, self._told

    def _told(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        process_status.failed(error, self.steps, link=any(words in str(error) for words in FAILED))
        self._before(kind, error, trace)


of_process = Ending()
