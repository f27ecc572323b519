"""Several optimizers of one model, as one: such as Muon for matrices beside AdamW for all else.

They keep their groups, which the whole has in common with them, and share one table of states. A step of the whole is
one of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer


class SeveralOptimizers(Optimizer):
    """Raises ValueError if two of them have a parameter in common."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers, self._steps = list(optimizers), False
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.state = defaultdict(dict, {p: state for each in optimizers for p, state in each.state.items()})
        for number, each in enumerate(optimizers):
            each.register_step_pre_hook(self._refuse_own)
            each.state_dict = partial(self._state_of, number)  # type: ignore[method-assign]
        self._share()

    def _share(self) -> None:
        start = 0
        for each in self.optimizers:
            end = start + len(each.param_groups)
            each.param_groups, each.state, start = self.param_groups[start:end], self.state, end

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self._steps = True
        try:
            for each in self.optimizers:
                each.step(closure)
        finally:
            self._steps = False

    def _refuse_own(self, one: Optimizer, *_: Any) -> None:
        if not self._steps:
            raise RuntimeError(
                f"{type(one).__name__}.step() was called beside pace.step (or pace.update), which makes the step of "
                f"every optimizer that join was given; leave it out"
            )

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)  # which makes new groups and a new table
        self._share()

    def _state_of(self, number: int) -> dict[str, Any]:
        """The state of one of them, as it would be without the others."""
        whole, before = self.state_dict(), sum(len(each.param_groups) for each in self.optimizers[:number])
        groups = whole["param_groups"][before : before + len(self.optimizers[number].param_groups)]
        places = {place: new for new, place in enumerate(place for group in groups for place in group["params"])}
        return {
            "state": {places[place]: state for place, state in whole["state"].items() if place in places},
            "param_groups": [{**group, "params": [places[place] for place in group["params"]]} for group in groups],
        }


def as_one(given: Any) -> Any:
    """A list of optimizers as one optimizer; anything else as it is. Raises ValueError as `SeveralOptimizers` does."""
    several = isinstance(given, list | tuple) and given and all(isinstance(each, Optimizer) for each in given)
    if not several:
        return given
    try:
        return given[0] if len(given) == 1 else SeveralOptimizers(given)
    except ValueError as error:
        raise ValueError(f"join: the optimizers cannot be used together: {error}") from None
