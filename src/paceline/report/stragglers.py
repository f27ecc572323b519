"""Stragglers: nodes that are slower than their share of the batch, reported once, with symptoms.

The vote on a step contains each node's busy time. Shares are assigned so that all nodes finish together. A node that
repeatedly finishes later is a straggler, by whatever rule the shares are assigned.

    each step              compares the nodes' medians over their last 9, 17 and 33 steps
    in 4 steps in a row    a node takes 25 % longer than the others, beyond the noise: reports it with its symptoms
                           only the network is slower, by a factor of 2.5 for as many bytes: likewise

*Invariants*: nodes that differ by noise are not reported. A straggler is reported once, and again only after recovery.
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

SPANS, CONFIRMATIONS = (9, 17, 33), 3  # steps
STANDARD_ERRORS = 3.0  # tolerance of a median, as order statistics, so valid for any distribution of the noise
FACTOR, LAG_FACTOR = 1.25, 1.1  # slower than the other nodes; slower than it was itself
MIN_EXCESS_S = 0.02  # of a step
SYMPTOMS_WAIT_S, SHARES_WAIT_S = 12.0, 4.0  # the report waits so long for symptoms, and for new shares
NETWORK_FACTOR, DISTANCE_FACTOR = 2.5, 3.0  # slower than at best, for as many bytes; than the other nodes
NETWORK = -1
MAX_KINDS = 100  # different numbers of bytes per step that are remembered
NO_SYMPTOMS = "nothing unusual is seen there; it may simply be the slower machine for this job"


@dataclass
class Straggler:
    """``node`` may be NETWORK. ``seconds``: busy time in a step; ``usual_s``: that of the others, or its own best."""

    node: int
    step: int
    seconds: float
    usual_s: float
    since_s: float
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()


@dataclass
class Stragglers:
    """``peer_status``: each node's last status, by rank (`transport.Membership.peer_status`)."""

    record: Record
    peer_status: Callable[[], Mapping[int, Mapping[str, Any]]]
    balanced: bool = False  # shares follow speed
    now: Callable[[], float] = time.monotonic
    pending: list[Straggler] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reported, self._logged = set[int](), set[int]()
        self._rates = list[float]()  # samples per second of each node, its best at any assignment of shares
        self._best = dict[int, float]()  # the network's least seconds, by the bytes of a step
        self._forget(0)

    def _forget(self, count: int) -> None:
        self._busy = [deque[float](maxlen=SPANS[-1]) for _ in range(count)]
        self._network_s: deque[float] = deque(maxlen=SPANS[0])
        self._slow, self._confirmed = frozenset[int](), 0

    def after(
        self, step: int, rows: Sequence[int], paces: Sequence[tuple[float, float]], took_s: float, sent_bytes: int
    ) -> None:
        """After a step: the arguments of `load_balance.LoadBalancer.after`, and the network's seconds and bytes."""
        if len(paces) == len(rows) and all(rows):
            if len(paces) != len(self._busy):
                self._forget(len(paces))
                self._rates = []
            for history, (busy_s, _) in zip(self._busy, paces, strict=True):
                history.append(busy_s)
            self._network_s.append(took_s)
            self._rows = rows
            if len(self._network_s) == SPANS[0]:
                self._evaluate(step, sent_bytes)
        for straggler in [each for each in self.pending if self._ready(each)]:
            self.pending.remove(straggler)
            self._report(straggler)

    def _evaluate(self, step: int, sent_bytes: int) -> None:
        found = {node: pair for node, pair in self._found().items() if self._lags(node, self._rows[node] / pair[0])}
        slow = set(found)
        took_s = statistics.median(self._network_s)
        if len(self._best) > MAX_KINDS:
            self._best.clear()
        best_s = self._best[sent_bytes] = min(took_s, self._best.get(sent_bytes, took_s))
        if not slow and took_s > max(NETWORK_FACTOR * best_s, best_s + MIN_EXCESS_S):
            slow.add(NETWORK)
        self._confirmed = self._confirmed + 1 if slow == self._slow else 0
        self._slow = frozenset(slow)
        if self._confirmed < CONFIRMATIONS:
            return
        self._reported &= slow
        for node in slow - self._reported:
            self._reported.add(node)
            seconds, before_s = (took_s, best_s) if node == NETWORK else found[node]
            self.pending.append(Straggler(node, step, seconds, before_s, self.now()))

    def _found(self) -> dict[int, tuple[float, float]]:
        """(its seconds in a step, those of the others) for each node that is slow beyond the noise."""
        found = dict[int, tuple[float, float]]()
        for span in (span for span in SPANS if len(self._busy[0]) >= span):
            edge = max(0, int(span / 2 - STANDARD_ERRORS / 2 * math.sqrt(span)))
            recent = [sorted(list(history)[-span:]) for history in self._busy]
            order = sorted(range(len(recent)), key=lambda node: recent[node][span // 2])
            for node in order:
                others = [other for other in order if other != node]
                if others:
                    usual = recent[others[(len(others) - 1) // 2]]
                    if _slower(recent[node][span // 2], usual[span // 2]) and recent[node][edge] > usual[-1 - edge]:
                        found.setdefault(node, (recent[node][span // 2], usual[span // 2]))
        return found

    def on_assignment(self, step: int, old: tuple[int, ...], new: tuple[int, ...], per_s: Sequence[float]) -> None:
        """Shares change from this step on, because a node was slow. ``per_s``: measured samples per second by node."""
        self._forget(len(new))
        for straggler in self.pending:
            straggler.old, straggler.new = straggler.old or old, new
        busy = [rows / rate for rows, rate in zip(old, per_s, strict=True)]
        node = busy.index(max(busy))
        usual_s = statistics.median_low([*busy[:node], *busy[node + 1 :]])
        lags = self._lags(node, per_s[node])
        self._rates = [max(pair) for pair in zip(per_s, self._rates or per_s, strict=True)]
        if node not in self._reported and lags and _slower(busy[node], usual_s):
            self._reported.add(node)
            self.pending.append(Straggler(node, step, busy[node], usual_s, self.now(), old, new))

    def _lags(self, node: int, rate: float) -> bool:
        """Whether a node computes more slowly than before; a node that only has more samples does not lag."""
        return not self._rates or rate * LAG_FACTOR < self._rates[node]

    def close(self) -> None:
        for straggler in self.pending:
            self._report(straggler)
        self.pending = []

    def _ready(self, straggler: Straggler) -> bool:
        waited_s = self.now() - straggler.since_s
        if straggler.node == NETWORK:
            return True
        if waited_s < SHARES_WAIT_S and self.balanced and not straggler.new:
            return False
        return waited_s > SYMPTOMS_WAIT_S or bool(self._symptoms(straggler.node))

    def _symptoms(self, node: int) -> list[str]:
        return list(self.peer_status().get(node, {}).get("signs", ()))

    def _report(self, straggler: Straggler) -> None:
        statuses = self.peer_status()
        host = statuses.get(straggler.node, {}).get("host", "")
        if straggler.node == NETWORK:
            text = (
                f"the network is slow: communication takes {straggler.seconds:.3g} s per step, and took "
                f"{straggler.usual_s:.3g} s at best before{_distance(statuses)}"
            )
        else:
            name = f"rank {straggler.node}" + (f" on {host}" if host else "")
            text = (
                f"{name} is slower than its share assumes: {straggler.seconds:.3g} s of work in a step, the others "
                f"{straggler.usual_s:.3g} s; {'; '.join(self._symptoms(straggler.node)) or NO_SYMPTOMS}"
            )
        if straggler.new:
            text += f"; rows of the global batch: {_rows(straggler.old)} -> {_rows(straggler.new)}"
        self.record.write(
            "straggler",
            step=straggler.step,
            **({"node": straggler.node, "host": host} if straggler.node != NETWORK else {}),
            seconds=straggler.seconds,
            usual_seconds=straggler.usual_s,
            signs=self._symptoms(straggler.node),
            **({"old": straggler.old, "new": straggler.new} if straggler.new else {}),
            text=text,
        )
        if straggler.node not in self._logged:
            self._logged.add(straggler.node)
            log.warning(text)


def _slower(seconds: float, usual_s: float) -> bool:
    return seconds > max(FACTOR * usual_s, usual_s + MIN_EXCESS_S)


def _distance(statuses: Mapping[int, Mapping[str, Any]]) -> str:
    """The node with the longest round trip, where one stands out."""
    distances = sorted((status["way_s"], rank) for rank, status in statuses.items() if "way_s" in status)
    if not distances:
        return ""
    (longest_s, rank), others = distances[-1], [round_trip_s for round_trip_s, _ in distances[:-1]]
    name = f"rank {rank} on {statuses[rank]['host']}"
    if others and longest_s < DISTANCE_FACTOR * statistics.median(others):
        return "; the round trip to every node takes about as long"
    return f"; a heartbeat to {name} and back takes {1e3 * longest_s:.1f} ms"


def _rows(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
