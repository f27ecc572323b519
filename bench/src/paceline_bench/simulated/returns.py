"""Nodes of a simulated training that are started again, and what the others do for them, by the rules of `waiting`.

a launcher   starts a node that died, or was left behind, again after some seconds, as long as somebody has the state
a joining    node asks, is admitted to a generation between two steps, and is sent all state as one message
a leader     admits whoever asks; where it was lost meanwhile, the joining node is lost, too, and started again
nobody left  has the state: all are started again from the newest checkpoint (`play`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline import transport
from paceline.elastic import below_minimum
from paceline.elastic.quorum import ALIVE
from paceline.errors import LinkError
from paceline.link import memory
from paceline.link.memory import Link, Members
from paceline.transport import Joiner
from paceline_bench.simulated.fault_link import Hub, Net

RETURNS = 8  # of one node
BACK_S = 0.2, 5.0  # in which a launcher starts a node again
OVER_S = 10.0  # for which nobody has the state, before a joining node ends
WAIT_S = 300.0  # for joining nodes
LONGEST_S = 3000.0
POLL_S = 1.0


class Launcher:
    """Of all nodes. ``begin(id, link)``: starts a joining process."""

    def __init__(self, net: Net, num_nodes: int, begin: Callable[[int, Members], None]):
        self.net, self.begin = net, begin
        self.node = {rank: rank for rank in range(num_nodes)}  # by process
        self.lives = dict.fromkeys(range(num_nodes), 1)
        self.asking: set[int] = set()
        self.holding = set(range(num_nodes))  # have all state, or had when they ended
        self.newest: tuple[int, Tensor] | None = None  # checkpoint: after so many steps
        net.lost = self.lost

    def holders(self) -> set[int]:
        return self.holding - self.net.dead - self.net.ended

    def lost(self, who: int) -> None:
        node = self.node[who]
        if self.lives[node] <= RETURNS and not self.net.stuck:
            self.lives[node] += 1
            self.net.after(self.net.dice.uniform(*BACK_S), lambda: self._again(node))

    def _again(self, node: int) -> None:
        if self.holders():
            who = max(self.node) + 1
            self.node[who] = node
            self.net.tell(f"      node {node} is started again, as {who}")
            self.net.start(who, lambda: self.begin(who, Coming(self, who)))

    def keep(self, step: int, state: Callable[[], Tensor]) -> None:
        if self.newest is None or step > self.newest[0]:
            self.newest = step, state()


class Coming(Members):
    """A joining node: alone until it is admitted."""

    def __init__(self, launcher: Launcher, who: int):
        super().__init__(Link(memory.Hub(1, (who,), launcher.net), 0))
        self.launcher, self.who = launcher, who
        self.heir: Hub | None = None

    def admitted(self) -> bool:
        """Whether it was admitted."""
        net, asking = self.launcher.net, self.launcher.asking
        end, over = net.clock + LONGEST_S, net.clock + OVER_S
        asking.add(self.who)

        def answered() -> bool:
            self.heir = self.heir or net.assembly.admitted(self.who)
            return self.heir is not None

        while not answered() and net.clock < min(end, over):
            over = net.clock + OVER_S if self.launcher.holders() else over
            net.wait(answered, POLL_S, net.assembly.place)
        asking.discard(self.who)
        return self.heir is not None

    def reconfigure(self, admits: Sequence[Joiner] = ()) -> transport.View:
        if (heir := self.heir) is None:
            return super().reconfigure(admits)
        self.heir, self.link = None, Link(heir, heir.ids.index(self.who), heir.generation)
        return transport.View(self.link, (), heir.joiners)


class Hall(below_minimum.Waiter):
    """``rank`` is a `rank.Rank`."""

    def __init__(self, rank: Any, launcher: Launcher, minimum: int, most: int):
        self.rank, self.launcher, self.minimum, self.most = rank, launcher, minimum, most
        self.joined: tuple[Joiner, ...] = ()
        self.since_s = 0.0

    def hold(self) -> None:
        net = self.launcher.net
        self.since_s = net.clock
        below_minimum.wait(self, self.rank.control, net.sleep)

    @property
    def num_nodes(self) -> int:
        return int(self.rank.run.assignment.num_nodes)

    def guests(self) -> list[Joiner]:
        """Who asks the leader, and is reached."""
        net, me = self.launcher.net, self.rank.id
        if self.rank.control.rank:
            return []
        here = [each for each in sorted(self.launcher.asking) if net.look(me, each) == ALIVE]
        return [Joiner(str(each), f"node {self.launcher.node[each]}", most=self.most) for each in here]

    def next(self) -> int:
        """The generation in which somebody is to be admitted; 0 for none."""
        return self.rank.control.generation + 1 if self.guests() else 0

    def report(self) -> dict[str, Any]:
        over = self.launcher.net.clock - self.since_s > WAIT_S
        return {"guests": self.next(), "follows": False, "stop": 0, "hung": False, "over": over}

    def admit(self) -> None:
        joined = self._admit_waiting()
        if (link := self.rank.members.link).rank == 0:
            for i in range(len(joined)):
                link.lane("state").send(self.rank.state(), link.size - len(joined) + i).wait()

    def _admit_waiting(self) -> tuple[Joiner, ...]:
        self.joined = ()
        self.rank.control.admit(self.guests())
        return self.joined

    def end(self, number: int) -> None:
        self.launcher.keep(self.rank.run.num_steps, self.rank.state)
        raise LinkError("waited in vain for enough nodes", resumes=True)


def pack(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Tensor:
    """All state as numbers."""
    kept = [optimizer.state.get(weight, {}).get("momentum_buffer") for weight in model.parameters()]
    moves = [torch.zeros_like(w) if m is None else m for w, m in zip(model.parameters(), kept, strict=True)]
    head = torch.tensor([num_steps, any(m is not None for m in kept)], dtype=torch.float64)
    every = [*model.state_dict().values(), *moves]
    return torch.cat([head, *(each.detach().double().reshape(-1) for each in every)])


def unpack(numbers: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps."""
    (num_steps, has_moves), at = numbers[:2].tolist(), 2
    moves = [torch.zeros_like(weight) for weight in model.parameters()]
    with torch.no_grad():
        for each in (*model.state_dict().values(), *moves):
            each.copy_(numbers[at : at + each.numel()].reshape(each.shape))
            at += each.numel()
    if has_moves:
        for weight, move in zip(model.parameters(), moves, strict=True):
            optimizer.state[weight]["momentum_buffer"] = move
    return int(num_steps)
