"""k processes of the same script on one node: weights once in shared memory, one link for all.

    each process    forward, backward on its rows; its gradients go to its own region of shared memory
    local rank 0    adds them up (or concatenates factors) as they become complete, passes the sum to
                    the exchange, and writes the result to shared memory
    each process    multiplies, clips and updates its own rows of every weight

So optimizer state exists once per node, and the local sum uses memory bandwidth, not sockets. From then on
the optimizer's groups hold this process's parts of the weights; number, order and options of the groups do
not change. ``state_dict`` returns the whole state, and every process must call it.

*Invariants*: equal to sequential on the node's whole share; killing any process ends the others, and no file remains.
*Cost*: two messages per process and step on a local socket, and one more with clipping.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import contract, transport
from paceline.contract import Loss
from paceline.engine import sequential
from paceline.engine.compute import state_store
from paceline.engine.compute.optimizer_step import Factored, finish, square_norm
from paceline.engine.node import affinity, cgroup_limits
from paceline.engine.node.in_step_reduce import InStepReduce
from paceline.engine.node.local_control import FollowerControl, LeaderControl
from paceline.engine.node.local_exchange import LocalFollower, LocalLeader
from paceline.engine.node.local_group import LocalGroup
from paceline.engine.node.optimizer_shards import OptimizerShards
from paceline.engine.node.shared_memory import SharedBuffers
from paceline.messages import Gradient, RowRange, Update
from paceline.registry import THREADS, names, says


class Engine(sequential.Engine):
    """One of k processes. Reads LOCAL_RANK and LOCAL_WORLD_SIZE, which launchers set.

    ``inner``: an engine that computes the gradient of each process's rows, as in "processes:2/pipeline:2".
    """

    defers_updates = False  # the processes of a node update together
    counts, starts_processes = "copy", True

    def __init__(self, num_processes: int = 2, inner: contract.Engine | None = None):
        super().__init__()
        if inner is not None and not (inner.composes and isinstance(inner, sequential.Engine)):
            raise ValueError(
                f"engine 'processes:k/...' can have the gradient of each process computed by "
                f"{' or '.join(each for each in names('engine') if says('engine', each, 'composes'))} alone, not by "
                f"{type(inner).__module__.rpartition('.')[2]!r}"
            )
        self.inner = inner
        self.local_step = inner.local_step if inner else self.local_step
        if not (isinstance(num_processes, int) and num_processes >= 1):
            raise ValueError(f"engine 'processes:k' needs a whole number k >= 1, got {num_processes!r}")
        self.num_processes = num_processes

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rank = int(os.environ.get("LOCAL_RANK", str(int(os.environ.get("RANK", "0")) % size)))
        if self.num_processes != size:
            inside = f"/{type(self.inner).__module__.rpartition('.')[2]}:k" if self.inner else ""
            raise ValueError(
                f"engine 'processes:{self.num_processes}' needs as many processes on this node, LOCAL_WORLD_SIZE says "
                f"{size}; start the script with: paceline run --engine processes:{self.num_processes}{inside} SCRIPT"
            )
        if any(p.device.type != "cpu" for p in model.parameters()):
            raise ValueError(
                f"engine 'processes:{size}' shares weights in the machine's own memory, but the model lies on "
                f"{next(model.parameters()).device}; use one process per node for it, or a model on the CPU"
            )
        self.local_place = (rank, size)
        node = os.environ.get("GROUP_RANK", str(int(os.environ.get("RANK", rank)) // size))
        self.local_group = LocalGroup(rank, size, f"{os.environ.get('MASTER_PORT', '0')}-{node}")
        self._cpus = os.sched_getaffinity(0)
        self._own_cpus, self.num_threads = affinity.share(rank, size, self._cpus, allowed=cgroup_limits.cores())
        affinity.move(self._cpus, self._own_cpus)
        self.local_step.num_processes = size
        try:
            super().open(model, optimizer, loss, metric)
            self._share()
        except BaseException:
            self.local_group.close()
            affinity.move(self._own_cpus, self._cpus)
            raise

    def _share(self) -> None:
        parameters = self.backward.parameters
        self.places = SharedBuffers(self.local_group, self.buckets, {name: parameters[name] for name in self.names})
        for name in self.names:
            shared = self.places.weight(name)
            if self.local_place[0] == 0:
                shared.copy_(parameters[name].data)
            parameters[name].data = shared
        self._addresses = [parameter.data_ptr() for parameter in parameters.values()]
        self.local_group.barrier("joining")
        self.shares = OptimizerShards(self.optimizer, parameters, self.local_group)
        self._num_held = sequential.num_held(self.optimizer)
        self.alone = False

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name, place in zip(self.backward.parameters, self._addresses, strict=True):
            if self.backward.parameters[name].data_ptr() != place:
                raise ValueError(
                    f"parameter {name!r} was given other memory after join(), and the processes of this node share the "
                    f"old one; copy into it, as in `parameter.data.copy_(values)`, or use engine '{THREADS}:k'"
                )

    @property
    def division(self) -> str:
        return self.shares.division

    @property
    def pids(self) -> tuple[int, ...]:
        return os.getpid(), *self.local_group.pids.values()

    def sync_norm(self, link: transport.Link | None) -> None:
        self.local_step.check_sync_norm()
        local_group = LocalGroup(*self.local_place, f"{self.local_group.name}-norm")
        local_group.failure_detector = self.local_group.failure_detector
        self._sum_norms(InStepReduce(local_group, link))

    def local_exchange(
        self, exchange: contract.Exchange, control: transport.Control, alone: bool, activity: transport.Waits
    ) -> tuple[contract.Exchange, transport.Control]:
        self.alone, self.may_retry, (rank, _) = alone, control.tolerates_loss, self.local_place
        self.local_group.failure_detector.activity = activity
        # one process reports long waits: the other followers wait for one that waits itself
        self.local_group.failure_detector.reports = rank == 0 or (alone and rank == 1)
        parts = self.local_group, self.places, self.buckets, alone, self.may_retry
        if rank:
            follower = LocalFollower(exchange, *parts)
            return follower, FollowerControl(control, follower)
        leader = LocalLeader(exchange, *parts)
        return leader, LeaderControl(control, leader)

    def apply(self, update: Update) -> bool:
        applied = True
        if update.gradients:
            applied, self.norm = self._apply(update)
        if update.targets and self.local_place[0] == 0:
            state_store.write(update.targets, self.weights, self.optimizer)
        self.local_group.barrier("updating")
        return applied

    def _apply(self, update: Update) -> tuple[bool, float | None]:
        used = dict(zip(self.names, update.used, strict=True))
        gradients = {
            name: (gradient, i) for gradient in update.gradients for i, name in enumerate(gradient.bucket.names)
        }
        dense: list[Tensor] = []
        factored: list[Factored] = []
        for name, own, part in self.shares.own_parts:
            gradient, i = gradients[name]
            part.grad = None
            if not used[name]:
                continue
            if gradient.output_grad is not None and gradient.layer_input is not None:
                self._by_factors(part, gradient.output_grad[:, own], gradient.layer_input, dense, factored)
            else:
                part.grad = self._sum(gradient, i, own)
                dense.append(part)

        def whole(squares: float) -> float:
            squares += self._untrained([gradients[name] for name in self.shares.unowned if used[name]])
            return sum(row[0] for row in self.local_group.gather([squares], "clipping"))

        return finish(dense, factored, self.optimizer, update.rule, whole)

    def optimizer_rows(self, windows: Mapping[str, RowRange]) -> dict[str, dict[str, Any]]:
        """Its tensors lie in memory of their own."""
        found = self.shares.rows([(self.optimizer_index[name], window) for name, window in windows.items()])
        return {name: state for name, state in zip(windows, found, strict=True) if state is not None}

    def take_optimizer_rows(self, states: Mapping[str, Mapping[str, Any]], windows: Mapping[str, RowRange]) -> None:
        for name, window in windows.items():
            self.shares.take(self.optimizer_index[name], states.get(name), window)

    def _untrained(self, gradients: Sequence[tuple[Gradient, int]]) -> float:
        """The sum of squares of gradients that the optimizer does not use: the norm includes them."""
        if self.local_place[0]:
            return 0.0
        squares = 0.0
        for gradient, i in gradients:
            if gradient.output_grad is not None and gradient.layer_input is not None:
                left = gradient.output_grad
                squares += square_norm((), [Factored(left, left, gradient.layer_input)])
            else:
                squares += square_norm([self._sum(gradient, i, slice(None))])
        return squares

    def _sum(self, gradient: Gradient, i: int, own: slice) -> Tensor:
        """This process's slice of the gradient's i-th parameter; with a single node it is added up here."""
        bucket = gradient.bucket
        start, shape = sum(bucket.numels[:i]), bucket.shapes[i]
        assert gradient.flat is not None
        ranks = range(self.local_place[1])
        flats = [self.places.flat(bucket, rank) for rank in ranks] if self.alone else [gradient.flat]
        parts = [flat[start : start + bucket.numels[i]].view(shape) for flat in flats]
        whole = parts[0][own] if shape else parts[0]
        for part in parts[1:]:
            whole += part[own] if shape else part
        return whole

    def close(self) -> None:
        super().close()
        self.shares.close()
        self.local_group.close()
        affinity.move(self._own_cpus, self._cpus)
