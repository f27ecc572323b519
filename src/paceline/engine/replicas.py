"""One process, k Python threads, each a replica of the model on its own part of the batch.

    each thread    forward, backward on its rows, pinned to its cores; weights are shared, gradients are its own
    the last one   to offer a bucket adds all parts (or concatenates factors), in the order of the threads
    all cores      one update

*Invariants*: equal to sequential on the whole batch; equal seeds give equal runs.
*Cost*: k gradients and k sets of activations in memory, one pass over each gradient to add it.
Each replica has its own batch statistics (the model's buffers are the first replica's; the others start
every step with them), and dropout masks differ from those of one process. If the model is on a GPU and
there are enough GPUs, each replica has its own: that has never been run.
*Source*: multithreaded data parallelism: Lerat, Mahmoudi & Mahmoudi 2022 (doi 10.3390/electronics11101525).
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline import transport
from paceline.contract import Loss, Share
from paceline.engine import sequential
from paceline.engine.compute.batch import filled
from paceline.engine.compute.rng import ThreadRng, seeds
from paceline.engine.compute.sync_batch_norm import SyncBatchNorm
from paceline.engine.node import affinity, cgroup_limits
from paceline.engine.node.in_step_reduce import InStepReduce, ThreadReduce
from paceline.engine.node.local_group import LocalGroupError
from paceline.exchange.flow.metric_tensors import added
from paceline.messages import Gradient, Vote
from paceline.registry import PROCESSES, THREADS


class Engine(sequential.Engine):
    """The model itself is the first replica."""

    defers_updates = False  # several threads read the weights
    counts = "copy"
    # else OpenMP's threads spin after the update, on the cores that the replicas need then
    environment: Mapping[str, str] = {"OMP_WAIT_POLICY": "passive"}

    def __init__(self, num_replicas: int = 2):
        super().__init__()
        if not (isinstance(num_replicas, int) and num_replicas >= 1):
            raise ValueError(f"engine 'replicas:k' needs a whole number k >= 1, got {num_replicas!r}")
        self.num_replicas = num_replicas
        self._thread_reduce = ThreadReduce(lambda vector: vector)
        self._shared: list[tuple[str, int, nn.Parameter]] = []  # frozen parameters, with torch's version counters
        self._reduce_step: Callable[[bool], AbstractContextManager[None]] = lambda present: nullcontext()

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        cpus, allowed = os.sched_getaffinity(0), cgroup_limits.cores()
        parts = [affinity.share(i, self.num_replicas, cpus, allowed=allowed) for i in range(self.num_replicas)]
        self.num_threads_each = min(num_threads for _, num_threads in parts)
        twins = [twin(model, i) for i in range(1, self.num_replicas)]  # before there are hooks on the model
        self.twins: list[sequential.Engine] = []
        for one in twins:
            self.twins.append(sequential.Engine())
            self.twins[-1].numerics, self.twins[-1].call_model = self.numerics, self.call_model
            self.twins[-1].accumulate, self.twins[-1]._keeps = self.accumulate, False
            self.twins[-1].divided, self.twins[-1].bucket_bytes = self.divided, self.bucket_bytes
            self.twins[-1].open(one, optimizer, loss, metric)
        _, self.num_threads = affinity.share(0, 1, cpus, allowed=allowed)
        self._devices = [{each.device for each in one.parameters()} for one in (model, *twins)]
        super().open(model, optimizer, loss, metric)
        self._keeps = False
        self.pools = [
            ThreadPoolExecutor(1, f"paceline replica {i}", _settle, (part, self.num_threads_each, each))
            for i, ((part, _), each) in enumerate(zip(parts, self._devices, strict=True))
        ]

    def begin_step(self, assignment: Share, step: int) -> None:
        super().begin_step(assignment, step)
        for one in self.twins:
            one._step_number, one._least, one._full = self._step_number, self._least, self._full // self.num_replicas

    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        self._check_parameters()
        self._follow()
        batch = filled(batch)
        self._inputs.capture(batch)  # once, of the whole batch: some tensors go to every replica
        for one in self.twins:
            one._num_held, one._divided = self._num_held, self._divided  # all replicas have the same optimizer
        looks, gather = self.moving.looks, _Gather(self.num_replicas, offer)
        parts = [] if batch is None else self._split(batch, self.num_replicas)
        parts += [None] * (self.num_replicas - len(parts))
        self.num_local_samples = None  # it counts the whole share, of which each replica has a part
        compute = [super().gradient, *(one.gradient for one in self.twins)]
        device = self.weights[0].device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        grads, inferring = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run(i: int, seed: int) -> Vote:
            try:
                # torch's modes are per thread: these are the caller's
                with (
                    torch.autocast(device, dtype, enabled),
                    torch.inference_mode() if inferring else torch.set_grad_enabled(grads),
                    ThreadRng(seed, self._devices[i]),
                ):
                    return compute[i](parts[i], scale, forms, lambda gradient: gather.offer(i, gradient))
            except BaseException:
                self._thread_reduce.give_up()
                raise

        self._thread_reduce.start(sum(part is not None for part in parts))
        torch.set_num_threads(self.num_threads_each)  # MKL's part of this setting is global
        with self._reduce_step(batch is not None):
            futures = [self.pools[i].submit(run, i, seed) for i, seed in enumerate(seeds(self.num_replicas))]
            try:
                wait(futures)
            finally:
                wait(futures)  # also after an interrupt: no replica computes after the step
                torch.set_num_threads(self.num_threads)
            errors = [error for one in futures if (error := one.exception())]
            for error in sorted(errors, key=lambda error: isinstance(error, LocalGroupError)):
                raise error  # a replica's own error before those that it caused in the others
        self._inputs.check()
        self._check_frozen(looks, sum(part is not None for part in parts))
        self.metric_tensors = added(one.metric_tensors for one in (self, *self.twins))
        vote = Vote.merge([one.result() for one in futures])
        vote.constant = vote.trains_nothing
        return vote

    def sync_norm(self, link: transport.Link | None) -> None:
        gpus = [device for one in self._devices for device in one if device.type == "cuda"]
        if len(gpus) > len(set(gpus)):  # torch runs all backward passes of a GPU in one thread, which would wait
            raise ValueError(
                f"engine 'replicas:{self.num_replicas}' has several replicas on one GPU, which cannot wait for each "
                f"other within a backward pass; use batch_norm='local', or at most {len(set(gpus))} replicas"
            )
        reducer = InStepReduce(None, link)
        self._thread_reduce.beyond, self._reduce_step = reducer.total, reducer.step
        for i, one in enumerate([self, *self.twins]):
            layers = SyncBatchNorm(one.model)
            layers.convert(partial(self._thread_reduce.total, i), reducer.inside)
            one._sync_norms = layers.computing
            self._norms.append((layers, reducer))
        reducer.receive = self._norms[0][0].receive

    def _check_frozen(self, looks: bool, count: int) -> None:
        """Finds frozen parameters that forward changes, in ``count`` replicas. Raises ValueError for a shared one."""
        if looks:
            computed = [one.moving for one in self.twins][: max(0, count - 1)]
            self.moving.found.update(*(one.found for one in computed))
            self.moving.compare(one.tensors() for one in computed)
        for name, number, each in self._shared:
            if each._version != number:
                raise ValueError(
                    f"engine 'replicas:{self.num_replicas}': in step {self._step_number} forward began to change "
                    f"parameter {name!r}, which does not train and is shared by all replicas; change it from the first "
                    f"step on, or use engine '{THREADS}:k' or '{PROCESSES}:k'"
                )

    def _follow(self) -> None:
        """Copies the model's weights, buffers, mode and plain attributes, as they are now, to the other replicas."""
        moving = {id(each) for each in self.moving.of_frozen()}
        for one in self.twins:
            one.accumulate = self.accumulate
            with torch.no_grad():
                for weight, its in zip(self.model.parameters(), one.model.parameters(), strict=True):
                    if weight.device != its.device:
                        its.copy_(weight)
                    elif id(weight) in moving:
                        if weight.data_ptr() == its.data_ptr():
                            its.data = weight.data.clone()
                        its.data.copy_(weight)
                    elif weight.data_ptr() != its.data_ptr():
                        its.data = weight.data
                    its.requires_grad_(weight.requires_grad)
                for buffer, twin_buffer in zip(self.model.buffers(), one.model.buffers(), strict=True):
                    twin_buffer.copy_(buffer)
            for module, twin_module in zip(self.model.modules(), one.model.modules(), strict=True):
                twin_module.training = module.training
                for name, value in vars(module).items():
                    if value is None or isinstance(value, int | float | str):
                        vars(twin_module)[name] = value
        still = [name for name, each in self.moving.frozen.items() if id(each) not in moving]
        models = [self.moving.frozen, *(one.moving.frozen for one in self.twins)] if still else []
        self._shared = [(name, frozen[name]._version, frozen[name]) for frozen in models for name in still]

    def close(self) -> None:
        super().close()
        for pool in self.pools:
            pool.shutdown()


