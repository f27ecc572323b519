"""Batch normalisation over everyone's rows: the statistics of one process on the global batch.

    forward     count, sum and sum of squares per channel, added over all processes of all nodes
    backward    two sums per channel of the output's gradient, added likewise

*Cost*: two sums of about 2 C numbers in each layer and step, each waiting for the slowest; one vote per
step on who has rows. Whoever has none adds nothing.
*Laws*: float64 equal to one process on the whole batch, running statistics included.
*Source*: Ioffe & Szegedy 2015 (arXiv 1502.03167), equations of section 3, summed over processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline import contract
from paceline.engine.crew import PATIENCE_S, Crew, CrewError

Total = Callable[[Tensor], Tensor]
DOING = "adding up batch statistics"


class Layers:
    """The batch-norm layers of a model; while converted, they use everyone's rows in training.

    ``total`` adds a float64 vector over everyone; only while ``inside()`` is it called, so that a forward
    pass outside of a step is this process's own. Names, parameters and modules stay the same.
    """

    def __init__(self, model: nn.Module):
        self.layers = [
            m for m in model.modules() if isinstance(m, _BatchNorm) and type(m).forward is _BatchNorm.forward
        ]

    def convert(self, total: Total, inside: Callable[[], bool] = lambda: True) -> None:
        for place, layer in enumerate(self.layers):

            def forward(self: _BatchNorm, x: Tensor, place: int = place) -> Tensor:
                if not (self.training and inside()):
                    return _BatchNorm.forward(self, x)
                return _normalise(self, x, _Tagged(total, 2 * place))

            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]

    def restore(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)

    def hear(self, vector: Tensor) -> None:
        """What was added up while this process had no rows: its running statistics are everyone's all the same."""
        place, backward = divmod(int(vector[1] / vector[0]), 2)
        if not backward:
            _remember(self.layers[place], *_statistics(vector[2:]))


class _Tagged:
    """Sums that must be those of one layer and direction on every process."""

    def __init__(self, total: Total, tag: int):
        self.total, self.tag = total, tag

    def __call__(self, numbers: Tensor, direction: int) -> Tensor:
        tag = float(self.tag + direction)
        vector = torch.cat([torch.tensor([1.0, tag], dtype=torch.float64), numbers.to("cpu", torch.float64)])
        whole = self.total(vector)
        if len(whole) != len(vector) or whole[1] != whole[0] * tag:
            raise CrewError(
                "batch_norm='sync': the processes are in different batch-norm layers, so their models took different "
                "paths for their rows; use batch_norm='local'"
            )
        return whole[2:].to(numbers.device)


def _normalise(layer: _BatchNorm, x: Tensor, total: _Tagged) -> Tensor:
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
        variance, mean = torch.var_mean(wide, dims, correction=0)
        mean, variance = mean.double(), variance.double()
        # (1 + C + C): the counts of all, their sums and their sums of squares
        sums = total(torch.cat([mean.new_tensor([count]), count * mean, count * (variance + mean * mean)]), 0)
        whole, mean, variance = _statistics(sums)
        if whole <= 1:
            raise ValueError(f"batch norm needs more than 1 value per channel over all processes, got {whole:g}")
        _remember(layer, whole, mean, variance)
    normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, mean.to(wide.dtype), variance.to(wide.dtype), layer.eps, whole, total
    )
    return normalised


def _statistics(sums: Tensor) -> tuple[float, Tensor, Tensor]:
    """(count, mean, variance) from count, sums and sums of squares."""
    whole = float(sums[0])
    mean, squares = sums[1:].view(2, -1) / whole
    return whole, mean, (squares - mean * mean).clamp_min(0)


