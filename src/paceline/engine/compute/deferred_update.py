"""Delayed (asynchronous) update during the next forward pass: each weight is waited for where it is first read.

    step k      backward; buckets are sent; the vote; `defer`: no weight has been updated yet
    step k + 1  forward: a torch function with a parameter among its arguments waits for the parameter's bucket.
                Meanwhile other buckets that have arrived are applied
    after it    `wait_pending`: buckets that forward has not read are applied before backward offers new ones

Any use of the model outside of a step (a call, a ``state_dict``) first waits for all updates. Weights that a script
reads directly between steps may be those before the last update: call `wait_pending` before.

*Invariants*: bit-equal to the update that waits for all buckets: the same sums, in the same order, with the options
(learning rate, momentum) of the step that made the gradient. A non-finite bucket is not applied; all others are.
*Source*: forward waits per layer: Jayarajan et al. 2019 (arXiv 1905.03960); Peng et al. 2019 (SOSP).

`choose`: whether a step's update may overlap with the next forward pass, and each reason against it.
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
from paceline.engine.node.several_optimizers import kind_of
from paceline.errors import LinkError, NotFinite
from paceline.job import Job
from paceline.messages import PendingGradient, Update, UpdateRule
from paceline.registry import EXCHANGE, ONE_PROCESS


class DeferredUpdate:
    """``update``: applies gradients that have arrived; False if they are not finite."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, parameters: Mapping[str, Tensor], update: Callable[[Update], bool]
    ):
        self.model, self.optimizer, self.parameters, self._update = model, optimizer, parameters, update
        self.waited_s = 0.0
        self._pending: dict[int, PendingGradient] = {}  # by bucket, in the order in which they arrive
        self._bucket_of: dict[int, int] = {}
        self._used, self._rule = b"", UpdateRule()
        self._options: list[dict[str, Any]] = []  # of the optimizer, in the step that made the gradient
        self._not_finite: list[str] = []
        self._reading = self._stepped = False
        self._hooks: list[Any] = []

    def defer(self, update: Update) -> None:
        """From now on forward waits for each bucket where it reads it."""
        if not self._hooks:
            self._watch()
        self._pending = {pending.bucket.index: pending for pending in update.pending}
        self._bucket_of = {
            id(self.parameters[name]): each.bucket.index for each in update.pending for name in each.bucket.names
        }
        self._used, self._rule = update.used, update.rule
        groups = self.optimizer.param_groups
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = None  # its content has been sent
        self._options = [{key: copy.deepcopy(group[key]) for key in group if key != "params"} for group in groups]
        if not self._stepped:
            own_steps.step(self.optimizer)  # without gradients: a scheduler warns where no optimizer step precedes it
            self._stepped = True

    def _watch(self) -> None:
        """Registers hooks by which any use of the model outside of a step waits for pending buckets. Lambdas, not
        bound methods: a deep copy of the model copies its hooks, and with a bound method this object, too."""
        self._hooks = [
            module.register_forward_pre_hook(lambda module, _: self._called(module)) for module in self.model.modules()
        ]
        for module in self.model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.wait_pending()))  # type: ignore[no-untyped-call]
            self._hooks.append(module.register_load_state_dict_pre_hook(lambda *_: self.wait_pending()))  # type: ignore[no-untyped-call]
        self._hooks.append(self.optimizer.register_state_dict_pre_hook(lambda _: self.wait_pending()))
        self._hooks.append(self.optimizer.register_load_state_dict_pre_hook(lambda *_: self.wait_pending()))

    def _called(self, module: nn.Module) -> None:
        """In a step, waits for the module's own weights: its forward may read them without a torch function."""
        if self._pending and self._reading:
            self.wait_for(module._parameters.values())
        elif self._pending:
            self.wait_pending()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a step's forward pass and loss; at its end all updates have been applied."""
        if not self._pending:
            yield
        else:
            self._reading = True
            try:
                with _Reading(self):
                    yield
            finally:
                self._reading = False
        self.wait_pending()

    def wait_for(self, given: Any) -> None:
        """Waits for the buckets of all parameters in these arguments of a function."""
        for each in given:
            if isinstance(each, Tensor):
                if (index := self._bucket_of.get(id(each))) in self._pending:
                    self._need(index)
            elif isinstance(each, list | tuple):
                self.wait_for(each)
            elif isinstance(each, dict):
                self.wait_for(each.values())

    def wait_pending(self) -> None:
        """Raises NotFinite, and only here: within forward, each process would raise it at a different place."""
        while self._pending:
            self._need(next(iter(self._pending)))
        if self._not_finite:
            self._refuse()

    def _need(self, index: int) -> None:
        while index in self._pending:
            if self._pending[index].ready():
                self._apply(index)
                continue
            other = next((i for i, pending in self._pending.items() if pending.ready()), None)
            self._apply(next(iter(self._pending)) if other is None else other)

    def _apply(self, index: int) -> None:
        pending = self._pending.pop(index)
        start = time.perf_counter()
        try:
            gradient = pending.wait()
        except LinkError:
            self._pending = {}  # the others will not arrive
            raise
        except BaseException:
            self._pending = {index: pending, **self._pending}  # interrupted: it may still arrive
            raise
        self.waited_s += time.perf_counter() - start
        names = pending.bucket.names
        device = self.parameters[names[0]].device.type
        unseen = torch._C.DisableTorchFunction()  # the optimizer may read weights whose update is still pending
        with unseen, torch.no_grad(), torch.autocast(device, enabled=False), self._with_options():
            if not self._update(Update([gradient], self._used, self._rule)):
                self._not_finite.append(f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
        for name in names:
            self.parameters[name].grad = None  # the next bucket's update must not apply it again

    @contextmanager
    def _with_options(self) -> Iterator[None]:
        """Within, the optimizer has the options of the gradient's step, which a scheduler may have changed since."""
        groups = self.optimizer.param_groups
        current = [{key: group[key] for key in saved} for group, saved in zip(groups, self._options, strict=True)]
        try:
            for group, saved in zip(groups, self._options, strict=True):
                group.update(saved)
            yield
        finally:
            for group, options in zip(groups, current, strict=True):
                group.update(options)

    def _refuse(self) -> None:
        names, self._not_finite = ", ".join(self._not_finite), []
        rates = sorted({float(options["lr"]) for options in self._options if "lr" in options})
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
    """Waits, before each torch function, for the parameters among its arguments."""

    def __init__(self, deferred: DeferredUpdate):
        super().__init__()
        self.deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.deferred._pending:
            self.deferred.wait_for(args)
            self.deferred.wait_for(kwargs.values())
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
        against.append(f"engine {row!r} updates all weights at once: use {ONE_PROCESS}")
    if getattr(numerics, "compile", False):
        against.append(f"engine {row!r} compiles the model, hiding where it reads a weight: use one without compile")
    if any(_is_closed(module) for module in job.model.modules()):
        against.append("a scripted or compiled module hides where it reads a weight: use the module itself")
    if job.clip is not None:
        against.append(f"clip={job.clip:g} needs the norm of the whole gradient before any weight changes")
    if getattr(numerics, "precision", "fp32") == "fp16":
        against.append("fp16 scales the loss and may skip a step only when the whole gradient has arrived: use bf16")
    if chosen not in exchange.overlaps:
        against.append(f"the exchange has no gradients that arrive later: use {EXCHANGE!r}")
    if not splits(job.optimizer):
        against.append(
            f"optimizer {kind_of(job.optimizer)} cannot update one weight after the other (hooks around its "
            f"step, or a step that counts): use one of torch.optim, without hooks"
        )
    if against:
        raise ValueError(f"join: overlap='forward' lets weights change one by one, and {'; '.join(against)}")
    return chosen


def _is_closed(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
