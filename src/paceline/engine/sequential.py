"""One process, one intra-op thread: the reference that all others must equal, and the baseline.

*Laws*: one rank is plain PyTorch: the same forward, backward, clip and optimizer step.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import Agreement, Ballot, Piece, Rule
from paceline.engine.backward import Backward
from paceline.engine.buffers import solidify
from paceline.engine.everyone import Everyone
from paceline.engine.norm import Layers
from paceline.engine.update import Factored, finish, refuse_closures, takes_factors

HASH_VALUES = 1 << 12


class Engine(contract.Engine):
    """Batches are (inputs, ..., target); ``loss(output, target)`` is a mean over rows or (sum, weight)."""

    def __init__(self) -> None:
        self.num_threads = 1
        self._turn = 0
        self._products: dict[int, Tensor] = {}
        self._in_step: Callable[[bool], AbstractContextManager[None]] = lambda present: nullcontext()
        self._norms: list[tuple[Layers, Everyone]] = []

    def open(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any],
        metric: Callable[..., Any] | None = None,
    ) -> None:
        refuse_closures(optimizer)
        solidify(model)
        self.absorbs = takes_factors(optimizer)
        torch.set_num_threads(self.num_threads)
        self.model, self.optimizer, self.loss, self.metric = model, optimizer, loss, metric
        self.backward = Backward(model)
        self.specs, self.names = self.backward.specs, self.backward.names
        self.weights = [self.backward.parameters[name].data for name in self.names]

    @property
    def buffers(self) -> Sequence[Tensor]:
        return list(self.model.buffers())

    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Piece], None]) -> Ballot:
        start = time.perf_counter()
        ballot = Ballot(hash=self._hash())

        def compute() -> Tensor | None:
            if batch is None:
                return None
            *inputs, target = batch
            output = self.model(*inputs)
            loss = self.loss(output, target)
            if isinstance(loss, tuple):
                loss, ballot.weight, factor = loss[0], float(loss[1]), 1.0
            else:
                ballot.weight = factor = float(len(target))
            ballot.loss_sum = float(loss.detach()) * factor
            ballot.finite = math.isfinite(ballot.loss_sum)
            if self.metric:
                ballot.metric_sum = float(self.metric(output, target))
            scaled: Tensor = loss * (factor * scale)
            return scaled

        with self._in_step(batch is not None):
            state = self.backward.run(forms, offer, compute)
        ballot.used = bytes(name in state.used for name in self.names)
        ballot.dense = bytes(spec.index in state.strays for spec in self.specs)
        ballot.rows = tuple(state.rows.get(spec.index, 0) for spec in self.specs)
        ballot.seconds = time.perf_counter() - start
        return ballot

    def _hash(self) -> int:
        """A checksum of a slice of one parameter, another one each step."""
        weight = self.weights[self._turn % len(self.weights)].reshape(-1)
        slices = -(-weight.numel() // HASH_VALUES)
        start = self._turn // len(self.weights) % slices * HASH_VALUES
        self._turn += 1
        words = weight[start : start + HASH_VALUES].contiguous().view(torch.uint8).to(torch.int64)
        return int((words * torch.arange(1, len(words) + 1, device=words.device)).sum())

    def update(self, agreement: Agreement, rule: Rule) -> None:
        used = dict(zip(self.names, agreement.ballot.used, strict=True))
        dense: list[Tensor] = []
        factored: list[Factored] = []
        for piece in agreement.pieces:
            if piece.left is not None and piece.right is not None:
                name = piece.spec.names[0]
                if used[name]:
                    self._by_factors(self.backward.parameters[name], piece.left, piece.right, dense, factored)
                continue
            assert piece.flat is not None
            parts = torch.split(piece.flat, list(piece.spec.numels))
            for name, shape, part in zip(piece.spec.names, piece.spec.shapes, parts, strict=True):
                parameter = self.backward.parameters[name]
                parameter.grad = part.view(shape) if used[name] else None
                dense.append(parameter)
        finish(dense, factored, self.optimizer, rule, lambda total: total)

    def _by_factors(
        self, parameter: Tensor, left: Tensor, right: Tensor, dense: list[Tensor], factored: list[Factored]
    ) -> None:
        """Sorts a parameter with factors: straight into the momentum, or multiplied out for the optimizer."""
        parameter.grad = None
        if takes_factors(self.optimizer):
            factored.append(Factored(parameter, left, right))
            return
        product = self._products.get(id(parameter))
        if product is None:
            product = self._products[id(parameter)] = torch.empty_like(parameter, requires_grad=False)
        parameter.grad = torch.mm(left.T, right, out=product)
        dense.append(parameter)

    def snapshot(self) -> Any:
        buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        return buffers, random_state(), self._turn

    def rollback(self, kept: Any) -> None:
        buffers, randomness, self._turn = kept
        for table, name, buffer, old in buffers:
            table[name] = buffer.copy_(old)  # forward may have put another tensor in its place
        set_random_state(randomness)

    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def sync_norm(self, link: contract.Link | None) -> None:
        self._sum_norms(Everyone(None, link))

    def _sum_norms(self, everyone: Everyone) -> None:
        layers = Layers(self.model)
        layers.convert(everyone.total, everyone.inside)
        everyone.hear, self._in_step = layers.hear, everyone.step
        self._norms.append((layers, everyone))

    def close(self) -> None:
        self.backward.close()
        for layers, everyone in self._norms:
            layers.restore()
            everyone.close()


def random_state() -> Any:
    numpy = sys.modules.get("numpy")
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking more would start CUDA
    cuda = torch.cuda.get_rng_state_all() if on_gpu else None
    return random.getstate(), torch.get_rng_state(), cuda, numpy and numpy.random.get_state()


def set_random_state(state: Any) -> None:
    python, cpu, cuda, numpy_state = state
    random.setstate(python)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    if numpy_state:
        sys.modules["numpy"].random.set_state(numpy_state)
