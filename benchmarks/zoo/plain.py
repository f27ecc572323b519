"""`paceline.join` in plain PyTorch, for one process: what all others are compared with.

Controls show what rounding alone does: with ``parts`` above 1 each batch is computed in so many parts whose gradients
are added, and with ``reverse`` its samples come the other way round. ``still`` has no batches: the models before
training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.engine.compute.batch import count, cut, mapped  # how rows are told is no mathematics


class Plain:
    """What `join` returns, as far as the zoo uses it."""

    leader = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any] | None = None,
        *,
        batch_size: int,
        clip: float | None = None,
        scheduler: Any = None,
        forward: Callable[..., Any] | None = None,
        parts: int = 1,
        counts: Callable[[Any], float] | None = None,
        still: bool = False,
        reverse: bool = False,
        **_: Any,
    ):
        self.model, self.optimizer, self.loss, self.batch_size = model, optimizer, loss, batch_size
        self.max_norm, self.scheduler, self.forward = clip, scheduler, forward or call
        self.parts, self.counts = parts, counts or (lambda batch: float(count(batch)))
        self.still, self.reverse = still, reverse
        self._norm: float | None = None
        self._losses: list[float] = []

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def batches(self, data: Any, epochs: int = 1, shuffle: bool = False) -> Iterator[Any]:
        if self.still:
            return
        loader = data if isinstance(data, DataLoader) else DataLoader(data, self.batch_size, shuffle=shuffle)
        for _ in range(epochs):
            yield from map(backwards, loader) if self.reverse else loader

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        if self.parts == 1:
            value = mean(self._judge(batch))
            value.backward()
            loss = float(value.detach())
        else:
            loss = self._by_parts(batch)
        return self._apply(loss)

    def _by_parts(self, batch: Any) -> float:
        rows, loss = count(batch), 0.0
        edges = [rows * i // self.parts for i in range(self.parts + 1)]
        edges = sorted(set(edges))
        whole = 0.0
        for start, stop in itertools.pairwise(edges):
            part = cut(batch, start, stop, rows)
            value = self._judge(part)
            if isinstance(value, tuple):
                total, weight = value[0], float(value[1])
            else:
                weight = self.counts(part)
                total = mean(value) * weight
            total.backward()
            loss, whole = loss + float(total.detach()), whole + weight
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= whole
        return loss / whole

    def _judge(self, batch: Any) -> Any:
        output = self.forward(self.model, batch)
        if self.loss is None:
            return output["loss"] if isinstance(output, Mapping) else output.loss
        return self.loss(output, batch[-1] if isinstance(batch, tuple | list) else batch)

    def _apply(self, loss: float) -> float:
        norm = self._norm or self.max_norm
        if norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self._norm = None
        return loss

    # a loop of its own

    def rows(self, batch: Any) -> Any:
        self._forget()
        return batch

    def backward(self, loss: Any) -> None:
        if not self._losses:
            self._forget()
        value = mean(loss)
        value.backward()
        self._losses.append(float(value.detach()))

    def clip(self, norm: float) -> None:
        self._norm = norm

    def update(self) -> float:
        loss, self._losses = sum(self._losses), []
        return self._apply(loss)

    def _forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def backwards(batch: Any) -> Any:
    rows = count(batch)
    return mapped(batch, lambda leaf: leaf.flip(0) if leaf.dim() and len(leaf) == rows else leaf)


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch[:-1]) if isinstance(batch, tuple | list) else model(batch)


def mean(value: Any) -> Tensor:
    if isinstance(value, tuple):
        return value[0] / value[1]
    if isinstance(value, Mapping):
        return torch.stack(list(value.values())).sum()
    return value
