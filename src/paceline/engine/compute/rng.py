"""Random state: the process's (of Python, PyTorch, CUDA and NumPy, where they are used), and one per replica thread.

PyTorch's default generator is shared by all threads, and the order of their draws is random. Under `ThreadRng`
every function that draws uses this thread's own state, one thread at a time, so equal seeds give equal runs.

Not supported: dropout masks equal to those of one process (they never are when a batch is computed in parts),
Python's and NumPy's generators inside forward, and activation checkpointing with dropout, which sets the default
generator itself.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NUMPY_BYTES = 4 * 624 + 4  # of the generator behind numpy.random: its state words, and the position in them

_seen: dict[bytes, Any] = {}


def state() -> Any:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # any other query would initialise CUDA
    cuda = torch.cuda.get_rng_state_all() if on_gpu else None
    return random.getstate(), torch.get_rng_state(), cuda, _numpy_state(sys.modules.get("numpy"))


def _numpy_state(numpy: Any) -> Any:
    """NumPy's get_state takes longer than a small step, so its last result is reused while the memory is unchanged."""
    if not numpy:
        return None
    generator: Any = getattr(numpy.random, "get_bit_generator", lambda: None)()
    if type(generator).__name__ != "MT19937":
        return numpy.random.get_state()
    words = ctypes.string_at(generator.ctypes.state_address, NUMPY_BYTES)
    if words not in _seen:
        _seen.clear()
        found = numpy.random.get_state()
        if found[3]:  # a cached normal number: its use would not show in the words
            return found
        _seen[words] = found
    return _seen[words]


def seed(number: int) -> None:
    """As torch.manual_seed, but without its work for devices that are not in use: it records a traceback for each,
    which takes longer than a small step."""
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
    """A random state in JSON types."""
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
_drawing = threading.Lock()


class ThreadRng(TorchFunctionMode):
    """While entered, this thread's draws come from ``seed``: on the CPU, and on GPUs among ``devices``."""

    def __init__(self, seed: int, devices: Iterable[torch.device] = ()):
        super().__init__()
        gpus = sorted({device.index for device in devices if device.type == "cuda"})
        self._shared = [torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)]
        self._states = [torch.Generator(each.device).manual_seed(seed).get_state() for each in self._shared]

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **(kwargs or {}))
        with _drawing:
            before = [generator.get_state() for generator in self._shared]
            self._set(self._states)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._states = [generator.get_state() for generator in self._shared]
                self._set(before)

    def _set(self, states: Iterable[Tensor]) -> None:
        for generator, state in zip(self._shared, states, strict=True):
            generator.set_state(state)


def seeds(count: int) -> list[int]:
    """One for each of ``count`` threads, drawn from the default generator."""
    return [int(seed) for seed in torch.randint(1 << 62, (count,))]
