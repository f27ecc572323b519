"""What a plan is doing, on stderr: a bar over the configurations, and each one's time as soon as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paceline.planner.choose import Candidate, speedup


class Measuring:
    """``lines``: also where stderr is no terminal."""

    def __init__(self, lines: bool = False):
        screen = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn()
        self._bar = Progress(*columns, TimeElapsedColumn(), console=screen, transient=True)
        self._task = self._bar.add_task("measuring", total=None)
        self._lines = lines or screen.is_terminal

    def __enter__(self) -> Measuring:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, doing: str) -> None:
        self._bar.update(self._task, description=doing)

    def tell(self, one: Candidate, all_of_them: Sequence[Candidate], number: int, total: int) -> None:
        """``one`` was tried, as the ``number``th of ``total``."""
        self._bar.update(self._task, completed=number, total=total)
        if self._lines and one.trial:
            self._bar.console.print(line(one, all_of_them[0]), markup=False)


def line(one: Candidate, base: Candidate) -> str:
    if not one.ran:
        return f"{one.engine}: {one.trial.error if one.trial else 'not tried'}"
    gain = speedup(one, base)
    times = f", {gain:.2f}x" if gain else ""
    return f"{one.engine}: {one.step_s:.4g} s per step{times}"
