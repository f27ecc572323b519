"""Reports to the launcher (`report/process_status.py`): that a script trains, its steps, the error that ended it."""

from __future__ import annotations

import sys
from types import TracebackType

from paceline.ddp.lost_ranks import FAILED
from paceline.report import process_status


class ExitReport:
    """One for each process. ``steps``: forward passes of training that have begun."""

    def __init__(self) -> None:
        self.steps, self._before = 0, sys.__excepthook__

    def install(self) -> None:
        """Once a model is wrapped: errors that end the process are reported from now on."""
        process_status.report(joined=True)
        if sys.excepthook != self._hook:
            self._before, sys.excepthook = sys.excepthook, self._hook

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        process_status.failed(error, self.steps, link=any(words in str(error) for words in FAILED))
        self._before(kind, error, trace)


of_process = ExitReport()