def _remember(layer: _BatchNorm, whole: float, mean: Tensor, variance: Tensor) -> None:
    """The running variance is of the unbiased one."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    momentum = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked or 1)
    for running, now in ((layer.running_mean, mean), (layer.running_var, variance * (whole / (whole - 1)))):
        running.mul_(1 - momentum).add_(now.to(running), alpha=momentum)


class _Normalise(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, with statistics that depend on everyone's x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        whole: float,
        total: _Tagged,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.whole, ctx.total = eps, whole, total
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        inverse = torch.rsqrt(variance + ctx.eps)
        # sum of dy, and of dy (x - mean) / deviation: those of this process's rows are its parameters' gradients
        _, dot, plain = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        sums = ctx.total(torch.cat([plain, dot]), 1).view(2, -1) / ctx.whole
        mean_dy, mean_dot = sums.to(mean.dtype)
        scale = inverse if weight is None else weight.to(inverse.dtype) * inverse
        slope = -scale * inverse * mean_dot
        offset = -scale * mean_dy - slope * mean
        shape = [1, -1] + [1] * (x.dim() - 2)
        # dx = scale dy + slope x + offset
        dx = torch.addcmul(offset.view(shape), x.to(mean.dtype), slope.view(shape)).addcmul_(dy, scale.view(shape))
        grads = (dot.to(weight.dtype), plain.to(weight.dtype)) if weight is not None else (None, None)
        return dx.to(x.dtype), *grads, None, None, None, None, None


class Everyone:
    """Sums over the processes of this node, and over the nodes through local rank 0's link."""

    def __init__(self, crew: Crew | None = None, link: contract.Link | None = None):
        self.crew = crew
        self.leads = crew is None or crew.rank == 0
        self.lane = link.lane("norm") if self.leads and link is not None and link.size > 1 else None
        self.hear: Callable[[Tensor], None] = lambda vector: None
        self._inside = False

    def inside(self) -> bool:
        return self._inside

    @contextmanager
    def step(self, present: bool) -> Iterator[None]:
        """One forward and backward of this process, or nothing if it has no rows. All must enter it."""
        rows = self.crew.gather([float(present)], DOING) if self.crew else [[float(present)]]
        self._here = [rank for rank, (here,) in enumerate(rows) if here]
        if self.lane:
            nodes = self.lane.sum(torch.tensor([float(bool(self._here))], dtype=torch.float64), DOING).wait()
            self._all_nodes = float(nodes[0]) == self.lane.size
        self._inside = True
        try:
            yield
        except BaseException as error:
            if self.crew:
                self.crew.give_up(f"another process of this node gave up in the step: {error}")
            raise
        finally:
            self._inside = False
        self._end(present)

    def total(self, vector: Tensor) -> Tensor:
        if not self.leads:
            assert self.crew
            self.crew.send_long(0, vector.numpy().tobytes(), b"n")
            return _numbers(self.crew.recv_long(0, b"n", DOING))
        whole = self._serve(vector)
        assert whole is not None
        return whole

    def _serve(self, vector: Tensor | None) -> Tensor | None:
        """One sum, given to those of this node who are in it; None when they have ended."""
        crew, peers = self.crew, [rank for rank in self._here if rank]
        parts = [] if vector is None else [vector]
        for peer in peers:
            assert crew
            if vector is None and crew.peek(peer) == b"e":
                crew.recv(peer, DOING)
                continue
            parts.append(_numbers(crew.recv_long(peer, b"n", DOING)))
        if not parts:
            return None
        whole = self._over_nodes(torch.stack(parts).sum(0) if len(parts) > 1 else parts[0].clone())
        for peer in peers:
            assert crew
            assert whole is not None
            crew.send_long(peer, whole.numpy().tobytes(), b"n")
        return whole

    def _over_nodes(self, vector: Tensor | None) -> Tensor | None:
        """The nodes' sum. Where a node has no rows, lengths go first: 0 says that this node has ended."""
        if not self.lane:
            return vector
        longest = 0
        if not self._all_nodes:
            length = torch.tensor([0 if vector is None else len(vector)])
            longest = int(self.lane.max(length, DOING).wait()[0])
            if not longest:
                return None
        if vector is None:
            vector = torch.zeros(longest, dtype=torch.float64)
        whole: Tensor = self.lane.sum(vector, DOING).wait()
        return whole

    def _end(self, present: bool) -> None:
        if not self.leads:
            if present and 0 not in self._here:
                assert self.crew
                self.crew.send(0, b"e")
            return
        if not present:
            while self._here and (vector := self._serve(None)) is not None:
                self.hear(vector)
        if self.lane and not self._all_nodes:
            while (vector := self._over_nodes(None)) is not None:
                if self._here:
                    raise CrewError("batch_norm='sync': another node computes more batch-norm layers than this one")
                self.hear(vector)

    def close(self) -> None:
        if self.crew:
            self.crew.close()


class Circle:
    """Sums over the threads of one process, then over everyone else by ``beyond``."""

    def __init__(self, beyond: Total):
        self.beyond = beyond
        self.start(1)

    def start(self, num_threads: int) -> None:
        """Before each step: how many threads have rows."""
        self._parts: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(max(1, num_threads), self._add)

    def total(self, thread: int, vector: Tensor) -> Tensor:
        self._parts[thread] = vector
        try:
            self._barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            raise CrewError("another replica gave up in the middle of the step") from None
        return self._whole

    def _add(self) -> None:
        parts = [self._parts[thread] for thread in sorted(self._parts)]
        self._parts = {}
        self._whole = self.beyond(torch.stack(parts).sum(0) if len(parts) > 1 else parts[0])

    def give_up(self) -> None:
        self._barrier.abort()


def _numbers(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float64)
