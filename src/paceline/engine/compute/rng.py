"""This process's random state: Python's, PyTorch's, CUDA's and NumPy's, where they are used.

Random numbers of its own for each thread that computes a replica, so that equal seeds give equal runs.

PyTorch's default generator belongs to all threads: which of them draws first is chance. Under `ThreadRng`
every function that draws does so from this thread's state, one thread at a time.

Not had: masks equal to one process's (they never are when a batch is computed in parts), Python's and
numpy's generators inside forward, and activation checkpointing with dropout, which sets the default
generator itself. On a GPU of its own a replica draws from that GPU's generator, and needs none of this.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NUMPY_BYTES = 4 * 624 + 4  # of the generator behind numpy.random: its words, and where in them it is

_seen: dict[bytes, Any] = {}


def state() -> Any:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking more would start CUDA
    cuda = torch.cuda.get_rng_state_all() if on_gpu else None
    return random.getstate(), torch.get_rng_state(), cuda, _numpy_state(sys.modules.get("numpy"))


def _numpy_state(numpy: Any) -> Any:
    """Asking NumPy takes longer than a small step does, so the last answer holds while its memory says the same."""
    if not numpy:
        return None
    generator: Any = getattr(numpy.random, "get_bit_generator", lambda: None)()
    if type(generator).__name__ != "MT19937":
        return numpy.random.get_state()
    words = ctypes.string_at(generator.ctypes.state_address, NUMPY_BYTES)
    if words not in _seen:
        _seen.clear()
        found = numpy.random.get_state()
        if found[3]:  # a normal number lies ready: using it up would not show in the words
            return found
        _seen[words] = found
    return _seen[words]


def seed(number: int) -> None:
    """As torch.manual_seed, which notes for each kind of device that is not in use who has asked: that takes longer
    than a small step does."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


def set_state(kept: Any) -> None:
    python, cpu, cuda, numpy_state = kept
    random.setstate(python)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    if numpy_state:
        sys.modules["numpy"].random.set_state(numpy_state)


def to_json(kept: Any) -> Any:
    """A random state as JSON can hold it."""
    (version, words, gauss), cpu, cuda, numpy_state = kept
    return {
        "python": [version, list(words), gauss],
        "torch": cpu.numpy().tobytes().hex(),
        "cuda": [one.numpy().tobytes().hex() for one in cuda or ()],
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]] if numpy_state else None,
    }


def of_json(plain: Any) -> Any:
    def tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, words, gauss = plain["python"]
    cuda = [tensor(text) for text in plain["cuda"]] or None
    return (version, tuple(words), gauss), tensor(plain["torch"]), cuda, plain["numpy"] and tuple(plain["numpy"])


NAMES = """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d dropout3d dropout_
    exponential_ feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d geometric_ gru
    gumbel_softmax log_normal_ lstm multi_head_attention_forward multinomial normal normal_ poisson rand rand_like
    randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu rrelu_ scaled_dot_product_attention
    uniform_
"""
DRAWS = frozenset(NAMES.split())
_turn = threading.Lock()


class ThreadRng(TorchFunctionMode):
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
