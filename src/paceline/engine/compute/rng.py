"""Random state: the process's (of Python, PyTorch, CUDA and NumPy, where they are used), and one per replica thread.

PyTorch's default generator is shared by all threads, and the order of their draws is random. Under `ThreadRng`
every function that draws uses this thread's own state, one thread at a time, so equal seeds give equal runs.

There `torch.get_rng_state`, `torch.set_rng_state` and `torch.manual_seed` are of that state too: activation
checkpointing draws the masks of forward again by them.

Not supported: dropout masks equal to those of one process (they never are when a batch is computed in parts),
Python's and NumPy's generators inside forward, and draws of a script's own threads meanwhile. Refused: checkpointing
of random state in replicas on GPUs.

A generator's state is read without garbage collection: torch holds the generator's lock meanwhile, and a destructor
lets another thread run, which waits for that lock and keeps the interpreter's own.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from paceline.data.collection import collection_off

NUMPY_BYTES = 4 * 624 + 4  # of the generator behind numpy.random: its state words, and the position in them

_seen: dict[bytes, Any] = {}


def state() -> Any:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # any other query would initialise CUDA
    cuda = torch.cuda.get_rng_state_all() if on_gpu else None
    with collection_off():
        cpu = torch.get_rng_state()
    return random.getstate(), cpu, cuda, _numpy_state(sys.modules.get("numpy"))


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
    _sample_dirichlet _standard_gamma alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout
    dropout1d dropout2d dropout3d dropout_ exponential_ feature_alpha_dropout feature_dropout fractional_max_pool2d
    fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices geometric_ gru
    gumbel_softmax kaiming_uniform_ log_normal_ lstm multi_head_attention_forward multinomial native_dropout normal
    normal_ poisson rand rand_like randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu
    rrelu_ rrelu_with_noise rrelu_with_noise_ scaled_dot_product_attention uniform_
"""
DRAWS = frozenset(NAMES.split())
_drawing = threading.Lock()
_entered = threading.local()


class ThreadRng(TorchFunctionMode):
    """While entered, this thread's draws come from ``seed``: on the CPU, and on GPUs among ``devices``."""

    def __init__(self, seed: int, devices: Iterable[torch.device] = ()):
        super().__init__()
        gpus = sorted({device.index for device in devices if device.type == "cuda"})
        shared = [torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)]
        self._shared, self._states = shared, list[Tensor]()
        self._before: list[ThreadRng | None] = []
        self.seed(seed)
        _install()

    def seed(self, seed: int) -> torch.Generator:
        self._states = [torch.Generator(each.device).manual_seed(int(seed)).get_state() for each in self._shared]
        return self._shared[0]

    def state(self) -> Tensor:
        return self._states[0].clone()

    def set_state(self, new_state: Tensor) -> None:
        self._states[0] = new_state.clone()

    @property
    def on_gpu(self) -> bool:
        return len(self._shared) > 1

    def __enter__(self) -> ThreadRng:
        self._before.append(_own())
        _entered.rng = self
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        _entered.rng = self._before.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "").partition(".")[0] not in DRAWS:
            return func(*args, **(kwargs or {}))
        with _drawing:
            before = self._read()
            self._set(self._states)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._states = self._read()
                self._set(before)

    def _read(self) -> list[Tensor]:
        with collection_off():
            return [generator.get_state() for generator in self._shared]

    def _set(self, states: Iterable[Tensor]) -> None:
        for generator, state in zip(self._shared, states, strict=True):
            generator.set_state(state)


def _own() -> ThreadRng | None:
    return getattr(_entered, "rng", None)


@cache
def _install() -> None:
    """Once. Where a thread has states of its own, the functions that get, set or seed the default generator's do so to
    these; and in backward, around which torch takes the mode away, it is entered again for what draws there."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @wraps(run)
    def run_backward(*args: Any, **named: Any) -> Any:
        rng = _own()
        entered = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        with rng if rng and rng not in entered else nullcontext():
            return run(*args, **named)

    autograd._engine_run_backward = run_backward
    for homes, name, own in (
        ((torch, torch.random), "get_rng_state", ThreadRng.state),
        ((torch, torch.random), "set_rng_state", ThreadRng.set_state),
        ((torch, torch.random), "manual_seed", ThreadRng.seed),
        ((torch.cuda, torch.cuda.random), "get_rng_state", _refuse),
    ):
        _replace(homes, name, own)


def _replace(homes: Sequence[Any], name: str, own: Callable[..., Any]) -> None:
    common = getattr(homes[0], name)

    @wraps(common)
    def replaced(*args: Any, **named: Any) -> Any:
        rng = _own()
        if rng is None or (own is _refuse and not rng.on_gpu):
            return common(*args, **named)
        return own(rng, *args, **named)

    for home in homes:
        setattr(home, name, replaced)


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(
        "activation checkpointing in replicas or stages on GPUs would draw other masks in backward than in forward, "
        "since a thread's random state there is not the GPU's; pass preserve_rng_state=False where the segment draws "
        "nothing, or use another engine"
    )


def seeds(count: int) -> list[int]:
    """One for each of ``count`` threads, drawn from the default generator."""
    return [int(seed) for seed in torch.randint(1 << 62, (count,))]
