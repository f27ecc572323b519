"""The micro-batches of a pipeline: each in a thread, which goes from stage to stage by the turns of a schedule."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.checks.pass_times import PassTimes, computing, even_cuts, typical
from paceline.engine.compute.batch import leaves
from paceline.engine.compute.gradient_hooks import Backward, Call
from paceline.engine.compute.gradient_hooks import Pass as State
from paceline.engine.compute.matmul import make_substitutable, substitute
from paceline.engine.compute.rng import ThreadRng, seeds
from paceline.engine.stages import devices
from paceline.engine.stages.schedule import BACKWARD, FORWARD, Cancelled, Pass, Schedule, Turns, in_flight
from paceline.messages import Bucket, Gradient

Compute = Callable[[], Tensor | None]
ELSEWHERE = "same device"  # of torch's error


class Pipelined(Backward):
    """Runs the micro-batches of a step by a schedule. ``parts``: the cores of each stage, and its threads; or
    ``places``: its device. A GPU computes what it was given in the order of the schedule."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Callable[[int, int], Schedule],
        parts: Sequence[tuple[set[int], int]],
        cuts: Sequence[str],
        least_bytes: tuple[float, float],
        places: Sequence[torch.device] = (),
    ):
        super().__init__(model, least_bytes=least_bytes)
        for module in self._hook_ids:
            make_substitutable(module)
        self._model, self._schedule, self._parts, self.cuts = model, schedule, parts, list(cuts)
        self._places, self._kind = places, places[0].type if places else "cpu"
        self._own = threading.local()  # of a micro-batch's thread: its turns, number and stage
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0  # of the pool
        self._stages: dict[str, int] = {}  # in which each parameter is used
        self.seconds: dict[tuple[int, Pass], float] = {}  # of each pass in the last step
        self.found = ""  # where the model is cut, once that is known
        self._busy = set[int]()  # stages that compute something, as seen in the first step
        self._seeing: list[Any] = []  # its hooks
        self._cut()

    def _cut(self) -> None:
        modules = dict(self._model.named_modules())
        for stage, name in enumerate(self.cuts, 1):
            hook = modules[name].register_forward_pre_hook(self._entered(stage, name), prepend=True, with_kwargs=True)
            self._hooks.append(hook)
        if self.cuts:
            self._seeing = [each.register_forward_pre_hook(self._seen) for _, each in computing(self._model)]
        if self._places:
            self._hooks += devices.follow(self._model, self.cuts, self._places)

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
        kind = self._kind
        modes = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_grad_enabled()
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
        while self._seeing:
            self._seeing.pop().remove()
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
            rounds = torch.autocast(self._kind, dtype, cast, cache_enabled=False)
            with rounds, torch.set_grad_enabled(grads), ThreadRng(seed, self._places):
                scalar = compute()
                if own.stage != last:
                    raise ValueError(f"forward did not call {self.cuts[own.stage]!r}, before which the pipeline is cut")
                turns.leave(last)
                own.forward = False
                self._enter_stage(BACKWARD)
                if scalar is not None and scalar.requires_grad:
                    self._check(scalar)
                    # else autograd has a thread for each GPU, in which no micro-batch could wait for its turn
                    with torch.autograd.set_multithreading_enabled(False) if self._places else nullcontext():
                        scalar.backward()  # type: ignore[no-untyped-call]
            for stage in range(own.stage, -1, -1):  # those that no gradient has reached
                if own.stage != stage:
                    own.stage = stage
                    self._enter_stage(BACKWARD)
                turns.leave(stage)
        except BaseException as error:
            turns.fail()
            if self._places and isinstance(error, RuntimeError) and ELSEWHERE in str(error):
                raise ValueError(
                    f"the pipeline has stages on {', '.join(map(str, self._places))}, and what a layer is passed "
                    f"moves there; but this model computes with tensors of two stages outside of a layer, or its loss "
                    f"does ({str(error).splitlines()[0]}). Cut it elsewhere than at {', '.join(self.cuts)}, or move "
                    f"one of them in forward, by .to(other.device)"
                ) from error
            raise
        finally:
            own.turns = None

    def _enter_stage(self, kind: str) -> None:
        own = self._own
        own.turns.enter(own.stage, Pass(kind, own.number))
        if self._places:
            devices.enter(self._places[own.stage])
            return
        cpus, num_threads = self._parts[own.stage]
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(num_threads)

    def _entered(self, stage: int, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            own = self._own
            if getattr(own, "turns", None) is None or not own.forward:  # an evaluation, or recomputed in backward
                return
            if own.stage >= stage:
                raise ValueError(f"forward calls {name!r} twice, and no cut can be there; cut the pipeline elsewhere")
            if own.stage < stage - 1:
                raise ValueError(
                    f"forward calls {name!r} before {self.cuts[own.stage]!r}; cut= names modules in the order in which "
                    f"forward calls them"
                )
            if self._seeing and own.stage not in self._busy:
                raise ValueError(
                    f"the pipeline is cut before {name!r}, and forward computes nothing in the stage before: its "
                    f"first layer is {name!r}, or the cut before is at the same place; cut the pipeline elsewhere"
                )
            for tensor in leaves((args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._left(stage))  # type: ignore[no-untyped-call]
            own.turns.leave(stage - 1)
            own.stage = stage
            self._enter_stage(FORWARD)

        return hook

    def _seen(self, *_: Any) -> None:
        if getattr(self._own, "turns", None):
            self._busy.add(self._own.stage)

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
                f"parameter {name!r} is used by several stages of the pipeline, whose gradients would be added at "
                f"once; cut the model elsewhere (at {', '.join(self.cuts)} now), or use another engine"
            )

    def _timed(self, forms: Sequence[str], offer: Callable[[Gradient], None], *computes: Compute) -> State:
        """The step without a pipeline. Each micro-batch is timed, module by module."""
        seen = [PassTimes() for _ in computes]

        def timed(times: PassTimes, compute: Compute) -> Tensor | None:
            with times.of(self._model):
                return compute()

        pairs = zip(seen, computes, strict=True)
        state = super().run(forms, offer, *(partial(timed, times, compute) for times, compute in pairs))
        ends = [*(times.span[0] for times in seen[1:]), time.perf_counter()]
        places = typical([times.places(end) for times, end in zip(seen, ends, strict=True)])
        weights = {name: _part(self._numels(seen[-1], [name])) for name in places}
        self.cuts = even_cuts(places, weights, len(self._parts), type(self._model).__name__)
        bounds = [0.0, *(places[name] for name in self.cuts), 1.0]
        self.found = (
            f"the model is cut before {', '.join(map(repr, self.cuts))}, where its passes are "
            f"divided into {_percent(end - begin for begin, end in pairwise(bounds))}, and its weights into "
            f"{_percent(self._numels(seen[-1], self.cuts))}; name other modules by cut="
        )
        self._cut()
        return state

    def _numels(self, times: PassTimes, cuts: Sequence[str]) -> list[int]:
        """The weights of each stage. A layer belongs to that which first calls it."""
        numels, ends = [0] * (len(cuts) + 1), [times.begins[name][0] for name in cuts]
        for name, module in self._model.named_modules():
            stage = bisect(ends, times.begins[name][0]) if times.begins.get(name) else 0
            numels[stage] += sum(each.numel() for each in module.parameters(recurse=False))
        return numels

    def close(self) -> None:
        super().close()
        self._close_pool()

    def _close_pool(self) -> None:
        if self._pool:
            self._pool.shutdown()


def _part(numels: Sequence[int]) -> float:
    """The first one's, of their sum."""
    return numels[0] / max(1, sum(numels))


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
