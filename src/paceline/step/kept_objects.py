"""Objects of the script with a state of their own, which are saved and restored with the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class KeptObjects:
    """By name. A state that was restored waits for its object."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, thing: Any, check: Callable[[Any], object]) -> None:
        """``check`` raises ValueError for a state that cannot be saved. Raises ValueError."""
        if isinstance(thing, type) or not all(
            callable(getattr(thing, m, None)) for m in ("state_dict", "load_state_dict")
        ):
            raise ValueError(
                f"keep({name}=...) takes an object with state_dict() and load_state_dict(), got {_described(thing)}"
            )
        if self._objects.get(name, thing) is not thing:
            raise ValueError(f"keep({name}=...) was called before with another object; give this one another name")
        check(thing.state_dict())
        self._objects[name] = thing
        if name in self._waiting:
            self._load(name, self._waiting.pop(name))

    def state(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._objects.items()}

    def load(self, states: dict[str, Any]) -> list[str]:
        """Returns the names without a state, whose objects stay as they are."""
        self._waiting = {name: state for name, state in states.items() if name not in self._objects}
        for name in self._objects.keys() & states.keys():
            self._load(name, states[name])
        return sorted(self._objects.keys() - states.keys())

    def _load(self, name: str, state: Any) -> None:
        try:
            self._objects[name].load_state_dict(state)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"the state that was saved of keep({name}=...) does not fit {_described(self._objects[name])}: {error}"
            ) from error


def _described(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
