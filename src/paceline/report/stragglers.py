"""Stragglers: nodes that are slower than their share of the batch, reported once, with symptoms.

The vote on a step tells how long each node was busy in it. Shares are dealt so that all end together; a node that does
not, for a while, is a straggler, whatever its shares follow.

    each step       each node's seconds in its last 9, 17 and 33 steps
    four of them    one node takes a quarter longer than the others, beyond the noise: who, how much, and its own signs
                    all take what they took, and the network more than twice as long for as many bytes: likewise

*Laws*: nodes that differ by noise are not named; a straggler is named once, and again only after it had recovered.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.report.log import log
from paceline.report.record import Record

SPANS, PATIENCE = (9, 17, 33), 3  # steps
SURE = 3.0  # standard errors that a median may be off by, counted in ranks, so whatever the noise is like
SLOWER, LAG = 1.25, 1.1  # than the other nodes; than it was itself
WORTH_S = 0.02  # of a step
SEEN_S, SHARES_S = 12.0, 4.0  # for its signs to be read, and for new shares to be dealt, before it is told
SLOWER_WIRE, FARTHER = 2.5, 3.0  # than at best, for as many bytes; than the other nodes
NETWORK = -1
MAX_KINDS = 100  # of steps, by their bytes
NOTHING = "nothing unusual is seen there; it may simply be the slower machine for this job"


@dataclass
class Straggler:
    """``node``: or NETWORK. ``seconds``: of its step, busy; ``usual_s``: of the others', or of its own at best."""

    node: int
    step: int
    seconds: float
    usual_s: float
    since_s: float
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()


