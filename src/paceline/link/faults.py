"""A memory link whose messages take virtual time, and on which, at any message, a fault may strike.

    death       the rank dies while it sends: some receivers get the message; the others hear of it, or wait in vain
    delay       some receivers get it later, perhaps later than they wait
    reorder     it is held back until messages of another lane have overtaken it
    duplicate   it comes twice
    stall       nothing of the rank runs for a while, perhaps for longer than the others wait; then it goes on

Messages are counted over all ranks: collectives, sends, and coming to a meeting. On one lane, from one rank to another,
they keep their order, as on a socket; what a rank has sent comes before the news that it is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from paceline.link import memory
from paceline.link.memory import Link
from paceline.link.virtual import Killed, World

DEATH, DELAY, REORDER, DUPLICATE, STALL = KINDS = ("death", "delay", "reorder", "duplicate", "stall")
LATENCY_S = 1e-4, 1e-3
HELD_S = 0.05  # longer than some messages take one after the other, shorter than anybody waits
PATIENCE_S = 10.0
LONGEST_S = 6 * PATIENCE_S  # of a delay or a stall
SILENT = 0.3  # of all deaths: no news comes of them
LONG = {kind: f"{kind}, longer than anybody waits" for kind in (DELAY, STALL)}
UNHEARD = "death, without a word"
CLASSES = (DEATH, UNHEARD, DELAY, LONG[DELAY], REORDER, DUPLICATE, STALL, LONG[STALL])


class Net(World):
    """``faults``: which kind strikes at which message. ``fired``: how often each had its effect."""

    def __init__(self, seed: int, faults: Mapping[int, str]):
        super().__init__(seed)
        self.faults = faults
        self.num_messages = 0
        self.fired: Counter[str] = Counter()
        self.history: list[str] = []

    def tell(self, words: str) -> None:
        self.history.append(f"{self.clock:10.4f}  {words}")

    def links(self, size: int) -> list[Link]:
        hub = Hub(self, range(size))
        return [Link(hub, rank) for rank in range(size)]


class Hub(memory.Hub):
    """Everybody's messages of one generation."""

    patience_s = PATIENCE_S

    def __init__(self, net: Net, ids: Sequence[int]):
        super().__init__(len(ids), ids, net)
        self.net = net
        self._last: dict[tuple[int, int, str], float] = {}  # when the last message from, to, on a lane arrives
        self._newest: dict[tuple[int, int], int] = {}  # from, to: the latest sent of those that have arrived

    def deliver(self, sender: int, lane: str, put: Callable[[int], None]) -> None:
        net, who = self.net, self.ids[sender]
        others = [rank for rank in range(self.size) if rank != sender]
        number, kind = self._count(sender, f"sends on {lane or 'control'!r}", others)
        put(sender)
        stalls_first = kind == STALL and net.dice.random() < 0.5
        if stalls_first:
            self._stall(who)
        some = net.dice.sample(others, net.dice.randint(0 if kind == DEATH else 1, len(others))) if kind else []
        for receiver in others:
            if kind == DEATH and receiver not in some:
                continue
            late_s = HELD_S if kind == REORDER else 0.0
            if kind == DELAY and receiver in some:
                late_s = net.dice.uniform(HELD_S, LONGEST_S)
                net.fired[LONG[DELAY] if late_s > PATIENCE_S else DELAY] += 1
            self._post(sender, receiver, lane, number, put, late_s)
            if kind == DUPLICATE:
                self._post(sender, receiver, lane, number, put, net.dice.uniform(0.0, HELD_S))
                net.fired[DUPLICATE] += 1
        if kind == DEATH:
            self._die(sender)
        if kind == STALL and not stalls_first:
            self._stall(who)
        net.yield_()

    def travel(self, rank: int) -> None:
        net, who = self.net, self.ids[rank]
        _, kind = self._count(rank, f"leaves ranks {list(self.ids)} to meet those who are left", range(self.size))
        if kind == DEATH:
            self._die(rank)
        if kind == STALL:
            self._stall(who)
        net.wait(lambda: False, net.dice.uniform(*LATENCY_S))

    def _count(self, sender: int, doing: str, others: Sequence[int]) -> tuple[int, str]:
        """(the number of this message, what strikes at it). Who is dead sends nothing."""
        net, who = self.net, self.ids[sender]
        if who in net.dead:
            raise Killed
        number = net.num_messages
        net.num_messages += 1
        kind = net.faults.get(number, "") if others else ""
        net.tell(f"{number:4d}  rank {who} {doing}" + (f"  ** {kind}" if kind else ""))
        return number, kind

    def _post(
        self, sender: int, receiver: int, lane: str, number: int, put: Callable[[int], None], late_s: float
    ) -> None:
        net, way, pair = self.net, (sender, receiver, lane), (sender, receiver)
        when = max(net.clock + net.dice.uniform(*LATENCY_S) + late_s, self._last.get(way, 0.0))
        self._last[way] = when

        def arrive() -> None:
            newest = self._newest.get(pair, -1)
            if newest > number and net.faults.get(number) == REORDER:
                net.fired[REORDER] += 1
            self._newest[pair] = max(number, newest)
            put(receiver)

        net.after(when - net.clock, arrive)

    def _stall(self, who: int) -> None:
        net = self.net
        seconds = net.dice.uniform(HELD_S, LONGEST_S)
        net.stalled[who] = net.clock + seconds
        net.fired[LONG[STALL] if seconds > PATIENCE_S else STALL] += 1
        net.tell(f"      rank {who} stands still for {seconds:.3f} s")
        net.yield_()

    def _die(self, rank: int) -> None:
        net, who = self.net, self.ids[rank]
        net.dead.add(who)
        silent = net.dice.random() < SILENT
        net.fired[UNHEARD if silent else DEATH] += 1
        net.tell(f"      rank {who} is dead" + (", and nobody is told" if silent else ""))
        if not silent:
            self.leaving.discard(rank)
            self.kill(rank)
        raise Killed

    def kill(self, rank: int, why: str = "was killed") -> None:
        """The news travels after all that the rank has sent."""
        for receiver in range(self.size):
            ends = [when for (sender, to, _), when in self._last.items() if (sender, to) == (rank, receiver)]
            when = max([self.net.clock + self.net.dice.uniform(*LATENCY_S), *ends])
            self.net.after(when - self.net.clock, partial(self.gone[receiver].setdefault, rank, why))

    def heir(self, members: Sequence[int]) -> Hub:
        ids = [self.ids[rank] for rank in members]
        self.net.tell(f"      ranks {ids} go on")
        return Hub(self.net, ids)
