"""Network benchmark between the ranks of a link: latency and bandwidth of every pair, and all-reduces of all.

    pairs   every two ranks, several pairs at once, so that each rank is in one of them: a few bytes there and back for
            the latency, then ever larger messages, one way and then the other, for the bandwidth
    sums    of 1 KiB to 8 MiB by all ranks, but of none that is there before its bytes show beside the latency; of the
            largest always

Bandwidth is the slope between the larger messages: what a rate limiter lets through at first, and what every message
costs by itself, are in none of it. All ranks call `measure`; every wait has a deadline; it takes 2 to 3 seconds, and
over lines of 20 ms twice as long, since there messages must be larger for their bytes to show.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from paceline.launch.doctor.examine import rounds
from paceline.planner.cluster_model import NetworkModel, Sums, ring
from paceline.transport import Link

DEADLINE_S = 20.0
PINGS, FEW_PINGS, ROUND_TRIPS, SUMS = 10, 3, 2, 3
LONG_LATENCY_S = 5e-3  # of a message: few pings will do
VISIBLE = 2  # times what a message costs by itself: below that, what its bytes take is lost in noise
MIN_TRANSFER = 0.1  # of what a message costs: what the bytes of the largest take at least, where they do not show
PING_BYTES = 64
SMALLEST, LARGEST = 64 << 10, 8 << 20  # bytes of a message
SUM_BYTES = tuple(1024 << shift for shift in (0, 2, 4, 6, 8, 10, 11, 12, 13))  # 1 KiB to 8 MiB
MIN_SUMS = 3  # of the largest sizes, whatever does not show
COUNTED_BYTES = 256 << 10  # of a sum, from which on its work on the processor is counted
BUDGET_S = 1.2  # of pairs, and of sums


@dataclass(frozen=True)
class Pair:
    """Between two ranks. *Units*: seconds of one message without content; bytes per second one way."""

    one: int
    other: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class NetworkMeasurement:
    """``sums``: (bytes, seconds of the slowest rank). ``cpu_s``: of a core, per byte sent in sums.

    ``collective``: the algorithm that was chosen for sums, if any was.
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

    def model_for(self, ranks: Sequence[int], sums: Sums = ring) -> NetworkModel:
        """What these ranks have to do with: the slowest line between any two of them, and the largest latency."""
        lines = [pair for pair in self.pairs if {pair.one, pair.other} <= set(ranks)]
        if not lines:
            return NetworkModel(0.0, float("inf"), sums=sums)
        rate = min(pair.bytes_per_s for pair in lines)
        return NetworkModel(max(pair.latency_s for pair in lines), rate, self._adding_s(sums), self.cpu_s, sums)

    def _adding_s(self, sums: Sums) -> float:
        """Seconds per byte that a sum takes beyond its bytes' way, over all ranks."""
        if len(self.sums) < 2 or self.size < 2:
            return 0.0
        sizes, seconds = zip(*self.sums, strict=True)
        way_s = 1 / min(pair.bytes_per_s for pair in self.pairs)
        each = sums(self.size, LARGEST // 4, 4).in_sequence / LARGEST
        return max(0.0, slope(sizes, seconds) / each - way_s)


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Seconds per byte: the median over all pairs of the larger half. *Source*: Theil 1950; Sen 1968."""
    points = sorted(zip(sizes, seconds, strict=True))[-max(2, (len(sizes) + 1) // 2) :]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    # where noise bends it down, the largest message as a whole is the bound
    found = statistics.median(slopes)
    return max(found if found > 0 else points[-1][1] / points[-1][0], 1e-15)


def measure(link: Link) -> NetworkMeasurement:
    """Called by every rank at once. The result is the same on all. Raises LinkError."""
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
    """All pairs of ranks, the lower first, in rounds in which no rank is in two of them."""
    for pairs in filter(None, rounds(range(size))):
        yield [(min(pair), max(pair)) for pair in pairs]


def _barrier(link: Link) -> None:
    link.sum(torch.zeros(1), "meeting before measuring").wait(DEADLINE_S)


def _pair(link: Link, one: int, other: int, budget_s: float, found: torch.Tensor) -> None:
    """One direction after the other: if they alternated, a rate limiter's savings would pass as bandwidth."""
    for leader, peer in ((one, other), (other, one)):
        if link.rank == peer:
            _respond(link, leader)
            continue
        begun, sizes, seconds = time.perf_counter(), [], []
        pings = _round_trips(link, peer, PING_BYTES, FEW_PINGS)
        if min(pings) < 2 * LONG_LATENCY_S:  # one that was held up makes no line a far one
            pings = _round_trips(link, peer, PING_BYTES, PINGS)
        trip_s, size = statistics.median(pings), SMALLEST
        while True:
            sizes.append(size)
            # among so few sizes one message that was held up would halve the rate
            seconds.append(min(_round_trips(link, peer, size, ROUND_TRIPS)))
            visible = seconds[-1] > VISIBLE * trip_s
            # the next size takes twice as long
            over_budget = time.perf_counter() - begun + 2 * ROUND_TRIPS * seconds[-1] > budget_s / 2
            if size == LARGEST or (visible and over_budget and len(sizes) > 2):
                break
            size = min(size * (2 if visible else 4), LARGEST)
        link.send(torch.zeros(2, dtype=torch.int64), peer).wait(DEADLINE_S)
        byte_s = slope(sizes, seconds)
        if not visible:  # it is a slope of noise
            byte_s = max(byte_s, MIN_TRANSFER * trip_s / LARGEST)
        found[leader, peer, 0], found[leader, peer, 1] = trip_s / 2, 1 / byte_s


def _round_trips(link: Link, peer: int, size: int, count: int) -> list[float]:
    """Seconds until a message is there and a word is back, ``count`` times. One more, before, warms up."""
    link.send(torch.tensor([size, count + 1]), peer).wait(DEADLINE_S)
    message, acknowledgement, seconds = torch.zeros(size, dtype=torch.uint8), torch.zeros(1), []
    for _ in range(count + 1):
        start = time.perf_counter()
        link.send(message, peer).wait(DEADLINE_S)
        link.recv(acknowledgement, peer).wait(DEADLINE_S)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _respond(link: Link, leader: int) -> None:
    """Answers every message, of the size and as often as was announced, until that is 0."""
    request, acknowledgement = torch.zeros(2, dtype=torch.int64), torch.zeros(1)
    while int(link.recv(request, leader).wait(DEADLINE_S)[0]):
        message = torch.empty(int(request[0]), dtype=torch.uint8)
        for _ in range(int(request[1])):
            link.recv(message, leader).wait(DEADLINE_S)
            link.send(acknowledgement, leader).wait(DEADLINE_S)


def _sums(link: Link, least_bytes: float) -> tuple[tuple[tuple[int, float], ...], float]:
    """Every rank receives how long the slowest took, so all stop at the same size."""
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
