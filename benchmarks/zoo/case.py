"""What a case of the zoo is: a function that gives (model, data, loss), and how it is trained."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROWS, COUNT, EPOCHS = 12, 31, 2  # of a global batch, of the data: the last batch of an epoch is short

Parts = tuple[nn.Module, Any, Callable[..., Any] | None]
Scripts = Callable[[Any], tuple[list[nn.Module], list[float]]]
Stepper = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """``parts`` gives (model, data, loss). ``options`` are those of `join`. ``script``: a loop of its own in place of
    the usual one, as ``script(join)`` -> (models, losses). ``differs``: what makes its parts another whole, as a
    pattern that the words about it must match. ``counts``: what the loss divides by, of a part of a batch, for the
    control in one process, where that is not its rows.
    """

    name: str
    family: str
    optimizer: Stepper
    parts: Callable[[], Parts] | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    script: Scripts | None = None
    differs: str = ""
    counts: Callable[[Any], float] | None = None

    def train(self, join: Callable[..., Any]) -> tuple[list[nn.Module], list[float]]:
        """Models after training, as ``join`` trains, and the loss of each step."""
        if self.script:
            return self.script(join)
        assert self.parts
        model, data, loss = self.parts()
        optimizer = self.optimizer([each for each in model.parameters() if each.requires_grad])
        scheduler = self.schedule(optimizer) if self.schedule else None
        losses = []
        with join(model, optimizer, loss, batch_size=ROWS, scheduler=scheduler, **self.options) as pace:
            for batch in pace.batches(data, EPOCHS, shuffle=False):
                losses.append(pace.step(batch))
        return [model], losses

    @property
    def module(self) -> str:
        """The one of this package that it is in."""
        function = self.parts or getattr(self.script, "func", None)
        return str(getattr(function, "__module__", "")).rpartition(".")[2]

    @property
    def words(self) -> str:
        """The optimizer, and what else is done."""
        extra = [f"{name}={value!r}" for name, value in self.options.items() if not callable(value)]
        kind = getattr(self.optimizer, "func", self.optimizer)
        return ", ".join([getattr(kind, "__name__", str(kind)), *(["schedule"] if self.schedule else []), *extra])


CASES: dict[str, Case] = {}


def family(name: str) -> Callable[..., Any]:
    """A decorator for each case of a family: ``@case(AdamW, lr=0.001, join={"clip": 1.0}, differs="...")``."""

    def case(
        optimizer: Stepper,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        join: Mapping[str, Any] | None = None,
        differs: str = "",
        counts: Callable[[Any], float] | None = None,
        **words: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            assert function.__name__ not in CASES, f"two cases are called {function.__name__}"
            stepper = functools.partial(optimizer, **words)
            own = bool(inspect.signature(function).parameters)
            CASES[function.__name__] = Case(
                function.__name__,
                name,
                stepper,
                parts=None if own else function,
                schedule=schedule,
                options=join or {},
                script=functools.partial(function, stepper) if own else None,
                differs=differs,
                counts=counts,
            )
            return function

        return add

    return case


class Named:
    """A data set of dicts."""

    def __init__(self, **columns: Any):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


def dice(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(COUNT, *shape, generator=dice(seed))


def labels(most: int, *shape: int, seed: int = 4) -> Tensor:
    return torch.randint(0, most, (COUNT, *shape), generator=dice(seed))


def lengths(least: int, most: int, seed: int = 5) -> Tensor:
    """The longest last, so that every part of a batch has another longest one."""
    return torch.randint(least, most + 1, (COUNT,), generator=dice(seed))


def images(side: int = 32, channels: int = 3, classes: int = 5) -> TensorDataset:
    return TensorDataset(numbers(channels, side, side), labels(classes))


def table(columns: int = 8, classes: int = 3) -> TensorDataset:
    return TensorDataset(numbers(columns), labels(classes))


def padded(ids: Tensor, length: Tensor, with_what: int = 0) -> Tensor:
    """``ids`` (samples, time) with everything from each one's length on replaced."""
    return torch.where(torch.arange(ids.shape[1]) < length[:, None], ids, with_what)


FAMILIES = "layers", "sequence", "graphs", "generative", "contrastive", "vision", "transformer", "keras3"
MORE = {"vision": ("timm", "torchvision"), "transformer": ("transformers",), "keras3": ("keras",)}


def corpus(modules: Iterable[str] = FAMILIES) -> list[Case]:
    """All cases of these modules, in a fixed order. Raises ImportError where a package is missing."""
    for module in modules:
        importlib.import_module(f"zoo.{module}")
    return list(CASES.values())


def missing(modules: Iterable[str]) -> list[str]:
    """Packages that their cases need and that are not installed."""
    return [name for each in modules for name in MORE.get(each, ()) if importlib.util.find_spec(name) is None]
