"""Learning rate schedulers of several optimizers, as one: each is stepped once per applied step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SeveralSchedulers:
    def __init__(self, schedulers: Sequence[Any]):
        self.schedulers = list(schedulers)

    def step(self) -> None:
        for each in self.schedulers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [each.state_dict() for each in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, own in zip(self.schedulers, state["schedulers"], strict=True):
            each.load_state_dict(own)


def as_one(given: Any) -> Any:
    """A list of schedulers as one; anything else as it is."""
    if not isinstance(given, list | tuple) or not given:
        return given
    return given[0] if len(given) == 1 else SeveralSchedulers(given)
