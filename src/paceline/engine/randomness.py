"""This process's random state: Python's, PyTorch's, CUDA's and NumPy's, where they are used."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch
from torch import Tensor

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
