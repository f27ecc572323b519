"""Delayed (asynchronous) update during the next forward pass: each weight is waited for where it is first read.

    step k      backward; buckets leave; the vote; `defer`: nothing has been updated yet
    step k + 1  forward: a torch function that is given a parameter waits for its bucket. While it waits, other buckets
                that have arrived are applied
    after it    `wait_pending`: what forward has not read is applied before backward offers buckets of its own

Any use of the model outside of a step (a call, a ``state_dict``) settles first. Weights that a script reads by itself
between steps may be those before the last update: call `wait_pending`.

*Laws*: bit by bit the update that waits for all buckets: the same sums, in the same order, with the options (learning
rate, momentum) of the step that made the gradient. A bucket that is not finite is not applied; all others are.
*Source*: forward waits per layer: Jayarajan et al. 2019 (arXiv 1905.03960); Peng et al. 2019 (SOSP).

`choose`: whether a step's update may happen while the next forward pass runs, and each reason against it.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.contract import Engine, Exchange
from paceline.engine.checks import own_steps
from paceline.engine.node.optimizer_shards import splits
from paceline.errors import LinkError, NotFinite
from paceline.job import Job
from paceline.messages import PendingGradient, Update, UpdateRule
from paceline.registry import EXCHANGE, ONE_PROCESS


class DeferredUpdate:
    """``update``: applies gradients that are there; False if they are not finite."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, parameters: Mapping[str, Tensor], update: Callable[[Update], bool]
    ):
        self.model, self.optimizer, self.parameters, self._update = model, optimizer, parameters, update
        self.waited_s = 0.0
        self._coming: dict[int, PendingGradient] = {}  # by bucket, in the order in which they arrive
        self._bucket_of: dict[int, int] = {}
        self._used, self._rule = b"", UpdateRule()
        self._then: list[dict[str, Any]] = []  # the optimizer's options when the gradient was made
        self._bad: list[str] = []
        self._reading = self._stepped = False
        self._hooks: list[Any] = []

    def defer(self, update: Update) -> None:
        """From now on the buckets are waited for where they are needed."""
        if not self._hooks:
            self._watch()
        self._coming = {coming.bucket.index: coming for coming in update.pending}
        self._bucket_of = {
            id(self.parameters[name]): coming.bucket.index for coming in update.pending for name in coming.bucket.names
        }
        self._used, self._rule = update.used, update.rule
        groups = self.optimizer.param_groups
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = None  # what is in it is on its way
        self._then = [{key: copy.deepcopy(group[key]) for key in group if key != "params"} for group in groups]
        if not self._stepped:
            own_steps.step(self.optimizer)  # changes nothing; a schedule that moves now wants to have seen it
            self._stepped = True

    def _watch(self) -> None:
        """Once buckets may be pending, any use of the model outside of a step waits for them. Functions, not methods:
        copies of the model carry hooks along, and methods would have this copied too."""
        self._hooks = [
            module.register_forward_pre_hook(lambda module, _: self._called(module)) for module in self.model.modules()
        ]
        for module in self.model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.wait_pending()))  # type: ignore[no-untyped-call]
            self._hooks.append(module.register_load_state_dict_pre_hook(lambda *_: self.wait_pending()))  # type: ignore[no-untyped-call]
        self._hooks.append(self.optimizer.register_state_dict_pre_hook(lambda _: self.wait_pending()))
        self._hooks.append(self.optimizer.register_load_state_dict_pre_hook(lambda *_: self.wait_pending()))

    def _called(self, module: nn.Module) -> None:
        """In a step a module's own weights are waited for: what reads them may be no torch function."""
        if self._coming and self._reading:
            self.look(module._parameters.values())
        elif self._coming:
            self.wait_pending()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a step's forward pass and loss; at its end all is settled."""
        if not self._coming:
            yield
        else:
            self._reading = True
            try:
                with _Reading(self):
                    yield
            finally:
                self._reading = False
        self.wait_pending()

    def look(self, given: Any) -> None:
        """Waits for the buckets of all parameters in these arguments of a function."""
        for each in given:
            if isinstance(each, Tensor):
                if (index := self._bucket_of.get(id(each))) in self._coming:
                    self._need(index)
            elif isinstance(each, list | tuple):
                self.look(each)
            elif isinstance(each, dict):
                self.look(each.values())

    def wait_pending(self) -> None:
        """Raises NotFinite only here: in the middle of forward, each process would raise it at a place of its own."""
        while self._coming:
            self._need(next(iter(self._coming)))
        if self._bad:
            self._refuse()

    def _need(self, index: int) -> None:
        while index in self._coming:
            if self._coming[index].ready():
                self._apply(index)
                continue
            other = next((i for i, coming in self._coming.items() if coming.ready()), None)
            self._apply(next(iter(self._coming)) if other is None else other)

    def _apply(self, index: int) -> None:
        coming = self._coming.pop(index)
        start = time.perf_counter()
        try:
            gradient = coming.wait()
        except LinkError:
            self._coming = {}  # what was to come will not
            raise
        except BaseException:
            self._coming = {index: coming, **self._coming}  # interrupted: it is still to be waited for
            raise
        self.waited_s += time.perf_counter() - start
        names = coming.bucket.names
        device = self.parameters[names[0]].device.type
        unseen = torch._C.DisableTorchFunction()  # the optimizer reads other weights, which may be still to come
        with unseen, torch.no_grad(), torch.autocast(device, enabled=False), self._as_then():
            if not self._update(Update([gradient], self._used, self._rule)):
                self._bad.append(f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
        for name in names:
            self.parameters[name].grad = None  # the next bucket's update must not see it again

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """The optimizer's options are those of the step that made the gradient: a schedule has moved since."""
        groups = self.optimizer.param_groups
        now = [{key: group[key] for key in then} for group, then in zip(groups, self._then, strict=True)]
        try:
            for group, then in zip(groups, self._then, strict=True):
                group.update(then)
            yield
        finally:
            for group, options in zip(groups, now, strict=True):
                group.update(options)

    def _refuse(self) -> None:
        names, self._bad = ", ".join(self._bad), []
        rates = sorted({float(then["lr"]) for then in self._then if "lr" in then})
        raise NotFinite(
            f"the gradient of step {self._rule.step} is not finite ({names}), learning rate "
            f"{', '.join(f'{rate:g}' for rate in rates)}. With overlap='forward' this is found while the next step "
            f"runs: the weights of {names} are those before step {self._rule.step}, all others those after it. Resume "
            f"from a checkpoint; lower the learning rate, add warm-up, or use overlap='backward', which finds it "
            f"before any weight has changed"
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Reading(TorchFunctionMode):
    """Sees every torch function with its arguments before it is called."""

    def __init__(self, ahead: DeferredUpdate):
        super().__init__()
        self.ahead = ahead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.ahead._coming:
            self.ahead.look(args)
            self.ahead.look(kwargs.values())
        return func(*args, **kwargs)


ACCEPTED = ("backward", "forward")


def given(requested: str | None) -> str:
    """``requested``: None: PACELINE_OVERLAP, else "backward". Raises ValueError."""
    overlap = os.environ.get("PACELINE_OVERLAP") or "backward" if requested is None else requested
    if overlap not in ACCEPTED:
        raise ValueError(f"join: overlap is one of {', '.join(ACCEPTED)}, got {overlap!r}")
    return overlap


def choose(requested: str | None, job: Job, row: str, engine: Engine, exchange: Exchange) -> str:
    """As `given`. Raises ValueError with every reason against "forward"."""
    chosen = given(requested)
    if chosen == "backward":
        return chosen
    numerics = getattr(engine, "numerics", None)
    against = []
    if not engine.defers_updates:
        against.append(f"engine {row!r} updates all at once: use {ONE_PROCESS}")
    if getattr(numerics, "compile", False):
        against.append(f"row {row!r} compiles the model, which hides where it reads a weight: use one without compile")
    if any(_is_closed(module) for module in job.model.modules()):
        against.append("a scripted or compiled module hides where it reads a weight: use the module itself")
    if job.clip is not None:
        against.append(f"clip={job.clip:g} needs the norm of the whole gradient before any weight changes")
    if getattr(numerics, "precision", "fp32") == "fp16":
        against.append("fp16 scales the loss and may skip a step only when all of its gradient is there: use bf16")
    if chosen not in exchange.overlaps:
        against.append(f"the exchange has nothing that arrives later: use {EXCHANGE!r}")
    if not splits(job.optimizer):
        against.append(
            f"optimizer {type(job.optimizer).__name__} cannot update one weight after the other (hooks around its "
            f"step, or a step that counts): use one of torch.optim, without hooks"
        )
    if against:
        raise ValueError(f"join: overlap='forward' lets weights change one by one, and {'; '.join(against)}")
    return chosen


def _is_closed(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
