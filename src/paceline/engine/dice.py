"""Random numbers of its own for each thread that computes a replica, so that equal seeds give equal runs.

PyTorch's default generator belongs to all threads: which of them draws first is chance. Under `Dice`
every function that draws does so from this thread's state, one thread at a time.

Not had: masks equal to one process's (they never are when a batch is computed in parts), Python's and
numpy's generators inside forward, and activation checkpointing with dropout, which sets the default
generator itself. On a GPU of its own a replica draws from that GPU's generator, and needs none of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NAMES = """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d dropout3d dropout_
    exponential_ feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d geometric_ gru
    gumbel_softmax log_normal_ lstm multi_head_attention_forward multinomial normal normal_ poisson rand rand_like
    randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu rrelu_ scaled_dot_product_attention
    uniform_
"""
DRAWS = frozenset(NAMES.split())
_turn = threading.Lock()


class Dice(TorchFunctionMode):
    """While entered, this thread's draws come from ``seed``."""

    def __init__(self, seed: int):
        super().__init__()
        self._state: Tensor = torch.Generator().manual_seed(seed).get_state()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **(kwargs or {}))
        with _turn:
            before = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._state = torch.get_rng_state()
                torch.set_rng_state(before)


def seeds(count: int) -> list[int]:
    """One for each of ``count`` threads, drawn from the default generator."""
    return [int(seed) for seed in torch.randint(1 << 62, (count,))]