class _Gather:
    """Collects each replica's part of each bucket; offers the node's gradient when all parts are there."""

    def __init__(self, size: int, offer: Callable[[Gradient], None]):
        self.size, self.offer_whole = size, offer
        self.parts: dict[int, dict[int, Gradient]] = {}
        self.lock = threading.Lock()

    def offer(self, replica: int, gradient: Gradient) -> None:
        with self.lock:
            parts = self.parts.setdefault(gradient.bucket.index, {})
            parts[replica] = gradient
            if len(parts) < self.size:
                return
            del self.parts[gradient.bucket.index]
        self.offer_whole(add([parts[i] for i in range(self.size)]))


def add(parts: Sequence[Gradient]) -> Gradient:
    """The sum of the parts, in their order, made in the first; factors are concatenated."""
    first = parts[0]
    if first.flat is not None:
        for part in parts[1:]:
            assert part.flat is not None
            first.flat.add_(part.flat.to(first.flat.device))
        return first
    left = [part.output_grad for part in parts if part.output_grad is not None]
    right = [part.layer_input for part in parts if part.layer_input is not None]
    device = left[0].device
    return Gradient(
        first.bucket,
        output_grad=torch.cat([p.to(device) for p in left]),
        layer_input=torch.cat([p.to(device) for p in right]),
    )


