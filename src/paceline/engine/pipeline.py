"""Pipeline of k stages in one process: the model is cut, and stages compute different micro-batches at once.

    each thread    a micro-batch: its forward pass, later its backward pass, on the cores of the stage that it is in
    a cut          before the forward of a named module. There a thread leaves its stage for the next one, and in
                   backward, when the gradient of that module's input is known, for the one before
    a stage        lets one thread in at a time, in the order of the schedule (`compute/pipeline_schedule.py`)

So the model's own forward runs unchanged, with whatever crosses the cut, and the process has the model, its gradients
and the optimizer's state once: their ``state_dict()`` and checkpoints contain all stages, and `Pace.evaluate` runs the
whole model. Without ``cut`` the first step is computed without a pipeline, and timed: then the cuts divide its forward
pass evenly.

*Invariants*: bit-equal to sequential with ``accumulate`` as many micro-batches, whatever the schedule and the cut, if
the update has as many threads (under autocast: where no weight is used twice); one stage is sequential. Dropout masks
are each micro-batch's own.
*Cost*: the activations of the micro-batches in flight; idle time of (k - 1) / (micros + k - 1).
*Source*: Huang et al. 2019 (arXiv 1811.06965), section 2.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import transport
from paceline.contract import Exchange, Loss
from paceline.engine import sequential
from paceline.engine.compute.batch import leaves
from paceline.engine.compute.forward_state import Moving
from paceline.engine.compute.gradient_hooks import Backward, Call
from paceline.engine.compute.gradient_hooks import Pass as State
from paceline.engine.compute.local_step import LocalStep
from paceline.engine.compute.matmul import make_substitutable, substitute
from paceline.engine.compute.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Cancelled,
    Pass,
    Schedule,
    Turns,
    in_flight,
)
from paceline.engine.compute.precision import Numerics
from paceline.engine.compute.rng import ThreadRng, seeds
from paceline.engine.node import affinity, cgroup_limits
from paceline.messages import Bucket, Gradient

PRESET = "preset"
Compute = Callable[[], Tensor | None]


class Engine(sequential.Engine):
    """Its options are those of `Stages`."""

    defers_updates, composes = False, True
    counts, micros_per_stage = "stage", 4
    turn_s = 0.25e-3  # a thread wakes up
    # else OpenMP's threads spin after the update, on the cores that the stages need then
    environment: Mapping[str, str] = {"OMP_WAIT_POLICY": "passive"}

    def __init__(self, num_stages: int = 2, micros: int = 0, schedule: str = "1f1b", cut: str = ""):
        super().__init__()
        stages = Stages(num_stages, micros, schedule, cut)
        self.local_step = stages if num_stages > 1 else self.local_step

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        if isinstance(self.local_step, Stages):  # threads of the update
            self.num_threads = affinity.share(0, 1, os.sched_getaffinity(0), allowed=cgroup_limits.cores())[1]
        super().open(model, optimizer, loss, metric)

    def local_exchange(
        self, exchange: Exchange, control: transport.Control, alone: bool, activity: transport.Waits
    ) -> tuple[Exchange, transport.Control]:
        found = super().local_exchange(exchange, control, alone, activity)
        self.backward.watch()
        return found


class Stages(LocalStep):
    """``micros``: micro-batches of a batch, 4 per stage by default. ``cut``: the names of the modules with which the
    stages after the first begin, separated by semicolons; "preset": those of the model's ``pipeline_cuts``, which has
    them by the number of stages."""

    def __init__(self, num_stages: int, micros: int, schedule: str, cut: str):
        for name, value, least in (("k", num_stages, 1), ("micros", micros, 0)):
            if not (isinstance(value, int) and value >= least):
                raise ValueError(f"engine 'pipeline:k' needs a whole number {name} >= {least}, got {value!r}")
        if schedule not in SCHEDULES:
            raise ValueError(f"engine 'pipeline': schedule is one of {', '.join(SCHEDULES)}, got {schedule!r}")
        cuts = [name.strip() for name in str(cut).split(";") if name.strip()]
        if cuts not in ([], [PRESET]) and len(cuts) != num_stages - 1:
            raise ValueError(f"engine 'pipeline:{num_stages}' has {num_stages - 1} cuts, cut={cut!r} has {len(cuts)}")
        self.num_stages, self.num_micros = num_stages, micros or Engine.micros_per_stage * num_stages
        self.schedule, self.cuts = schedule, cuts
        self.backward: Pipelined | None = None

    def hooked(self, model: nn.Module, numerics: Numerics, least_bytes: tuple[float, float]) -> Backward:
        cpus, allowed = os.sched_getaffinity(0), -(-cgroup_limits.cores() // self.num_processes)
        parts = [affinity.share(i, self.num_stages, cpus, allowed=allowed) for i in range(self.num_stages)]
        self.backward = Pipelined(model, SCHEDULES[self.schedule], parts, self.cuts, least_bytes)
        return self.backward

    def check(self, model: nn.Module, numerics: Numerics) -> None:
        if any(each.device.type != "cpu" for each in model.parameters()):
            raise ValueError(
                f"engine 'pipeline:{self.num_stages}' divides the cores of a processor into stages, and the model lies "
                f"on {next(model.parameters()).device}; use another engine, or a model on the CPU"
            )
        if numerics.compile:
            raise ValueError("engine 'pipeline' cuts a model between its modules, and a compiled one has none")
        names = dict(model.named_modules())
        if self.cuts == [PRESET] and PRESET not in names:
            presets = getattr(model, "pipeline_cuts", {})
            if self.num_stages not in presets:
                raise ValueError(
                    f"engine 'pipeline:{self.num_stages}': cut={PRESET} takes the model's own pipeline_cuts, and "
                    f"{type(model).__name__} has none for {self.num_stages} stages; name the modules, or leave cut out"
                )
            self.cuts = list(presets[self.num_stages])
        if missing := [name for name in self.cuts if name not in names]:
            raise ValueError(f"engine 'pipeline' is to cut before {missing[0]!r}, which is no module of this model")

    def check_step(self, moving: Moving) -> None:
        if changed := sorted(moving.found & moving.frozen.keys()):
            raise ValueError(
                f"engine 'pipeline' computes several micro-batches at once, and forward of this model changes "
                f"{changed[0]!r}, which does not train, such as a momentum encoder's weights; use another engine"
            )

    def check_sync_norm(self) -> None:
        raise ValueError("batch_norm='sync' needs all rows of a batch at once, not engine 'pipeline'")

    def found(self) -> str:
        assert self.backward
        text, self.backward.found = self.backward.found, ""
        return text


class Pipelined(Backward):
    """Runs the micro-batches of a step by a schedule. ``parts``: the cores of each stage, and its threads."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Callable[[int, int], Schedule],
        parts: Sequence[tuple[set[int], int]],
        cuts: Sequence[str],
        least_bytes: tuple[float, float],
    ):
        super().__init__(model, least_bytes=least_bytes)
        for module in self._hook_ids:
            make_substitutable(module)
        self._model, self._schedule, self._parts, self.cuts = model, schedule, parts, list(cuts)
        self._own = threading.local()  # of a micro-batch's thread: its turns, number and stage
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0  # of the pool
        self._stages: dict[str, int] = {}  # in which each parameter is used
        self.seconds: dict[tuple[int, Pass], float] = {}  # of each pass in the last step
        self.found = ""  # where the model is cut, once that is known
        self._cut()

    def _cut(self) -> None:
        modules = dict(self._model.named_modules())
        for stage, name in enumerate(self.cuts, 1):
            hook = modules[name].register_forward_pre_hook(self._entered(stage, name), prepend=True, with_kwargs=True)
            self._hooks.append(hook)

    def run(self, forms: Sequence[str], offer: Callable[[Gradient], None], *computes: Compute) -> State:
        if not computes:
            return super().run(forms, offer, *computes)
        if not self.cuts:
            return self._timed(forms, offer, *computes)
        for parameter in self.parameters.values():
            parameter.grad = None
        # buckets are offered at the end: until then each gradient is added to by the next micro-batch
        state = self._pass = _Concurrent(forms, offer, concurrent=True, own=self._own)
        schedule = self._schedule(len(self._parts), len(computes))
        turns, pool = Turns(schedule), self._threads(in_flight(schedule)[0])
        modes = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()
        try:
            futures = [
                pool.submit(self._micro, turns, number, compute, seed, *modes)
                for number, (compute, seed) in enumerate(zip(computes, seeds(len(computes)), strict=True))
            ]
            try:
                wait(futures)
            except BaseException:  # an interrupt: no thread computes after the step
                turns.fail()
                wait(futures)
                raise
            errors = [error for one in futures if (error := one.exception())]
            for failed in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
                raise failed  # a micro-batch's own error before those that it caused in the others
        finally:
            self._pass, self.seconds = None, turns.seconds
        return self._offer_rest(state)

    def _threads(self, count: int) -> ThreadPoolExecutor:
        """As many as micro-batches in flight: a thread keeps the memory that it freed, for its next micro-batch."""
        if self._pool is None or count > self._num_threads:
            self._close_pool()
            self._pool, self._num_threads = ThreadPoolExecutor(count, "paceline micro-batch"), count
        return self._pool

    def _micro(
        self, turns: Turns, number: int, compute: Compute, seed: int, cast: bool, dtype: torch.dtype, grads: bool
    ) -> None:
        own, last = self._own, len(self._parts) - 1
        try:
            own.turns, own.number, own.stage, own.forward = turns, number, 0, True
            self._enter_stage(FORWARD)
            # all threads have one cache of rounded weights: backward would compute those of another micro-batch's
            # forward in any stage
            rounds = torch.autocast("cpu", dtype, cast, cache_enabled=False)
            with rounds, torch.set_grad_enabled(grads), ThreadRng(seed):
                scalar = compute()
                if own.stage != last:
                    raise ValueError(f"forward did not call {self.cuts[own.stage]!r}, before which the pipeline is cut")
                turns.leave(last)
                own.forward = False
                self._enter_stage(BACKWARD)
                if scalar is not None and scalar.requires_grad:
                    self._check(scalar)
                    scalar.backward()  # type: ignore[no-untyped-call]
            for stage in range(own.stage, -1, -1):  # those that no gradient has reached
                if own.stage != stage:
                    own.stage = stage
                    self._enter_stage(BACKWARD)
                turns.leave(stage)
        except BaseException:
            turns.fail()
            raise
        finally:
            own.turns = None

    def _enter_stage(self, kind: str) -> None:
        own = self._own
        own.turns.enter(own.stage, Pass(kind, own.number))
        cpus, num_threads = self._parts[own.stage]
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(num_threads)

    def _entered(self, stage: int, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            own = self._own
            if getattr(own, "turns", None) is None or not own.forward:  # an evaluation, or recomputed in backward
                return
            if own.stage != stage - 1:
                raise ValueError(f"forward calls {name!r} twice, or before another cut; cut the pipeline elsewhere")
            for tensor in leaves((args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._left(stage))  # type: ignore[no-untyped-call]
            own.turns.leave(stage - 1)
            own.stage = stage
            self._enter_stage(FORWARD)

        return hook

    def _left(self, stage: int) -> None:
        """The gradient of what crosses a cut is known: of all that the stage computes, since autograd runs backward in
        the reverse order."""
        own = self._own
        if own.stage == stage and not own.forward:  # else the gradient is one that forward itself computes
            own.turns.leave(stage)
            own.stage = stage - 1
            self._enter_stage(BACKWARD)

    def _leave(self, bucket: Bucket, module: nn.Linear, right: Tensor, output: Tensor | None) -> Tensor | None:
        output = super()._leave(bucket, module, right, output)
        if output is not None:  # it is part of the graph
            self._check_stage(bucket.names[0])
        return output

    def _record(self, state: State, bucket: Bucket, call: Call, left: Tensor) -> None:
        if not state.is_own():  # a gradient inside forward; in backward this hook may come before that of the cut
            self._check_stage(bucket.names[0])
        super()._record(state, bucket, call, left)

    def _ready(self, bucket: Bucket, name: str) -> None:
        self._check_stage(name)
        super()._ready(bucket, name)

    def _check_stage(self, name: str) -> None:
        own = self._own
        if getattr(own, "turns", None) and self._stages.setdefault(name, own.stage) != own.stage:
            raise ValueError(
                f"parameter {name!r} is used by several stages of engine 'pipeline', whose gradients would be added at "
                f"once; cut the model elsewhere (at {', '.join(self.cuts)} now), or use another engine"
            )

    def _timed(self, forms: Sequence[str], offer: Callable[[Gradient], None], *computes: Compute) -> State:
        """The step without a pipeline. The last micro-batch is timed, module by module."""
        begins, span = defaultdict[str, list[float]](list), [0.0, 0.0]
        fit = {name for name, _ in self._model.named_modules() if name}  # modules that each micro-batch calls once

        def timed(compute: Compute) -> Tensor | None:
            begins.clear()
            hooks = [
                module.register_forward_pre_hook(lambda *_, name=name: begins[name].append(time.perf_counter()))
                for name, module in self._model.named_modules()
                if name
            ]
            span[0] = time.perf_counter()
            try:
                return compute()
            finally:
                span[1] = time.perf_counter()
                fit.intersection_update(name for name, found in begins.items() if len(found) == 1)
                for hook in hooks:
                    hook.remove()

        state = super().run(forms, offer, *(partial(timed, compute) for compute in computes))
        once = {name: begins[name][0] for name in fit}
        for stage in range(1, len(self._parts)):
            wanted = span[0] + (span[1] - span[0]) * stage / len(self._parts)
            free = [name for name in once if not self.cuts or once[name] > once[self.cuts[-1]]]
            if not free:
                raise ValueError(
                    f"engine 'pipeline:{len(self._parts)}': forward calls too few modules once to be cut into as many "
                    f"stages; use fewer"
                )
            self.cuts.append(min(free, key=lambda name: abs(once[name] - wanted)))
        ends = [span[0], *(once[name] for name in self.cuts), span[1]]
        self.found = (
            f"engine 'pipeline': the model is cut before {', '.join(map(repr, self.cuts))}, where its forward pass is "
            f"divided into {_percent(end - begin for begin, end in pairwise(ends))}, and its weights into "
            f"{_percent(self._numels(begins, ends[1:-1]))}; name other modules by cut="
        )
        self._cut()
        return state

    def _numels(self, begins: Mapping[str, Sequence[float]], ends: Sequence[float]) -> list[int]:
        """The weights of each stage. A layer belongs to that which first calls it."""
        numels = [0] * (len(ends) + 1)
        for name, module in self._model.named_modules():
            stage = bisect(ends, begins[name][0]) if begins.get(name) else 0
            numels[stage] += sum(each.numel() for each in module.parameters(recurse=False))
        return numels

    def close(self) -> None:
        super().close()
        self._close_pool()

    def _close_pool(self) -> None:
        if self._pool:
            self._pool.shutdown()


def _percent(parts: Iterable[float]) -> str:
    found = list(parts)
    return ", ".join(f"{100 * part / sum(found):.0f} %" for part in found)


@dataclass
class _Concurrent(State):
    """The state of all micro-batches' passes. ``own``: of each one's thread, ``forward``: whether it is in forward."""

    own: Any = None

    def is_own(self) -> bool:
        return not self.own.forward

    def hide(self, index: int, module: nn.Linear) -> None:
        # not from the other stages, which may use it too: with requires_grad_(False) its gradient there would be lost
        substitute(module, module.weight.detach())
        self.own.hidden = index

    def show(self, index: int, module: nn.Linear) -> bool:
        hidden = getattr(self.own, "hidden", None) == index
        substitute(None, module.weight)
        self.own.hidden = None
        return hidden
