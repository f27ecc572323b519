"""A node of several processes in virtual time: each is a thread, with messages and memory as they share on a machine.

Mesh    what they share: messages on their way, memory, who has closed
Group   as `engine/node/local_group.py`: a closed line reports a failure, an error ends the others with its words
Engine  of one of them
"""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence

from torch import nn
from torch.optim import Optimizer

from paceline import contract
from paceline.contract import Loss
from paceline.engine import processes, sequential
from paceline.engine.node.local_group import END, ENDS, RESUME, LocalFailureDetector, LocalGroup, LocalGroupError
from paceline_bench.simulated.virtual_time import Place, World


class Mesh:
    def __init__(self, world: World, size: int):
        self.world, self.size = world, size
        self.messages: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)  # by sender and receiver
        self.memory: list[memoryview] = []
        self.closed: set[int] = set()
        self.ends: dict[int, str] = {}  # of each process but the first, how it ended
        self.place: Place = []
        self.taken: Callable[[int, int, Sequence[int]], None]  # told which samples one reads, and of which step

    def close(self, rank: int) -> None:
        self.closed.add(rank)
        self.world.notify(self.place)


class Group(LocalGroup):
    def __init__(self, rank: int, mesh: Mesh):
        self.rank, self.size, self.mesh, self.threads = rank, mesh.size, mesh, mesh.world
        self.lines = dict.fromkeys(range(1, mesh.size) if rank == 0 else (0,))  # type: ignore[assignment]
        self.name, self.pids, self._num_mapped = "simulated", {}, 0
        self.failure_detector = LocalFailureDetector(rank, self.pids, math.inf)

    def send(self, peer: int, kind: bytes, body: bytes = b"") -> None:
        if peer in self.mesh.closed:
            raise self._lost(peer, "it has ended, or left its loop before the others")
        self._post(peer, kind + body)
        self.mesh.world.yield_()

    def _post(self, peer: int, message: bytes) -> None:
        self.mesh.messages[self.rank, peer].append(message)
        self.mesh.world.notify(self.mesh.place)

    def _lost(self, peer: int, why: str) -> LocalGroupError:
        for message in self.mesh.messages[peer, self.rank]:
            if message[:1] in ENDS:
                return LocalGroupError(message[1:].decode(), resumes=message[:1] == RESUME)
        return self._failed(f"local rank {self.rank} lost local rank {peer} of this node: {why}")

    def recv_any(self, peers: Collection[int], doing: str) -> tuple[int, bytes, bytes]:
        def ready() -> list[int]:
            return [each for each in sorted(peers) if self.mesh.messages[each, self.rank] or each in self.mesh.closed]

        self.mesh.world.wait(ready, None, self.mesh.place)
        peer = self.mesh.world.dice.choice(ready())
        if not self.mesh.messages[peer, self.rank]:
            raise self._lost(peer, f"its process ended while {doing}")
        message = self.mesh.messages[peer, self.rank].popleft()
        if message[:1] in ENDS:
            raise LocalGroupError(message[1:].decode(), resumes=message[:1] == RESUME)
        return peer, message[:1], message[1:]

    def peek(self, peer: int) -> bytes:
        waiting = self.mesh.messages[peer, self.rank]
        self.mesh.world.wait(lambda: waiting or peer in self.mesh.closed, None, self.mesh.place)
        return waiting[0][:1] if waiting else b""

    def recv(self, peer: int, doing: str) -> tuple[bytes, bytes]:
        return self.recv_any([peer], doing)[1:]

    def give_up(self, why: str, kind: bytes = END) -> None:
        for peer in self.lines:
            self._post(peer, kind + why.encode())

    def shared_memory(self, num_bytes: int) -> memoryview:
        if self.rank == 0:
            self.mesh.memory.append(memoryview(bytearray(max(num_bytes, 1))))
        self.barrier("sharing memory")
        self._num_mapped += 1
        return self.mesh.memory[self._num_mapped - 1]

    def close(self) -> None:
        self.mesh.close(self.rank)


class Engine(processes.Engine):
    """One of a node's, whose place no variable of the environment says."""

    def __init__(self, rank: int, mesh: Mesh, inner: contract.Engine | None):
        super().__init__(mesh.size, inner)
        self.local_place, self._mesh = (rank, mesh.size), mesh

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        self.local_group = Group(self.local_place[0], self._mesh)
        self._cpus = self._own_cpus = os.sched_getaffinity(0)
        self.local_step.num_processes = self._mesh.size
        sequential.Engine.open(self, model, optimizer, loss, metric)
        self._share()
