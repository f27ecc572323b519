"""Step observers: hooks that the training step calls; they replace no part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.contract import GlobalBatch
from paceline.messages import Gradient, StepOutcome, UpdateRule, Vote


@dataclass(frozen=True)
class StepSummary:
    """A finished step: its number, outcome, time and traffic.

    ``spent``: parts of ``seconds``, by name. ``sent_bytes``: by this rank. ``facts``: fields that the caller adds.
    """

    step: int
    batch: GlobalBatch
    outcome: StepOutcome
    seconds: float
    spent: dict[str, float]
    sent_bytes: int
    facts: dict[str, Any]


class StepObserver:
    """Called at every step, in every process that has the observer. All observers are called, in a fixed order.

    ``key``: the name under which a joining node receives the observer's `state`; empty for an observer without state.
    """

    key = ""

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """A step begins. Returns the batch, or the part of it that is trained on. ``own``: the batch comes from the
        user's own training loop, which has read it already."""
        return batch

    def reads(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """Called before samples are read, in a step or earlier in the user's own loop. Returns the batch to read."""
        return batch

    def offering(self, offer: Callable[[Gradient], None]) -> Callable[[Gradient], None]:
        """A gradient is about to be computed. Returns the function that receives the gradient of each bucket."""
        return offer

    def votes(self, vote: Vote) -> None:
        """The gradient is computed. ``vote``: this process's vote on the step, which is about to be sent."""

    def again(self, step: int, outcome: StepOutcome) -> None:
        """The step was rolled back, and is computed again next."""

    def applies(self, outcome: StepOutcome, rule: UpdateRule) -> Callable[[], None] | None:
        """Called before a step's update. The returned function is called after the update."""
        return None

    def updated(self, outcome: StepOutcome) -> None:
        """The step is applied, or skipped. May raise, in all processes."""

    def averaged(self) -> None:
        """Local SGD has averaged the weights: all nodes have the same weights again."""

    def ends(self, summary: StepSummary) -> None:
        """The step is over."""

    def state(self) -> Any:
        """The state that a joining node receives."""

    def load(self, state: Any) -> None:
        """Loads the `state` of another node."""