def twin(model: nn.Module, index: int) -> nn.Module:
    """A copy with the same weights but its own gradients and buffers; or on the ``index``-th GPU after the model's."""
    place: dict[torch.device, torch.device] = {}
    for parameter in model.parameters():
        device = parameter.device
        spare = device.type == "cuda" and (device.index or 0) + index < torch.cuda.device_count()
        place[device] = torch.device("cuda", (device.index or 0) + index) if spare else device
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        its: Any = nn.Parameter(parameter.data.to(place[parameter.device]), parameter.requires_grad)
        memo[id(parameter)] = its
        if not parameter.requires_grad:
            continue
        for hook in (parameter._backward_hooks or {}).values():
            its.register_hook(hook)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            its.register_post_accumulate_grad_hook(hook)
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"engine 'replicas:k' needs copies of the model, and {type(model).__name__} cannot be copied ({error}); "
            f"use '{THREADS}:k' or '{PROCESSES}:k'"
        ) from error
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device in place:
                module._buffers[name] = buffer.to(place[buffer.device])
    return made


def _settle(cpus: set[int], num_threads: int, devices: set[torch.device]) -> None:
    """Pins a new thread to its cores, before it starts intra-op threads, which inherit them, and to its GPU."""
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(num_threads)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.set_device(device)
