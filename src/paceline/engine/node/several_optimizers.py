"""Several optimizers of one model, as one: such as Muon for matrices beside AdamW for all else.

The whole has their groups, and one table of states for all. A step of the whole is one of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from torch.optim import Optimizer


class SeveralOptimizers(Optimizer):
    """Until `separate`, each one's ``state_dict`` is what it would be alone. Raises ValueError if two of them have a
    parameter in common, or if one has a ``state_dict`` of its own kind."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        for each in optimizers:
            if (before := vars(each).get("_whole")) is not None:
                before.separate()
            own = type(each).state_dict, type(each).load_state_dict
            if own != (Optimizer.state_dict, Optimizer.load_state_dict):
                raise ValueError(f"{type(each).__name__} has a state_dict of its own kind, which only it can load")
        self.optimizers = list(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.state = defaultdict(dict, {key: state for each in optimizers for key, state in each.state.items()})
        for number, each in enumerate(optimizers):
            vars(each).update(_whole=self, state_dict=partial(self._state_of, number))
            vars(each).update(load_state_dict=_refuse, add_param_group=_refuse)
        self._share()

    def _share(self) -> None:
        start = 0
        for each in self.optimizers:
            end = start + len(each.param_groups)
            each.param_groups, each.state, start = self.param_groups[start:end], self.state, end

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)  # which makes new groups and a new table
        self._share()

    def _state_of(self, number: int) -> dict[str, Any]:
        whole, before = self.state_dict(), sum(len(each.param_groups) for each in self.optimizers[:number])
        groups = whole["param_groups"][before : before + len(self.optimizers[number].param_groups)]
        places = {place: new for new, place in enumerate(place for group in groups for place in group["params"])}
        return {
            "state": {places[place]: state for place, state in whole["state"].items() if place in places},
            "param_groups": [{**group, "params": [places[place] for place in group["params"]]} for group in groups],
        }

    def separate(self) -> None:
        """Each is by itself again, with the state that it has now."""
        for each in self.optimizers:
            own = {parameter for group in each.param_groups for parameter in group["params"]}
            each.state = defaultdict(dict, {key: state for key, state in self.state.items() if key in own})
            for name in ("_whole", "state_dict", "load_state_dict", "add_param_group"):
                vars(each).pop(name, None)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "load_state_dict() or add_param_group() of one of several optimizers was called after join(); call it before "
        "join(), or pace.restore(folder)"
    )


def as_one(given: Any) -> Any:
    """A list of optimizers as one optimizer; anything else as it is. Raises ValueError as `SeveralOptimizers` does."""
    several = isinstance(given, list | tuple) and given and all(isinstance(each, Optimizer) for each in given)
    if not several:
        return given
    try:
        return given[0] if len(given) == 1 else SeveralOptimizers(given)
    except ValueError as error:
        raise ValueError(f"join: the optimizers cannot be used together: {error}") from None


def separate(optimizer: Any) -> None:
    if isinstance(optimizer, SeveralOptimizers):
        optimizer.separate()


def members(optimizer: Any) -> list[Any]:
    """Those that it consists of, or itself."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def kind_of(optimizer: Any) -> str:
    """The name of its class, or of all: "Muon+AdamW"."""
    return "+".join(type(each).__name__ for each in members(optimizer))