@dataclass
class Stragglers:
    """``everyone``: what each node said of itself last, by rank (`contract.Link.everyone`)."""

    record: Record
    everyone: Callable[[], Mapping[int, Mapping[str, Any]]]
    balanced: bool = False  # shares follow speed
    now: Callable[[], float] = time.monotonic
    pending: list[Straggler] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._named, self._shown = set[int](), set[int]()
        self._rates = list[float]()  # rows per second of each node, the best when shares were dealt
        self._best = dict[int, float]()  # the network's seconds, by the bytes of a step
        self._forget(0)

    def _forget(self, count: int) -> None:
        self._busy = [deque[float](maxlen=SPANS[-1]) for _ in range(count)]
        self._took: deque[float] = deque(maxlen=SPANS[0])
        self._slow, self._sure = frozenset[int](), 0

    def after(
        self, step: int, rows: Sequence[int], paces: Sequence[tuple[float, float]], took_s: float, sent_bytes: int
    ) -> None:
        """After a step: as `load_balance.LoadBalancer.after` is told, and what the network took for how many bytes."""
        if len(paces) == len(rows) and all(rows):
            if len(paces) != len(self._busy):
                self._forget(len(paces))
                self._rates = []
            for kept, (busy_s, _) in zip(self._busy, paces, strict=True):
                kept.append(busy_s)
            self._took.append(took_s)
            self._rows = rows
            if len(self._took) == SPANS[0]:
                self._judge(step, sent_bytes)
        for straggler in [each for each in self.pending if self._ripe(each)]:
            self.pending.remove(straggler)
            self._tell(straggler)

    def _judge(self, step: int, sent_bytes: int) -> None:
        found = {node: both for node, both in self._found().items() if self._lags(node, self._rows[node] / both[0])}
        slow = set(found)
        took_s = statistics.median(self._took)
        if len(self._best) > MAX_KINDS:
            self._best.clear()
        best_s = self._best[sent_bytes] = min(took_s, self._best.get(sent_bytes, took_s))
        if not slow and took_s > max(SLOWER_WIRE * best_s, best_s + WORTH_S):
            slow.add(NETWORK)
        self._sure = self._sure + 1 if slow == self._slow else 0
        self._slow = frozenset(slow)
        if self._sure < PATIENCE:
            return
        self._named &= slow
        for node in slow - self._named:
            self._named.add(node)
            seconds, before_s = (took_s, best_s) if node == NETWORK else found[node]
            self.pending.append(Straggler(node, step, seconds, before_s, self.now()))

    def _found(self) -> dict[int, tuple[float, float]]:
        """(seconds of its step, those of the others) of each node that is slow beyond the noise."""
        found = dict[int, tuple[float, float]]()
        for span in (span for span in SPANS if len(self._busy[0]) >= span):
            edge = max(0, int(span / 2 - SURE / 2 * math.sqrt(span)))
            recent = [sorted(list(kept)[-span:]) for kept in self._busy]
            order = sorted(range(len(recent)), key=lambda node: recent[node][span // 2])
            for node in order:
                others = [other for other in order if other != node]
                if others:
                    usual = recent[others[(len(others) - 1) // 2]]
                    if _slower(recent[node][span // 2], usual[span // 2]) and recent[node][edge] > usual[-1 - edge]:
                        found.setdefault(node, (recent[node][span // 2], usual[span // 2]))
        return found

    def on_assignment(self, step: int, old: tuple[int, ...], new: tuple[int, ...], per_s: Sequence[float]) -> None:
        """Nodes have other rows from this step on, because one was slow. ``per_s``: rows of each node, as measured."""
        self._forget(len(new))
        for straggler in self.pending:
            straggler.old, straggler.new = straggler.old or old, new
        busy = [rows / rate for rows, rate in zip(old, per_s, strict=True)]
        node = busy.index(max(busy))
        usual_s = statistics.median_low([*busy[:node], *busy[node + 1 :]])
        lags = self._lags(node, per_s[node])
        self._rates = [max(both) for both in zip(per_s, self._rates or per_s, strict=True)]
        if node not in self._named and lags and _slower(busy[node], usual_s):
            self._named.add(node)
            self.pending.append(Straggler(node, step, busy[node], usual_s, self.now(), old, new))

    def _lags(self, node: int, rate: float) -> bool:
        """Whether it computes more slowly than it has; who only has the rows of one that was slow does not."""
        return not self._rates or rate * LAG < self._rates[node]

    def close(self) -> None:
        for straggler in self.pending:
            self._tell(straggler)
        self.pending = []

    def _ripe(self, straggler: Straggler) -> bool:
        waited_s = self.now() - straggler.since_s
        if straggler.node == NETWORK:
            return True
        if waited_s < SHARES_S and self.balanced and not straggler.new:
            return False
        return waited_s > SEEN_S or bool(self._signs(straggler.node))

    def _signs(self, node: int) -> list[str]:
        return list(self.everyone().get(node, {}).get("signs", ()))

    def _tell(self, straggler: Straggler) -> None:
        told = self.everyone()
        host = told.get(straggler.node, {}).get("host", "")
        if straggler.node == NETWORK:
            words = (
                f"the network is slow: what a step sends takes {straggler.seconds:.3g} s, and {straggler.usual_s:.3g} "
                f"s at best before{_far(told)}"
            )
        else:
            who = f"rank {straggler.node}" + (f" on {host}" if host else "")
            words = (
                f"{who} is slower than its share says: {straggler.seconds:.3g} s of work in a step, the others "
                f"{straggler.usual_s:.3g} s; {'; '.join(self._signs(straggler.node)) or NOTHING}"
            )
        if straggler.new:
            words += f"; rows of the global batch: {_rows(straggler.old)} -> {_rows(straggler.new)}"
        self.record.write(
            "straggler",
            step=straggler.step,
            **({"node": straggler.node, "host": host} if straggler.node != NETWORK else {}),
            seconds=straggler.seconds,
            usual_seconds=straggler.usual_s,
            signs=self._signs(straggler.node),
            **({"old": straggler.old, "new": straggler.new} if straggler.new else {}),
            text=words,
        )
        if straggler.node not in self._shown:
            self._shown.add(straggler.node)
            log.warning(words)


def _slower(seconds: float, usual_s: float) -> bool:
    return seconds > max(SLOWER * usual_s, usual_s + WORTH_S)


def _far(told: Mapping[int, Mapping[str, Any]]) -> str:
    """Where the way is longest, if anywhere."""
    ways = sorted((each["way_s"], rank) for rank, each in told.items() if "way_s" in each)
    if not ways:
        return ""
    (longest_s, rank), others = ways[-1], [way_s for way_s, _ in ways[:-1]]
    who = f"rank {rank} on {told[rank]['host']}"
    if others and longest_s < FARTHER * statistics.median(others):
        return "; the way to every node is about as long"
    return f"; a heartbeat to {who} and back takes {1e3 * longest_s:.1f} ms"


def _rows(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
