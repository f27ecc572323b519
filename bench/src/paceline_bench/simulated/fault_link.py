"""A memory link whose messages take virtual time, and on which, at any message, a fault may strike.

    death       the rank dies while it sends: some receivers get the message; the others hear of it, or wait in vain
    delay       some receivers get it later, perhaps later than they wait
    reorder     it is held back until messages of another lane have overtaken it
    duplicate   it comes twice
    stall       nothing of the rank runs for a while, perhaps for longer than the others wait; then it goes on
    partition   two groups do not hear each other for a while; what they have sent comes afterwards
    one way     one group does not hear the other for a while, which hears it

Messages are counted over all ranks: collectives, sends, and coming to a meeting. On one lane, from one rank to another,
they keep their order, as on a socket; what a rank has sent comes before the news that it is gone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from paceline import transport
from paceline.elastic.quorum import ALIVE, DEAD, UNREACHABLE
from paceline.link import memory
from paceline.link.memory import Link
from paceline_bench.simulated.assembly import Assembly
from paceline_bench.simulated.virtual_time import Killed, World

KINDS = ("death", "delay", "reorder", "duplicate", "stall", "partition", "one way")
DEATH, DELAY, REORDER, DUPLICATE, STALL, PARTITION, ONE_WAY = KINDS
LATENCY_S = 1e-4, 1e-3
HELD_S = 0.05  # longer than some messages take one after the other, shorter than anybody waits
TIMEOUT_S = 10.0
LONGEST_S = 6 * TIMEOUT_S  # of a delay, a stall, a partition
STILL_S = HELD_S  # before a rank cannot be sure of the others
TWO_STEPS = 5  # messages of gradients, from any of a step on, of which it sends two
WORDLESS = 0.3  # of all deaths: no news comes of them
LONG = {kind: f"{kind}, longer than anybody waits" for kind in (DELAY, STALL, PARTITION, ONE_WAY)}
UNHEARD = "death, without a word"
CLASSES = (DEATH, UNHEARD, *(each for kind in KINDS[1:] for each in (kind, LONG.get(kind)) if each))
# what may keep a rank that lives from going on
SEVERS = {UNHEARD, *(each for kind in (STALL, PARTITION, ONE_WAY) for each in (kind, LONG[kind]))}


@dataclass
class Cut:
    """What ``away`` sends to ``to`` comes ``until`` then; of a partition also the reverse. Of ranks by `Hub.ids`."""

    kind: str
    away: frozenset[int]
    to: frozenset[int]
    until: float
    felt: bool = False  # by anybody

    def parts(self, one: int, other: int) -> bool:
        return (one in self.away and other in self.to) or (one in self.to and other in self.away)

    def touches(self, one: int) -> bool:
        return one in self.away or one in self.to

    def holds(self, sender: int, receiver: int) -> bool:
        return self.parts(sender, receiver) and (sender in self.away or self.kind == PARTITION)


class Net(World):
    """``faults``: which kind strikes at which message. ``fired``: how often each had its effect."""

    def __init__(self, seed: int, faults: Mapping[int, str]):
        super().__init__(seed)
        self.faults = faults
        self.num_messages = self.num_hubs = 0
        self.fired: Counter[str] = Counter()
        self.history: list[str] = []
        self.cuts: list[Cut] = []
        self.unheard: set[int] = set()  # of the dead
        self.ended: set[int] = set()  # have left in peace
        self.strikes: list[tuple[str, int, str]] = []  # what strikes at which of the messages whose name has this word
        self.hub_of: dict[int, Hub] = {}  # the last generation that each was in
        self.doubtful: dict[int, int] = {}  # who has stood still: the gradients to send before it is sure of the others
        self.lost: Callable[[int], None] = lambda who: None  # told of each that dies
        self.doomed: dict[int, float] = {}  # of all joining nodes, the nth: how long after its admission it is killed
        self.num_admitted = 0
        self.assembly = Assembly(self, self.look, self._found, self.doubts)

    def tell(self, words: str) -> None:
        self.history.append(f"{self.clock:10.4f}  {words}")

    def links(self, size: int) -> list[Link]:
        hub = Hub(self, range(size))
        self.hub_of = dict.fromkeys(range(size), hub)
        return [Link(hub, rank) for rank in range(size)]

    def some_time(self) -> float:
        """Shorter or longer than anybody waits."""
        shorter = self.dice.random() < 0.5
        return self.dice.uniform(HELD_S, TIMEOUT_S) if shorter else self.dice.uniform(TIMEOUT_S, LONGEST_S)

    def strike(self, kind: str, seconds: float) -> None:
        """Counts it, as what it is after so long."""
        self.fired[LONG[kind] if seconds > TIMEOUT_S else kind] += 1

    def cut(self, kind: str, ids: Sequence[int]) -> None:
        """From now on some of these ranks do not hear the others, for a while."""
        some = frozenset(self.dice.sample(ids, self.dice.randint(1, len(ids) - 1)))
        others, seconds = frozenset(ids) - some, self.some_time()
        self.cuts.append(Cut(kind, some, others, self.clock + seconds))
        self.tell(f"      {sorted(others)} do not hear {sorted(some)} for {seconds:.3f} s")

    def leaves(self, sender: int, receiver: int) -> float:
        """When what is sent now begins its way."""
        held = [cut for cut in self.cuts if cut.until > self.clock and cut.holds(sender, receiver)]
        return max([self.clock, *(self._felt(cut) for cut in held)])

    def _felt(self, cut: Cut) -> float:
        """Until when."""
        if not cut.felt:
            cut.felt = True
            self.strike(cut.kind, cut.until - self.clock)
        return cut.until

    def look(self, one: int, other: int) -> str:
        """What the one finds where the other is: an answer takes both ways."""
        if any(self._felt(cut) for cut in self.cuts if cut.until > self.clock and cut.parts(one, other)):
            return UNREACHABLE
        if other in self.ended or other in self.dead - self.unheard:
            return DEAD
        return UNREACHABLE if other in self.unheard or self.stands_still(other) else ALIVE

    def doubts(self, one: int) -> bool:
        """Whether it has stood still, or heard nothing of others, since its generation was formed."""
        parted = any(cut.felt and cut.touches(one) and cut.until > self.hub_of[one].since for cut in self.cuts)
        return parted or bool(self.doubtful.get(one))

    def _found(self, ids: Sequence[int], joiners: Sequence[transport.Joiner] = ()) -> Hub:
        before = self.hub_of[ids[0]]
        all_ids = [*ids, *(int(joiner.name) for joiner in joiners)]
        hub = Hub(self, all_ids)
        hub.generation, hub.joiners = before.generation + 1, tuple(joiners)
        for each in all_ids[len(ids) :]:
            self.hub_of[each] = hub
            if self.num_admitted in self.doomed:
                self.after(self.doomed[self.num_admitted], partial(self.kill, each))
            self.num_admitted += 1
        self.tell(f"      ranks {all_ids} form generation {hub.generation}")
        return hub

    def die(self, owner: int) -> None:
        super().die(owner)
        self.lost(owner)

    def kill(self, who: int) -> None:
        """At any moment, and all are told."""
        if who in self.hub_of and who not in self.dead | self.ended:
            self.die(who)
            self.fired[DEATH] += 1
            self.tell(f"      rank {who} is killed")
            hub = self.hub_of[who]
            hub.kill(hub.ids.index(who))
            self.assembly.look_again()


class Hub(memory.Hub):
    """Everybody's messages of one generation."""

    patience_s = TIMEOUT_S
    generation = 0

    def __init__(self, net: Net, ids: Sequence[int]):
        super().__init__(len(ids), ids, net)
        self.net, self.number, self.since = net, net.num_hubs, net.clock
        net.num_hubs += 1
        self._last: defaultdict[tuple[int, int], dict[str, float]] = defaultdict(dict)
        """From, to: by lane, when the last message arrives."""
        self._newest: dict[tuple[int, int], int] = {}  # from, to: the latest sent of those that have arrived

    # messages

    def deliver(self, sender: int, lane: str, put: Callable[[int], None], receivers: Sequence[int]) -> None:
        net, who = self.net, self.ids[sender]
        others = [rank for rank in receivers if rank != sender]
        number, kind = self._count(sender, f"sends on {lane or 'control'!r}", others)
        if sender in receivers:
            self.update(sender, put)
        stalls_first = kind == STALL and net.dice.random() < 0.5
        if stalls_first:
            self._stall(who)
        some = net.dice.sample(others, net.dice.randint(0 if kind == DEATH else 1, len(others))) if kind else []
        for receiver in others:
            if kind == DEATH and receiver not in some:
                continue
            late_s = HELD_S if kind == REORDER else 0.0
            if kind == DELAY and receiver in some:
                late_s = net.some_time()
                net.strike(DELAY, late_s)
            self._post(sender, receiver, lane, number, put, late_s)
            if kind == DUPLICATE:
                self._post(sender, receiver, lane, number, put, net.dice.uniform(0.0, HELD_S))
                net.fired[DUPLICATE] += 1
        if kind == DEATH:
            self._die(sender)
        if kind == STALL and not stalls_first:
            self._stall(who)
        net.yield_()

    def _count(self, sender: int, doing: str, others: Sequence[int]) -> tuple[int, str]:
        """(the number of this message, what strikes at it). Who is dead sends nothing."""
        net, who = self.net, self.ids[sender]
        if who in net.dead:
            raise Killed
        number = net.num_messages
        net.num_messages += 1
        if net.doubtful.get(who) and "gradients" in doing:
            net.doubtful[who] -= 1
        kind = net.faults.get(number, "") if others else ""
        for i, (word, count, strike) in enumerate(net.strikes):
            if not kind and others and word in doing and count >= 0:
                net.strikes[i] = word, count - 1, strike
                kind = strike if count == 0 else ""
        net.tell(f"{number:4d}  rank {who} {doing}" + (f"  ** {kind}" if kind else ""))
        if kind in (PARTITION, ONE_WAY):
            net.cut(kind, self.ids)
        return number, kind

    def _post(
        self, sender: int, receiver: int, lane: str, number: int, put: Callable[[int], None], late_s: float
    ) -> None:
        net, pair = self.net, (sender, receiver)
        leaves = net.leaves(self.ids[sender], self.ids[receiver])
        lanes = self._last[pair]
        when = lanes[lane] = max(leaves + net.dice.uniform(*LATENCY_S) + late_s, lanes.get(lane, 0.0))

        def arrive() -> None:
            newest = self._newest.get(pair, -1)
            if newest > number and net.faults.get(number) == REORDER:
                net.fired[REORDER] += 1
            self._newest[pair] = max(number, newest)
            self.update(receiver, put)

        net.after(when - net.clock, arrive)

    # faults

    def _stall(self, who: int) -> None:
        net = self.net
        seconds = net.some_time()
        net.stall(who, seconds)
        if seconds > STILL_S:
            net.doubtful[who] = TWO_STEPS
        net.strike(STALL, seconds)
        net.tell(f"      rank {who} stands still for {seconds:.3f} s")
        net.yield_()

    def _die(self, rank: int) -> None:
        net, who = self.net, self.ids[rank]
        net.die(who)
        silent = net.dice.random() < WORDLESS
        net.fired[UNHEARD if silent else DEATH] += 1
        net.tell(f"      rank {who} is dead" + (", and nobody is told" if silent else ""))
        if silent:
            net.unheard.add(who)
        else:
            self.kill(rank)
        net.assembly.look_again()
        raise Killed

    def kill(self, rank: int, why: str = "was killed") -> None:
        """The news travels after all that the rank has sent."""
        net = self.net

        def know(receiver: int) -> None:
            self.failed[receiver].setdefault(rank, why)

        for receiver in range(self.size):
            leaves = net.clock if receiver == rank else net.leaves(self.ids[rank], self.ids[receiver])
            when = max([leaves + net.dice.uniform(*LATENCY_S), *self._last[rank, receiver].values()])
            net.after(when - net.clock, partial(self.update, receiver, know))

    def leave(self, rank: int) -> None:
        self.net.ended.add(self.ids[rank])
        self.net.assembly.look_again()
        super().leave(rank)

    # those who are left

    def reconfigure(self, rank: int, admits: Sequence[transport.Joiner] = ()) -> tuple[memory.Hub, int]:
        net, who = self.net, self.ids[rank]
        self.kill(rank, "has left for another generation")
        _, kind = self._count(rank, f"leaves ranks {list(self.ids)} to meet those who are left", range(self.size)[1:])
        if kind == DEATH:
            self._die(rank)
        if kind == STALL:
            self._stall(who)
        net.sleep(net.dice.uniform(*LATENCY_S))
        heir: Hub = net.assembly.reconfigure(who, self.ids, admits)
        net.hub_of[who] = heir
        return heir, heir.ids.index(who)
