"""Random state: the process's (of Python, PyTorch, CUDA and NumPy, where they are used), and one per replica thread.

PyTorch's default generator is shared by all threads, and the order of their draws is random. Under `ThreadRng`
every function that draws uses this thread's own state, one thread at a time, so equal seeds give equal runs.

There `torch.get_rng_state` and `torch.set_rng_state` are of that state too: activation checkpointing draws the masks of
forward again by them.

Not supported: dropout masks equal to those of one process (they never are when a batch is computed in parts),
Python's and NumPy's generators inside forward.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

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
_entered = threading.local()


class ThreadRng(TorchFunctionMode):
    """While entered, this thread's draws come from ``seed``: on the CPU, and on GPUs among ``devices``."""

    def __init__(self, seed: int, devices: Iterable[torch.device] = ()):
        super().__init__()
        gpus = sorted({device.index for device in devices if device.type == "cuda"})
        shared = [torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)]
        self._shared = {each.device: each for each in shared}
        self.states = {each.device: torch.Generator(each.device).manual_seed(seed).get_state() for each in shared}
        self._before: list[ThreadRng | None] = []
        _install()

    def __enter__(self) -> ThreadRng:
        self._before.append(getattr(_entered, "rng", None))
        _entered.rng = self
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        _entered.rng = self._before.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **(kwargs or {}))
        with _drawing:
            before = {device: generator.get_state() for device, generator in self._shared.items()}
            self._set(self.states)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.states = {device: generator.get_state() for device, generator in self._shared.items()}
                self._set(before)

    def _set(self, states: Mapping[torch.device, Tensor]) -> None:
        for device, state in states.items():
            self._shared[device].set_state(state)


@cache
def _install() -> None:
    """Once. Where a thread has states of its own: what gets or sets a generator's gets or sets its own, and what is
    computed again within backward, where torch has left the mode, draws from its own."""
    _redirect("cpu", torch, torch.random)
    _redirect("cuda", torch.cuda, torch.cuda.random)
    fork = torch.random.fork_rng

    @wraps(fork)
    @contextmanager
    def fork_rng(*args: Any, **named: Any) -> Iterator[None]:
        rng = _own()
        entered = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        with fork(*args, **named), rng if rng and rng not in entered else nullcontext():
            yield

    torch.random.fork_rng = fork_rng


def _own() -> ThreadRng | None:
    return getattr(_entered, "rng", None)


def _redirect(default: str, *homes: Any) -> None:
    get, put = homes[0].get_rng_state, homes[0].set_rng_state

    def states(where: Sequence[Any]) -> tuple[dict[torch.device, Tensor], torch.device]:
        device = torch.device(*where or (default,))
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        rng = _own()
        return rng.states if rng and device in rng.states else {}, device

    @wraps(get)
    def get_rng_state(*where: Any, **named: Any) -> Tensor:
        own, device = states((*where, *named.values()))
        return own[device].clone() if own else get(*where, **named)

    @wraps(put)
    def set_rng_state(new_state: Tensor, *where: Any, **named: Any) -> None:
        own, device = states((*where, *named.values()))
        if own:
            own[device] = new_state.clone()
        else:
            put(new_state, *where, **named)

    for home in homes:
        home.get_rng_state, home.set_rng_state = get_rng_state, set_rng_state


def seeds(count: int) -> list[int]:
    """One for each of ``count`` threads, drawn from the default generator."""
    return [int(seed) for seed in torch.randint(1 << 62, (count,))]
