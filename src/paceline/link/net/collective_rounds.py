"""Rounds of messages: the schedule of an all-reduce as data, which can be drawn, counted and run.

In a round each rank sends at most one message and receives at most one. An algorithm lists only the messages of the
reduction; `packed` schedules them into rounds, and `there_and_back` appends the same messages in reverse, which copy
the complete sums. So one rank adds up each value, the others copy it, and all ranks end with the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Message(NamedTuple):
    """Elements ``start`` to ``stop`` go from ``source`` to ``target``, which adds them to its own, or copies them."""

    source: int
    target: int
    start: int
    stop: int
    add: bool = True

    @property
    def length(self) -> int:
        return self.stop - self.start


Rounds = tuple[tuple[Message, ...], ...]


def bounds(count: int, parts: int) -> list[int]:
    """The ``parts`` + 1 boundaries of ``parts`` slices of ``count`` elements, whose sizes differ by at most one."""
    return [count * i // parts for i in range(parts + 1)]


def packed(messages: Iterable[Message]) -> Rounds:
    """Each message in the first round in which its source has the elements and both ranks are free; empty ones in none.

    ``messages``: in an order in which a rank sends elements after it has received all that is added to them.
    """
    rounds: list[list[Message]] = []
    arrived: defaultdict[int, list[tuple[int, Message]]] = defaultdict(list)
    sending, receiving = set[tuple[int, int]](), set[tuple[int, int]]()
    for message in messages:
        source, target, start, stop, _ = message
        if start == stop:
            continue
        k = max((when + 1 for when, m in arrived[source] if m.start < stop and start < m.stop), default=0)
        while (source, k) in sending or (target, k) in receiving:
            k += 1
        sending.add((source, k))
        receiving.add((target, k))
        arrived[target].append((k, message))
        rounds.extend([] for _ in range(k + 1 - len(rounds)))
        rounds[k].append(message)
    return tuple(map(tuple, rounds))


def there_and_back(rounds: Rounds) -> Rounds:
    """The rounds, and then the same in reverse: each receiver sends the complete sums back."""
    back = (tuple(Message(m.target, m.source, m.start, m.stop, False) for m in one) for one in reversed(rounds))
    return (*rounds, *back)
