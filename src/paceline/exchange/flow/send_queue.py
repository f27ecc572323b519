"""The send queue: buckets leave in one order on every rank, in a thread of their own; another receives the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.codec.lossless import Gathered
from paceline.messages import Gradient
from paceline.transport import Handle, Threads

TIMEOUT_S = 2000.0  # longer than the time-out of any link


@dataclass
class InFlight:
    """Gradients in flight in one message, which was sent at ``begin_s``."""

    gradients: Sequence[Gradient]
    handle: Handle
    begin_s: float
    pending: Sequence[Any] = (None,)  # the codec's memory of each, to be committed
    lengths: list[int] = field(default_factory=list)  # of each one's payload
    result: Any = None  # of the handle

    def __post_init__(self) -> None:
        self.num_left = len(self.gradients)


class StepSends:
    """One step's buckets: in which messages and order they are sent; which have been offered and sent, and arrived.

    ``step``: its number, for the codec, which may still encode it when other code counts the next. ``packed``: lossless
    compression where possible. ``fast``: the network has a high bandwidth, and gathers are not cut into chunks.
    """

    def __init__(self, groups: Sequence[Sequence[int]], step: int = 0, packed: bool = False, fast: bool = False):
        self.groups, self.step, self.packed, self.high_bandwidth, self.num_sent = groups, step, packed, fast, 0
        self.offered: dict[int, float] = {}
        self.waiting: dict[int, Gradient] = {}
        self.arrived: dict[int, InFlight] = {}  # by the first bucket of each group, until all of it has been taken
        self.took_s: dict[int, float] = {}  # by the same, without the time in the queue
        self.packed_bytes: dict[int, int] = {}  # by the same, of the longest message, where all were packed
        self.leader = {index: group[0] for group in groups for index in group}

    def ready(self) -> tuple[float, ...]:
        """When each bucket was offered, in seconds after the first."""
        first = min(self.offered.values())
        return tuple(self.offered[index] - first for index in range(len(self.leader)))

    def took(self) -> tuple[float, ...]:
        return tuple(self.took_s.get(index, 0.0) for index in range(len(self.leader)))


class SendQueue:
    """``send(gradients, flight)`` begins one message. Errors in the threads are raised in `wait`."""

    def __init__(self, send: Callable[[Sequence[Gradient], StepSends], InFlight], threads: Threads):
        self._send, self._now = send, threads.now
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
        while (task := self._out.get()) is not None:
            flight, gradients = task
            self._in.put((flight, self._send(gradients, flight)))

    def _receive(self) -> None:
        free_s = 0.0  # when the wire became free, by the last arrival
        while (task := self._in.get()) is not None:
            flight, sent = task
            sent.result = sent.handle.wait()
            end_s, leader = self._now(), sent.gradients[0].bucket.index
            if isinstance(sent.handle, Gathered):
                end_s = sent.handle.arrived_s
                flight.packed_bytes[leader] = sent.handle.num_bytes
            flight.took_s[leader], free_s = end_s - max(sent.begin_s, free_s), end_s
            with self._changed:
                flight.arrived[leader] = sent
                self._changed.notify_all()

    def close(self) -> None:
        self._out.put(None)
        self._threads[0].join(5.0)
        self._in.put(None)
        self._threads[1].join(1.0)
