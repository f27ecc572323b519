"""One process, one intra-op thread: the reference for all other engines, and the baseline.

*Invariants*: one rank equals plain PyTorch: the same forward, backward, clip and optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import contract, transport
from paceline.contract import Loss, Share
from paceline.engine.checks import not_finite
from paceline.engine.checks.loss_graph import without_gradient
from paceline.engine.checks.loss_in_parts import unlike
from paceline.engine.checks.optimizer_options import Options
from paceline.engine.checks.replaced_layers import Layout
from paceline.engine.compute import batch as batches
from paceline.engine.compute import matmul, optimizer_step, rng, state_store
from paceline.engine.compute.batch import mapped, split
from paceline.engine.compute.deferred_update import DeferredUpdate
from paceline.engine.compute.forward_state import Moving, copies
from paceline.engine.compute.gradient_hooks import Pass
from paceline.engine.compute.input_snapshot import InputSnapshot, dense, solidify
from paceline.engine.compute.local_step import LocalStep
from paceline.engine.compute.loss_divisor import Means, labels_of
from paceline.engine.compute.optimizer_step import Factored, finish, laid_out_as, optimizer_takes_factors
from paceline.engine.compute.precision import Numerics
from paceline.engine.compute.sync_batch_norm import SyncBatchNorm
from paceline.engine.compute.unread import ReadsLater, StepNumbers
from paceline.engine.node.divided_optimizer import DividedOptimizer
from paceline.engine.node.in_step_reduce import InStepReduce
from paceline.messages import FACTORS, Gradient, RowRange, Update, Vote

HASH_VALUES = 1 << 12  # at least, of each step
AUXILIARY = (
    "the model's own loss has an auxiliary loss (aux_loss, of a mixture of experts), which is no mean over samples: "
    "each process and micro-batch balances its experts over its own rows, so the result depends on how many there are"
)
HASH_STEPS = 1000  # in which the checksums have covered every value


class Engine(ReadsLater):
    """Accepted batches and losses: `engine/compute/batch.py`."""

    defers_updates, planned = True, True

    def __init__(self) -> None:
        self.num_threads = 1
        self.local_step = LocalStep()
        self.numerics = Numerics()
        self.call_model: Callable[[nn.Module, Any], Any] = batches.call
        self._step_number, self._least, self._full = 0, 1, 0
        self._products: dict[int, Tensor] = {}
        self._in_step: Callable[[bool], AbstractContextManager[None]] = lambda present: nullcontext()
        self._sync_norms: Callable[[], AbstractContextManager[None]] = nullcontext
        self._norms: list[tuple[SyncBatchNorm, InStepReduce]] = []
        self._inputs, self._keeps = InputSnapshot(), True
        self._divided: DividedOptimizer | None = None
        self._parts_checked = False  # whether the loss of parts has been compared with the whole

    @property
    def precision(self) -> str:
        return self.numerics.precision

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        optimizer_step.refuse_closures(optimizer)
        self.local_step.prepare(model, optimizer, self.numerics)
        self.divided = self.divided or self.local_step.num_micros > 1
        solidify(model)
        self.optimizer_takes_factors = optimizer_takes_factors(optimizer) and not optimizer_step.takes_gradients(model)
        if self.optimizer_takes_factors:
            self.multiply = optimizer_step.multiply
        torch.set_num_threads(self.num_threads)
        self.model, self.optimizer, self.loss, self.metric = model, optimizer, loss, metric
        self.optimizer_index = state_store.numbered(model, optimizer)
        self.numerics.prepare(model, optimizer)
        if not self.numerics.compile:
            matmul.install(model)
        self.backward = self.local_step.hooked(model, self.numerics, self.bucket_bytes)
        self.backward.rounded = self.numerics.precision != "fp32"
        self.buckets, self.names = self.backward.buckets, self.backward.names
        places = self.local_step.devices or [self.weights[0].device]
        self.device, self._output_device = places[0], places[-1]
        numels = [weight.numel() for weight in self.weights]
        self._hash_parts = state_store.in_parts(numels, max(HASH_VALUES, -(-sum(numels) // HASH_STEPS))) or [[]]
        # kept, since iterating over a model costs more than a small step
        self._modules = list(model.modules())
        self._frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        self._num_held, self._layout, self._options = num_held(optimizer), Layout(model), Options(optimizer)
        self.moving = Moving(model)
        parameters = self.backward.parameters
        self._deferred = DeferredUpdate(model, optimizer, parameters, lambda update: self._apply(update)[0])

    @property
    def weights(self) -> Sequence[Tensor]:  # type: ignore[override]
        """The current tensors: a script may replace a parameter's memory."""
        return [self.backward.parameters[name].data for name in self.names]

    @property
    def waited_s(self) -> float:
        return self._deferred.waited_s + (self._norms[0][1].waited_s if self._norms else 0.0)

    @property
    def buffers(self) -> Sequence[Tensor]:
        return dense(self.model)

    def local_exchange(
        self, exchange: contract.Exchange, control: transport.Control, alone: bool, activity: transport.Waits
    ) -> tuple[contract.Exchange, transport.Control]:
        self.may_retry = control.tolerates_loss
        self.backward.watch(early=not alone)
        if alone:
            self._hash_parts = [[]]  # there is no other node to compare with
        return exchange, control

    def begin_step(self, assignment: Share, step: int) -> None:
        self._step_number = step
        # micro-batches may be smaller than `least` in the share of a whole batch
        self._least, self._full = assignment.least, len(assignment.rows(assignment.whole))

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """(the batch on the model's device, the model's output), in the requested numerics."""
        batch = mapped(batch, lambda tensor: self.numerics.moved(tensor, self.device))
        with self.numerics.forward(self.device):
            output = self.call_model(self.model, batch)
        return self._beside(batch), output

    def _beside(self, batch: Any) -> Any:
        """The batch on the device of the model's output."""
        return batch if self._output_device == self.device else mapped(batch, lambda t: t.to(self._output_device))

    def _judged(self, batch: Any, num_rows: int | None = None) -> tuple[Any, Any, batches.Judged]:
        """(the batch on the model's device, the model's output, the result of `judged`)."""
        means = Means(elements=True) if self.loss is None and self.divided and not self.numerics.compile else None
        batch = mapped(batch, lambda tensor: self.numerics.moved(tensor, self.device))
        with self.numerics.forward(self.device):
            if means is None:
                output = self.call_model(self.model, batch)
            else:
                with labels_of(batch, means, mapped) as given:
                    output = self.call_model(self.model, given)
                if getattr(output, "aux_loss", None) is not None:
                    self.hint = AUXILIARY
            batch = self._beside(batch)
            result = batches.judged_later(self.loss, output, batch, num_rows, means, self.divided)
            if self.divided and not self._parts_checked:
                self._parts_checked = True
                self.hint = self.hint or unlike(self.loss, output, batch, num_rows)
            return batch, output, result

    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        start, batch = time.perf_counter(), batches.filled(batch)
        self._check_parameters()
        vote, numbers = Vote(), StepNumbers()
        if self._keeps:
            self._inputs.capture(batch)

        def compute(part: Any) -> Tensor:
            with self._sync_norms(), self._deferred.reading():
                part, output, found = self._judged(part, num_rows)
            value, times, *_ = found
            if self._norms and not value.requires_grad:  # the other processes wait for its sums in backward
                raise without_gradient()
            numbers.put(found)
            self.terms = numbers.names, self.terms[1]
            if self.metric:
                numbers.measured.put(self.metric(output, batches.target(self.metric, part)), part, num_rows)
            factor = times * scale
            return value if not isinstance(factor, Tensor) and factor == 1.0 else value * factor

        parts = [] if batch is None else self._split(batch, self.accumulate)
        num_rows = batches.samples(parts[0], self.num_local_samples) if len(parts) == 1 else None
        saved = self.moving.keep() if len(parts) > 1 else []
        self.moving.begin(self._step_number, batch is not None)

        def next_part(part: Any) -> Tensor:
            self.moving.put(saved)  # a momentum encoder moves once per step, for any number of micro-batches
            return compute(part)

        with self._in_step(batch is not None):
            if batch is None:
                self.wait_pending()  # as processes with rows do: all raise its errors at the same place
            state = self.backward.run(forms, offer, *(partial(next_part, part) for part in parts))
            if not self.reads_later:  # after backward: a GPU has got its work by then
                self.read(vote, numbers)
        self.moving.end()
        self.local_step.check_step(self.moving)
        self.hint, self.numbers = self.local_step.found() or self.hint, numbers
        if self._keeps:
            self._inputs.check()
        return self._voted(vote, state, start)

    def read(self, vote: Vote, numbers: StepNumbers) -> None:
        names, why = numbers.read(vote)
        self.terms, self.hint = (self.terms[0], names or self.terms[1]), why or self.hint
        self.metric_tensors = {name: each.cpu() for name, each in numbers.measured.tensors.items()}
        vote.metric_tensors = bool(self.metric_tensors)

    def _split(self, batch: Any, parts: int) -> list[Any]:
        parts *= self.local_step.num_micros
        if parts == 1 and self.num_local_samples is not None:
            return [batch]
        return split(batch, parts, self._least if batches.divisible(batch, self.num_local_samples) < self._full else 1)

    def _check_parameters(self) -> None:
        """Raises ValueError where other parameters train than at the join."""
        if thawed := [name for name, parameter in self._frozen if parameter.requires_grad]:
            raise ValueError(
                f"{', '.join(thawed[:3])} began to ask for a gradient after join(); unfreeze before joining"
            )
        if not self._is_divided and self._num_held != (current := num_held(self.optimizer)):
            known = {id(each) for each in (*self.backward.parameters.values(), *(each for _, each in self._frozen))}
            if any(id(each) not in known for group in self.optimizer.param_groups for each in group["params"]):
                raise ValueError(
                    "the optimizer was given parameters after join() that were not there before and would not be "
                    "all-reduced; add them to model and optimizer before joining"
                )
            self._num_held = current
        self._layout.check()

    def collect_gradients(self, vote: Vote, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        start = time.perf_counter()
        self._check_parameters()
        self.moving.end()
        own = [p.grad for p in self.backward.parameters.values()]
        if FACTORS in forms or self.may_retry:  # the all-reduce must not overwrite gradients that a retry needs
            for parameter in self.backward.parameters.values():
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        state = self.backward.take(forms, offer)
        for parameter, grad in zip(self.backward.parameters.values(), own, strict=True):
            parameter.grad = grad
        return self._voted(vote, state, start)

    def _voted(self, vote: Vote, state: Pass, start: float) -> Vote:
        vote.hash, vote.options = self._hash(), self._options.checksum()
        vote.used = bytes(name in state.used for name in self.names)
        vote.constant = vote.trains_nothing
        vote.dense = bytes(bucket.index in state.impure_factors for bucket in self.buckets)
        vote.rows = tuple(state.rows.get(bucket.index, 0) for bucket in self.buckets)
        vote.seconds = time.perf_counter() - start
        return vote

    def options(self) -> list[dict[str, Any]]:
        return self._options.numbers()

    def compare_options(self, reported: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
        return self._options.compare(reported)

    def diagnose(self, batch: Any, backward: bool = False) -> str:
        def losses() -> Iterator[Tensor]:
            for part in self._split(batch, self.accumulate):
                value, times, *_ = self._judged(part)[-1]
                yield value if float(times) else value.nan_to_num(0.0)

        parameters = {name: self.backward.parameters[name] for name in self.names}
        return not_finite.where(self.model, parameters, batch, losses, backward)

    def _hash(self) -> int:
        """A checksum of a part of the weights, a different part each step: all of them within HASH_STEPS steps."""
        return state_store.crc(self.weights, self._hash_parts[self._step_number % len(self._hash_parts)])

    def apply(self, update: Update) -> bool:
        applied = True
        if update.pending:
            self._deferred.defer(update)
            self.norm = None
        elif update.gradients:
            applied, self.norm = self._apply(update)
        if update.targets:
            state_store.write(update.targets, self.weights, self.optimizer)
        return applied

    def wait_pending(self) -> None:
        self._deferred.wait_pending()

    def _apply(self, update: Update) -> tuple[bool, float | None]:
        """(whether these gradients were applied, their norm)."""
        if self._divided and self._is_divided:
            return self._divided.apply(update, dict(zip(self.names, update.used, strict=True)))
        scaled = update.rule.scale != 1.0 or update.rule.clip is not None
        return finish(*self.placed(update, scaled), self.optimizer, update.rule, lambda total: total)

    def placed(self, update: Update, scaled: bool) -> tuple[list[Tensor], list[Factored]]:
        used, dense = dict(zip(self.names, update.used, strict=True)), list[Tensor]()
        factored: list[Factored] = []
        for gradient in update.gradients:
            if gradient.output_grad is not None and gradient.layer_input is not None:
                name = gradient.bucket.names[0]
                if used[name]:
                    parameter = self.backward.parameters[name]
                    self._by_factors(parameter, gradient.output_grad, gradient.layer_input, dense, factored)
                continue
            for name, grad in zip(gradient.bucket.names, optimizer_step.parameter_grads(gradient), strict=True):
                parameter = self.backward.parameters[name]
                parameter.grad = laid_out_as(parameter, grad) if used[name] else None
                dense.append(parameter)
        if scaled and any(each.grads is not None for each in update.gradients):
            optimizer_step.separate(dense, factored)  # gradients that were not all-reduced are in autograd's memory
        return dense, factored

    def _by_factors(
        self, parameter: Tensor, left: Tensor, right: Tensor, dense: list[Tensor], factored: list[Factored]
    ) -> None:
        """Adds a parameter to ``factored`` where the optimizer takes factors; else multiplies them out into .grad."""
        parameter.grad = None
        if optimizer_takes_factors(self.optimizer):
            factored.append(Factored(parameter, left, right))
            return
        product = self._products.get(id(parameter))
        if product is None:
            product = self._products[id(parameter)] = torch.empty_like(parameter, requires_grad=False)
        parameter.grad = torch.mm(left.T, right, out=product)
        dense.append(parameter)

    def snapshot(self) -> Any:
        self._inputs.drop()  # of the step before
        tables = [(each._buffers, name) for each in self._modules for name in each._buffers]
        buffers = [(table, name, buffer) for table, name in tables if (buffer := table[name]) is not None]
        kept = list(zip(buffers, copies([buffer for *_, buffer in buffers]), strict=True))
        return kept, self.moving.keep(), rng.state(), self._step_number

    def rollback(self, kept: Any) -> None:
        buffers, moving, random, self._step_number = kept
        self.moving.put(moving)
        for (table, name, buffer), old in buffers:
            table[name] = buffer.copy_(old)  # forward may have replaced the buffer
        rng.set_state(random)
        self._inputs.restore()

    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if self._divided:
            self._divided.assemble({})
        self.optimizer.load_state_dict(state)

    @property
    def _is_divided(self) -> bool:
        return self._divided is not None and self._divided.shards is not None

    def divided_optimizer(self) -> contract.DividedOptimizer:
        self._divided = DividedOptimizer(self.optimizer, {name: self.backward.parameters[name] for name in self.names})
        return self._divided

    def optimizer_rows(self, windows: Mapping[str, RowRange]) -> dict[str, dict[str, Any]]:
        return state_store.rows(self.optimizer, self.optimizer_index, self.state(), windows)

    def take_optimizer_rows(self, states: Mapping[str, Mapping[str, Any]], windows: Mapping[str, RowRange]) -> None:
        state_store.take_rows(self.optimizer, self.optimizer_index, self.state(), states, windows)

    def sync_norm(self, link: transport.Link | None) -> None:
        self.local_step.check_sync_norm()
        self._sum_norms(InStepReduce(None, link))

    def reopen(self, link: transport.Link | None) -> None:
        for reducer in dict.fromkeys(reducer for _, reducer in self._norms):
            reducer.reopen(link)

    def _sum_norms(self, reducer: InStepReduce) -> None:
        layers = SyncBatchNorm(self.model)
        layers.convert(reducer.total, reducer.inside)
        reducer.receive, self._in_step, self._sync_norms = layers.receive, reducer.step, layers.computing
        self._norms.append((layers, reducer))

    def answered(self) -> set[int]:
        """The ids of the running statistics that synchronised batch norm keeps equal on all processes."""
        return self._norms[0][0].answered

    def close(self) -> None:
        self._deferred.close()
        self.backward.close()
        matmul.remove(self.model)
        for layers, reducer in self._norms:
            layers.restore()
            reducer.close()


def num_held(optimizer: Optimizer) -> int:
    """The number of parameters in the optimizer's groups."""
    return sum(len(group["params"]) for group in optimizer.param_groups)
