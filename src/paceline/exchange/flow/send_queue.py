"""The send queue: buckets leave in one order on every rank, in a thread of their own; another receives the sums."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.messages import ALL_GATHER, Coded, Collective, Gradient
from paceline.transport import Handle, Threads

TIMEOUT_S = 2000.0  # longer than the time-out of any link


@dataclass
class InFlight:
    """Gradients in flight in one message. ``run``: of its codec, which gives ``collective``, the next to begin, and at
    the end ``coded``, each gradient's result. ``handle``: of the last that began, at ``begin_s``."""

    gradients: Sequence[Gradient]
    run: Generator[Collective, Any, list[Coded]]
    num_rounds: int
    collective: Collective | None = None
    handle: Handle | None = None
    begin_s: float = 0.0
    uneven: bool = False
    coded: list[Coded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_left, self.index = len(self.gradients), self.gradients[0].bucket.index

    def advance(self, result: Any = None) -> bool:
        """Gives the codec the result of its last collective. Whether it has ended."""
        try:
            self.collective = self.run.send(result)
        except StopIteration as end:
            self.coded = end.value
            return True
        return False


class StepSends:
    """One step's buckets: in which messages and order they are sent; which have been offered and sent, and arrived.

    ``step``: its number, for the codec, which may still encode it when other code counts the next. ``packed``: lossless
    compression where possible. ``fast``: the network has a high bandwidth, and gathers are not cut into chunks.
    """

    def __init__(self, groups: Sequence[Sequence[int]], step: int = 0, packed: bool = False, fast: bool = False):
        self.groups, self.step, self.packed, self.high_bandwidth = groups, step, packed, fast
        self.num_sent = self.num_begun = 0
        self.offered: dict[int, float] = {}
        self.waiting: dict[int, Gradient] = {}
        self.arrived: dict[int, InFlight] = {}  # by the first bucket of each group, until all of it has been taken
        self.took_s: dict[int, float] = {}  # by the same, without the time in the queue
        self.actual_bytes: dict[int, int] = {}  # by the same, of the longest payload, where lengths may differ
        self.leader = {index: group[0] for group in groups for index in group}

    def ready(self) -> tuple[float, ...]:
        """When each bucket was offered, in seconds after the first."""
        first = min(self.offered.values())
        return tuple(self.offered[index] - first for index in range(len(self.leader)))

    def took(self) -> tuple[float, ...]:
        return tuple(self.took_s.get(index, 0.0) for index in range(len(self.leader)))


class SendQueue:
    """``encode(gradients, flight)``: one message. ``begin(collective, gradients, flight)`` begins a collective of it.
    Errors in the threads are raised in `wait`.

    A message's second round begins after the first round of the next message, its third after the second of that one:
    the order is the same on all ranks, and the network does not idle while a codec computes between two rounds.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[Gradient], StepSends], InFlight],
        begin: Callable[[Collective, Sequence[Gradient], StepSends], Handle],
        threads: Threads,
    ):
        self._encode, self._begin, self._now = encode, begin, threads.now
        self._out = threads.Queue()  # (flight, gradients), None at the end
        self._in = threads.Queue()  # (flight, sent), None at the end
        self._changed = threads.Condition()
        self._error: BaseException | None = None
        self._threads = [
            threads.Thread(target=self._guard, args=(work,), name=f"paceline {name}", daemon=True)
            for work, name in ((self._send_in_order, "lane"), (self._receive, "arrivals"))
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, flight: StepSends, gradient: Gradient) -> None:
        """From any thread. A gradient waits until all buckets before it, and those of its message, are offered."""
        with self._changed:
            flight.offered[gradient.bucket.index] = self._now()
            flight.waiting[gradient.bucket.index] = gradient
            while flight.num_sent < len(flight.groups):
                group = flight.groups[flight.num_sent]
                if not all(index in flight.waiting for index in group):
                    return
                flight.num_sent += 1
                self._out.put((flight, [flight.waiting.pop(index) for index in group]))

    def has(self, flight: StepSends, index: int) -> bool:
        return flight.leader[index] in flight.arrived

    def wait(self, flight: StepSends, index: int) -> InFlight:
        with self._changed:
            done = self._changed.wait_for(lambda: self._error or self.has(flight, index), TIMEOUT_S)
        if not self.has(flight, index) and self._error:
            raise self._error
        assert done, f"buckets were never offered: {sorted(flight.leader.keys() - flight.offered.keys())}"
        return flight.arrived[flight.leader[index]]

    def take(self, flight: StepSends, index: int) -> tuple[InFlight, int]:
        """As `wait`, once for each bucket: the message, and the place of the bucket in it."""
        sent = self.wait(flight, index)
        sent.num_left -= 1
        if not sent.num_left:
            del flight.arrived[flight.leader[index]]  # frees memory: a step's sums are large
        return sent, [gradient.bucket.index for gradient in sent.gradients].index(index)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _send_in_order(self) -> None:
        later: list[tuple[InFlight, int]] = []  # with its number of rounds that have not begun
        while (task := self._out.get()) is not None:
            flight, gradients = task
            sent = self._encode(gradients, flight)
            sent.advance()
            self._start(flight, sent)
            flight.num_begun += 1
            later = [*self._started(flight, later), *([(sent, sent.num_rounds - 1)] if sent.num_rounds > 1 else [])]
            while later and flight.num_begun == len(flight.groups):
                later = self._started(flight, later)

    def _started(self, flight: StepSends, later: Sequence[tuple[InFlight, int]]) -> list[tuple[InFlight, int]]:
        """Begins the next round of each; those with more."""
        for sent, _ in later:
            self._start(flight, sent)
        return [(sent, left - 1) for sent, left in later if left > 1]

    def _start(self, flight: StepSends, sent: InFlight) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or sent.collective, TIMEOUT_S)
            if self._error:
                raise self._error
        collective, sent.collective = sent.collective, None
        assert collective, f"the round before the next of bucket {sent.index} did not end"
        sent.begin_s, sent.uneven = self._now(), collective.operation == ALL_GATHER and not collective.even
        sent.handle = self._begin(collective, sent.gradients, flight)
        self._in.put((flight, sent))

    def _receive(self) -> None:
        free_s = 0.0  # when the wire became free, by the last arrival
        while (task := self._in.get()) is not None:
            flight, sent = task
            result = sent.handle.wait()
            end_s = self._now()  # decoding is not part of the time on the wire
            if sent.uneven and sent.num_rounds == 1:
                flight.actual_bytes[sent.index] = max(part.nbytes for part in result)
            flight.took_s[sent.index] = flight.took_s.get(sent.index, 0.0) + end_s - max(sent.begin_s, free_s)
            sent.handle = None  # and what it holds; the next round may begin as soon as the codec has advanced
            free_s, ended, result = end_s, sent.advance(result), None
            with self._changed:
                if ended:
                    flight.arrived[sent.index] = sent
                self._changed.notify_all()

    def close(self) -> None:
        self._out.put(None)
        self._threads[0].join(5.0)
        self._in.put(None)
        self._threads[1].join(1.0)
