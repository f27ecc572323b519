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
        return {str(number): each.state_dict() for number, each in enumerate(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if it is of another number of schedulers."""
        if len(state) != len(self.schedulers):
            raise ValueError(f"the saved state is of {len(state)} schedulers, and there are {len(self.schedulers)}")
        for number, each in enumerate(self.schedulers):
            each.load_state_dict(state[str(number)])


def as_one(given: Any) -> Any:
    """A list of schedulers as one; anything else as it is."""
    if not isinstance(given, list | tuple) or not given:
        return given
    return given[0] if len(given) == 1 else SeveralSchedulers(given)
