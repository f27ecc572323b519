"""This process's random state: Python's, PyTorch's, CUDA's and NumPy's, where they are used."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor


def state() -> Any:
    numpy = sys.modules.get("numpy")
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking more would start CUDA
    cuda = torch.cuda.get_rng_state_all() if on_gpu else None
    return random.getstate(), torch.get_rng_state(), cuda, numpy and numpy.random.get_state()


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
