"""Network benchmark between the ranks of a link: latency and bandwidth of every pair, and all-reduces of all.

    pairs   every two ranks, disjoint pairs at the same time: round trips of a few bytes for the latency, then
            increasing messages, in one direction and then the other, for the bandwidth
    sums    all-reduces of 1 KiB to 8 MiB by all ranks; small sizes whose transfer time latency hides are skipped

Bandwidth is the slope of time over size for the larger messages. It therefore excludes the initial burst of a rate
limiter and the constant cost of a message. All ranks call `measure`, and every wait has a deadline. The benchmark takes
2 to 3 seconds; with a latency of 20 ms twice as long, because larger messages are needed to see their transfer time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from paceline.exchange.flow.costs import CostFunction, ring
from paceline.launch.doctor.examine import rounds
from paceline.messages import SUM
from paceline.planner.cluster_model import NetworkModel
from paceline.transport import Link

DEADLINE_S = 20.0
PINGS, FEW_PINGS, ROUND_TRIPS, SUMS = 10, 3, 2, 3
LONG_LATENCY_S = 5e-3  # of a message: from here on FEW_PINGS suffice
VISIBLE = 2  # times the round trip of an empty message: below that, noise hides the transfer time
MIN_TRANSFER = 0.1  # of a round trip: assumed minimum transfer time of the largest message, where noise hides it
PING_BYTES = 64
SMALLEST, LARGEST = 64 << 10, 8 << 20  # bytes of a message
SUM_BYTES = tuple(1024 << shift for shift in (0, 2, 4, 6, 8, 10, 11, 12, 13))  # 1 KiB to 8 MiB
MIN_SUMS = 3  # all-reduces of the largest sizes that are always measured
COUNTED_BYTES = 256 << 10  # size of an all-reduce from which on its CPU time is counted
BUDGET_S = 1.2  # for the pairs, and again for the all-reduces


@dataclass(frozen=True)
class Pair:
    """The network between two ranks. *Units*: seconds of an empty message; bytes per second, one way."""

    one: int
    other: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class NetworkMeasurement:
    """``sums``: (bytes, seconds of the slowest rank) of all-reduces. ``cpu_s``: CPU seconds per byte they sent.

    ``collective``: the all-reduce algorithm if one was selected.
    """

    size: int
    pairs: tuple[Pair, ...] = ()
    sums: tuple[tuple[int, float], ...] = ()
    cpu_s: float = 0.0
    collective: str = ""
    spent_s: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> NetworkMeasurement:
        pairs = tuple(Pair(**pair) for pair in fields["pairs"])
        return cls(**{**fields, "pairs": pairs, "sums": tuple(map(tuple, fields["sums"]))})

    def model_for(self, ranks: Sequence[int], collectives: Callable[[int], CostFunction] = ring) -> NetworkModel:
        """The network between these ranks: the lowest bandwidth and the largest latency of any two of them."""
        pairs = [pair for pair in self.pairs if {pair.one, pair.other} <= set(ranks)]
        if not pairs:
            return NetworkModel(0.0, float("inf"), collectives=collectives)
        rate = min(pair.bytes_per_s for pair in pairs)
        latency_s, adding_s = max(pair.latency_s for pair in pairs), self._adding_s(collectives(self.size))
        return NetworkModel(latency_s, rate, adding_s, self.cpu_s, collectives)

    def _adding_s(self, cost: CostFunction) -> float:
        """Seconds per byte of an all-reduce of all ranks, in addition to its transfer time."""
        if len(self.sums) < 2 or self.size < 2:
            return 0.0
        sizes, seconds = zip(*self.sums, strict=True)
        way_s = 1 / min(pair.bytes_per_s for pair in self.pairs)
        each = cost(SUM, LARGEST).in_sequence / LARGEST
        return max(0.0, slope(sizes, seconds) / each - way_s)


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Seconds per byte: the median slope between all pairs of the larger sizes. *Source*: Theil 1950; Sen 1968."""
    points = sorted(zip(sizes, seconds, strict=True))[-max(2, (len(sizes) + 1) // 2) :]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    # if noise makes the slope negative, the whole time of the largest message is an upper bound
    found = statistics.median(slopes)
    return max(found if found > 0 else points[-1][1] / points[-1][0], 1e-15)


def measure(link: Link) -> NetworkMeasurement:
    """Called by every rank at the same time; the result is the same on all. Raises LinkError."""
    start = time.perf_counter()
    schedule = list(pair_rounds(link.size))
    found = torch.zeros(link.size, link.size, 2, dtype=torch.float64)
    for together in schedule:
        _barrier(link)
        for one, other in together:
            if link.rank in (one, other):
                _pair(link, one, other, BUDGET_S / len(schedule), found)
    link.sum(found, "sharing what was measured").wait(DEADLINE_S)
    pairs = tuple(
        Pair(one, other, float(found[one, other, 0]), float(min(found[one, other, 1], found[other, one, 1])))
        for one in range(link.size)
        for other in range(one + 1, link.size)
    )
    trip_bytes = max((2 * pair.latency_s * pair.bytes_per_s for pair in pairs), default=0.0)
    sums, cpu_s = _sums(link, trip_bytes / 4) if link.size > 1 else ((), 0.0)
    return NetworkMeasurement(link.size, pairs, sums, cpu_s, spent_s=time.perf_counter() - start)


def pair_rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ranks, the lower first, in rounds of disjoint pairs."""
    for pairs in filter(None, rounds(range(size))):
        yield [(min(pair), max(pair)) for pair in pairs]


def _barrier(link: Link) -> None:
    link.sum(torch.zeros(1), "meeting before measuring").wait(DEADLINE_S)


def _pair(link: Link, one: int, other: int, budget_s: float, found: torch.Tensor) -> None:
    """Measures one direction after the other: alternation would let a rate limiter's burst pass as bandwidth."""
    for leader, peer in ((one, other), (other, one)):
        if link.rank == peer:
            _respond(link, leader)
            continue
        begun, sizes, seconds = time.perf_counter(), [], []
        pings = _round_trips(link, peer, PING_BYTES, FEW_PINGS)
        if min(pings) < 2 * LONG_LATENCY_S:  # the minimum, since one delayed message does not show a long latency
            pings = _round_trips(link, peer, PING_BYTES, PINGS)
        trip_s, size = statistics.median(pings), SMALLEST
        while True:
            sizes.append(size)
            # the minimum, since with so few sizes one delayed message would halve the bandwidth
            seconds.append(min(_round_trips(link, peer, size, ROUND_TRIPS)))
            visible = seconds[-1] > VISIBLE * trip_s
            # the next size takes twice as long
            over_budget = time.perf_counter() - begun + 2 * ROUND_TRIPS * seconds[-1] > budget_s / 2
            if size == LARGEST or (visible and over_budget and len(sizes) > 2):
                break
            size = min(size * (2 if visible else 4), LARGEST)
        link.send(torch.zeros(2, dtype=torch.int64), peer).wait(DEADLINE_S)
        byte_s = slope(sizes, seconds)
        if not visible:  # the slope is noise
            byte_s = max(byte_s, MIN_TRANSFER * trip_s / LARGEST)
        found[leader, peer, 0], found[leader, peer, 1] = trip_s / 2, 1 / byte_s


def _round_trips(link: Link, peer: int, size: int, count: int) -> list[float]:
    """Seconds of ``count`` round trips of a message and its acknowledgement, after one more as a warm-up."""
    link.send(torch.tensor([size, count + 1]), peer).wait(DEADLINE_S)
    message, acknowledgement, seconds = torch.zeros(size, dtype=torch.uint8), torch.zeros(1), []
    for _ in range(count + 1):
        start = time.perf_counter()
        link.send(message, peer).wait(DEADLINE_S)
        link.recv(acknowledgement, peer).wait(DEADLINE_S)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _respond(link: Link, leader: int) -> None:
    """Acknowledges every message, with the size and count that ``leader`` announced, until the size is 0."""
    request, acknowledgement = torch.zeros(2, dtype=torch.int64), torch.zeros(1)
    while int(link.recv(request, leader).wait(DEADLINE_S)[0]):
        message = torch.empty(int(request[0]), dtype=torch.uint8)
        for _ in range(int(request[1])):
            link.recv(message, leader).wait(DEADLINE_S)
            link.send(acknowledgement, leader).wait(DEADLINE_S)


def _sums(link: Link, least_bytes: float) -> tuple[tuple[tuple[int, float], ...], float]:
    """All-reduces of increasing size. All ranks use the time of the slowest rank, so they stop at the same size."""
    begun, found = time.perf_counter(), []
    cpu_s = sent_bytes = 0.0
    for num_bytes in (size for size in SUM_BYTES if size >= min(least_bytes, SUM_BYTES[-MIN_SUMS])):
        seconds, values, spent_s = [], torch.ones(num_bytes // 4), 0.0
        for i in range(SUMS + 1):
            _barrier(link)
            start, cpu, sent = time.perf_counter(), time.process_time(), link.sent_bytes
            link.sum(values).wait(DEADLINE_S)
            end, cost = time.perf_counter(), link.sent_bytes - sent
            took = torch.tensor([end - start, time.process_time() - cpu, end - begun], dtype=torch.float64)
            link.max(took).wait(DEADLINE_S)
            seconds += [float(took[0])] if i else []
            spent_s = float(took[2])
            if num_bytes >= COUNTED_BYTES:
                cpu_s, sent_bytes = cpu_s + float(took[1]), sent_bytes + cost
        found.append((num_bytes, statistics.median(seconds)))
        # the next size takes up to four times as long
        if len(found) > 2 and spent_s + 4 * sum(seconds) > BUDGET_S:
            break
    return tuple(found), cpu_s / sent_bytes if sent_bytes else 0.0
