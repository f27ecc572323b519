"""k processes of the same script on one node: weights once in shared memory, one link for all.

    each process    forward, backward on its rows; its pieces go to its own place in shared memory
    local rank 0    adds them up (or lines the factors up) as they become complete, offers the sum to
                    the exchange, and puts what was agreed where all can read it
    each process    multiplies, clips and updates its own rows of every weight

so optimizer state exists once per node, and the local sum costs memory bandwidth, not sockets. The
optimizer's groups hold this process's parts of the weights from then on (their number, order and
options stay the user's), and its ``state_dict`` is whole, but every process must call it.

*Laws*: as sequential on the node's whole share; killing any process ends the others and leaves nothing.
*Cost*: two messages per process and step on a local socket, and one more with clipping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import Agreement, Piece, Rule, Window
from paceline.engine import sequential
from paceline.engine.compute.optimizer_step import Factored, finish, norms
from paceline.engine.node import affinity, cgroup_limits
from paceline.engine.node.in_step_reduce import Everyone
from paceline.engine.node.local_control import FollowerControl, LeaderControl
from paceline.engine.node.local_exchange import Follower, Leader
from paceline.engine.node.local_group import Crew
from paceline.engine.node.optimizer_shards import Shares
from paceline.engine.node.shared_memory import Places
from paceline.registry import THREADS


class Engine(sequential.Engine):
    """One of k. Reads LOCAL_RANK and LOCAL_WORLD_SIZE, as launchers set them."""

    ahead = False  # the processes of a node update together
    counts, starts_processes = "copy", True

    def __init__(self, num_processes: int = 2):
        super().__init__()
        if not (isinstance(num_processes, int) and num_processes >= 1):
            raise ValueError(f"engine 'processes:k' needs a whole number k >= 1, got {num_processes!r}")
        self.num_processes = num_processes

    def open(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any] | None,
        metric: Callable[..., Any] | None = None,
    ) -> None:
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rank = int(os.environ.get("LOCAL_RANK", str(int(os.environ.get("RANK", "0")) % size)))
        if self.num_processes != size:
            raise ValueError(
                f"engine 'processes:{self.num_processes}' needs as many processes on this node, LOCAL_WORLD_SIZE says "
                f"{size}; start the script with: paceline run --engine processes:{self.num_processes} SCRIPT"
            )
        if any(p.device.type != "cpu" for p in model.parameters()):
            raise ValueError(
                f"engine 'processes:{size}' shares weights in the machine's own memory, but the model lies on "
                f"{next(model.parameters()).device}; use one process per node for it, or a model on the CPU"
            )
        self.seat = (rank, size)
        node = os.environ.get("GROUP_RANK", str(int(os.environ.get("RANK", rank)) // size))
        self.crew = Crew(rank, size, f"{os.environ.get('MASTER_PORT', '0')}-{node}")
        self._cpus = os.sched_getaffinity(0)
        self._mine, self.num_threads = affinity.share(rank, size, self._cpus, allowed=cgroup_limits.cores())
        affinity.move(self._cpus, self._mine)
        try:
            super().open(model, optimizer, loss, metric)
            self._share()
        except BaseException:
            self.crew.close()
            affinity.move(self._mine, self._cpus)
            raise

    def _share(self) -> None:
        parameters = self.backward.parameters
        self.places = Places(self.crew, self.specs, {name: parameters[name] for name in self.names}, self.buffers)
        for name in self.names:
            shared = self.places.weight(name)
            if self.seat[0] == 0:
                shared.copy_(parameters[name].data)
            parameters[name].data = shared
        self._lie = [parameter.data_ptr() for parameter in parameters.values()]
        self.crew.barrier("joining")
        self.shares = Shares(self.optimizer, parameters, self.crew)
        self._num_held = sequential.num_held(self.optimizer)
        self.alone = False

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name, place in zip(self.backward.parameters, self._lie, strict=True):
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
        return os.getpid(), *self.crew.pids.values()

    def sync_norm(self, link: contract.Link | None) -> None:
        crew = Crew(*self.seat, f"{self.crew.name}-norm")
        crew.doubts = self.crew.doubts
        self._sum_norms(Everyone(crew, link))

    def relay(
        self, exchange: contract.Exchange, control: contract.Control, alone: bool, activity: contract.Waits
    ) -> tuple[contract.Exchange, contract.Control]:
        self.alone, self.redoes, (rank, _) = alone, control.survives, self.seat
        self.crew.doubts.whereabouts = activity
        self.crew.doubts.tells = rank == 0 or (alone and rank == 1)  # else it waits for who waits itself
        parts = self.crew, self.places, self.specs, alone, self.redoes
        if rank:
            follower = Follower(exchange, *parts)
            return follower, FollowerControl(control, follower)
        leader = Leader(exchange, *parts)
        return leader, LeaderControl(control, leader)

    def update(self, agreement: Agreement, rule: Rule) -> bool:
        used = dict(zip(self.names, agreement.ballot.used, strict=True))
        pieces = {name: (piece, i) for piece in agreement.pieces for i, name in enumerate(piece.spec.names)}
        dense: list[Tensor] = []
        factored: list[Factored] = []
        for name, own, part in self.shares.mine:
            piece, i = pieces[name]
            part.grad = None
            if not used[name]:
                continue
            if piece.left is not None and piece.right is not None:
                self._by_factors(part, piece.left[:, own], piece.right, dense, factored)
            else:
                part.grad = self._sum(piece, i, own)
                dense.append(part)

        def whole(squares: float) -> float:
            squares += self._untrained([pieces[name] for name in self.shares.nobodys if used[name]])
            return sum(row[0] for row in self.crew.gather([squares], "clipping"))

        applied, self.norm = finish(dense, factored, self.optimizer, rule, whole)
        self.crew.barrier("updating")
        return applied

    def optimizer_rows(self, windows: Mapping[str, Window]) -> dict[str, dict[str, Any]]:
        """Its tensors lie in memory of their own."""
        found = self.shares.rows([(self.numbers[name], window) for name, window in windows.items()])
        return {name: state for name, state in zip(windows, found, strict=True) if state is not None}

    def take_optimizer_rows(self, states: Mapping[str, Mapping[str, Any]], windows: Mapping[str, Window]) -> None:
        for name, window in windows.items():
            self.shares.take(self.numbers[name], states.get(name), window)

    def _untrained(self, pieces: Sequence[tuple[Piece, int]]) -> float:
        """Squares of gradients that no optimizer takes: the norm is of all."""
        if self.seat[0]:
            return 0.0
        squares = 0.0
        for piece, i in pieces:
            if piece.left is not None and piece.right is not None:
                squares += float(Factored(piece.left, piece.left, piece.right).square_norm())
            else:
                squares += sum(float(norm) ** 2 for norm in norms([self._sum(piece, i, slice(None))]))
        return squares

    def _sum(self, piece: Piece, i: int, own: slice) -> Tensor:
        """This process's slice of the piece's i-th parameter: agreed, or still to be added up over the crew."""
        spec = piece.spec
        start, shape = sum(spec.numels[:i]), spec.shapes[i]
        assert piece.flat is not None
        flats = [self.places.flat(spec, rank) for rank in range(self.seat[1])] if self.alone else [piece.flat]
        parts = [flat[start : start + spec.numels[i]].view(shape) for flat in flats]
        whole = parts[0][own] if shape else parts[0]
        for part in parts[1:]:
            whole += part[own] if shape else part
        return whole

    def close(self) -> None:
        super().close()
        self.shares.close()
        self.crew.close()
        affinity.move(self._mine, self._cpus)
