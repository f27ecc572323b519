"""Step observers: hooks that the training step calls, and that replace no part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.contract import GlobalBatch
from paceline.messages import Gradient, StepOutcome, UpdateRule, Vote


@dataclass(frozen=True)
class StepSummary:
    """A step that is over: its number, what came of it, and what it took.

    ``spent``: parts of ``seconds``, by name. ``sent_bytes``: by this rank. ``facts``: what the caller adds.
    """

    step: int
    batch: GlobalBatch
    outcome: StepOutcome
    seconds: float
    spent: dict[str, float]
    sent_bytes: int
    facts: dict[str, Any]


class StepObserver:
    """Told of every step, in every process that has it; all are told in one order, and none stands in for another.

    ``key``: under which a node that joins late is handed its `state`; empty: it has none.
    """

    key = ""

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """A step begins. Returns the batch, or as much of it as this training takes. ``own``: of a loop of the user's
        own, which has read it before."""
        return batch

    def reads(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """Rows of a batch are about to be read: in a step, or before it by a loop of the user's own. Returns the batch,
        or as this training sees it."""
        return batch

    def offering(self, offer: Callable[[Gradient], None]) -> Callable[[Gradient], None]:
        """A gradient is about to be computed. Returns what takes its buckets' gradients."""
        return offer

    def votes(self, vote: Vote) -> None:
        """The gradient is computed; what this process is about to say of the step."""

    def again(self, step: int, outcome: StepOutcome) -> None:
        """All is as before the step, which is computed again next."""

    def applies(self, outcome: StepOutcome, rule: UpdateRule) -> Callable[[], None] | None:
        """Before a step's update; what is returned is called once it was applied."""
        return None

    def updated(self, outcome: StepOutcome) -> None:
        """The step is applied, or skipped. May raise, in all processes."""

    def averaged(self) -> None:
        """All nodes have the same weights again, where they do not agree on every step."""

    def ends(self, summary: StepSummary) -> None:
        """The step is over."""

    def state(self) -> Any:
        """What a node that joins late must know."""

    def load(self, state: Any) -> None:
        """What `state` gave elsewhere."""
