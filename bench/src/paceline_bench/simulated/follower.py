"""Another process of a simulated node: the same loop, which communicates with the node's first process alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.data import batches
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.elastic.membership import alone
from paceline.errors import LinkError
from paceline.exchange import allreduce
from paceline.exchange.flow.control import Control
from paceline.report.activity import Activity
from paceline.step.rebalance import Rebalance
from paceline.step.step import step
from paceline_bench.simulated.fault_link import Net
from paceline_bench.simulated.node import Mesh
from paceline_bench.simulated.rank import regroup, run_state
from paceline_bench.simulated.scenarios import given, take, windows
from paceline_bench.simulated.schedule import Schedule


class Follower:
    """``node``: the id of its node. ``rank``: within it."""

    def __init__(self, node: int, rank: int, mesh: Mesh, net: Net, schedule: Schedule):
        how, self.rank, self.mesh, self.size = schedule.how, rank, mesh, schedule.samples
        _, self.x, self.y = given(how.normed)
        self.who, self.net = f"process {rank} of rank {node}", net
        self.kit, members = take(how, mesh, rank), alone()
        own = FaultTolerantControl(Control(members), [])
        exchange, self.control = self.kit.engine.local_exchange(allreduce.Exchange(how.forms), own, False, Activity())
        place = node, schedule.size
        self.run = run_state(self.kit, exchange, self.control, how.codec(), members, place, schedule, self.who, rank)
        self.run.observers = [Rebalance(self.run)]
        self.control.on_view_change = lambda news: regroup(self.run, news)

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        self.mesh.taken(self.rank, self.run.num_steps, indices)
        return self.x[indices], self.y[indices]

    def train(self) -> None:
        torch.set_num_threads(self.kit.engine.num_threads)
        steps = windows(self.size)
        try:
            for number in range(len(steps)):
                step(self.run, batches.Batch(self, steps[number], 0, number, len(steps), number == len(steps) - 1))
            self.control.all_gather(b"")
            self.mesh.ends[self.rank] = "finished"
        except LinkError as error:
            self.mesh.ends[self.rank] = f"ended: {error}"
        self.net.tell(f"      {self.who} {self.mesh.ends[self.rank]}")
        self.mesh.close(self.rank)
