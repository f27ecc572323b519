"""Random state derived from numbers, for code that draws from the global generators."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*numbers: int) -> None:
    """Seeds torch, NumPy and `random` from ``numbers``."""
    words = np.random.SeedSequence(numbers).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


class OwnRng:
    """In its ``with`` blocks the global generators have its own state, which persists from block to block."""

    def __init__(self, *numbers: int):
        outside = _state()
        seed_all(*numbers)
        self._inside = _state()
        _restore(outside)

    def __enter__(self) -> None:
        self._outside = _state()
        _restore(self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = _state()
        _restore(self._outside)


_State = tuple[torch.Tensor, object, object]


def _state() -> _State:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(state: _State) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])  # type: ignore[arg-type]
    random.setstate(state[2])  # type: ignore[arg-type]
