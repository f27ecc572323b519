"""Messages in rounds: a sum over all ranks as data, to be drawn, counted and run.

A round is what may happen at once where a rank sends one message and receives one at a time. An algorithm says only
how values flow together, message by message; here they become rounds, and the way back: the same messages in
reverse, copying what is now whole. So every value is added up in one place and copied from there, and all ranks end
with the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Message(NamedTuple):
    """Elements ``start`` to ``stop`` go from ``source`` to ``target``, which adds them to its own, or takes them."""

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
    """Where ``parts`` slices of ``count`` elements begin and end: ``parts`` + 1 places; sizes differ by at most one."""
    return [count * i // parts for i in range(parts + 1)]


def packed(messages: Iterable[Message]) -> Rounds:
    """Each message in the first round in which what it carries is there and both ends are free; empty ones in none.

    ``messages``: listed so that a rank sends elements after it has received all that is to be added to them.
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
    """The rounds, and then their mirror image: who has received sends back what has become of it."""
    back = (tuple(Message(m.target, m.source, m.start, m.stop, False) for m in one) for one in reversed(rounds))
    return (*rounds, *back)
