"""The order in which buckets are sent, and which go in one message: computed alike on all ranks.

    as they come    the order of the buckets, which is that of backward
    by need         whenever the wire is free, of the buckets that are ready the one that forward reads first; if none
                    is ready, the next that will be; then moves by a few places, as long as the next forward pass,
                    which waits for each bucket where it reads it, ends sooner by them. Of a layer it takes half as long
                    as backward

Small neighbours that would be ready together anyway go as one message: each message saved is its latency saved.
*Laws*: a permutation of the buckets; forward never ends later than by the first of these orders, in which the wire
never waits while something is ready; no order changes a result.
*Source*: Hashemi et al. 2018 (arXiv 1803.03288); merging: Shi, Chu & Li 2018 (arXiv 1811.11141).
"""

from __future__ import annotations

from collections.abc import Sequence

Groups = tuple[tuple[int, ...], ...]
MERGED_BYTES = 16 << 20
COPY_S = 1e-9  # per byte: what it costs to lay buckets together and to take them apart
MAX_MOVED, REACH = 64, 4  # buckets, and places: among more it would take longer than it saves
SOONER_S = 1e-4  # or an order is left as it is
FORWARD = 0.5  # of backward's time for a layer
NOTICED = 0.1  # of all seconds on the wire: messages that cost less are left as they are


def by_need(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """``ready``, ``seconds``: when each bucket is there, and how long it takes. The last bucket is read first."""
    order = at_once(ready, seconds)
    if len(order) > MAX_MOVED:
        return order
    end, moved = forward_ends(order, ready, seconds), True
    while moved:
        moved = False
        for i in range(len(order)):
            for place in range(max(0, i - REACH), min(len(order), i + REACH + 1)):
                other = [*order[:i], *order[i + 1 :]]
                other.insert(place, order[i])
                if (then := forward_ends(other, ready, seconds)) < end - SOONER_S:
                    order, end, moved = other, then, True
    return order


def forward_ends(order: Sequence[int], ready: Sequence[float], seconds: Sequence[float]) -> float:
    """When the next forward pass has ended, which begins with backward's end."""
    now, there = 0.0, [0.0] * len(ready)
    for i in order:
        now = there[i] = max(now, ready[i]) + seconds[i]
    now = max(ready)
    for i in reversed(range(len(ready))):
        now = max(now, there[i]) + FORWARD * max(0.0, ready[i] - (ready[i - 1] if i else ready[i]))
    return now


def at_once(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """The wire never waits while something is ready."""
    left, order, now = set(range(len(ready))), [], 0.0
    while left:
        there = [i for i in left if ready[i] <= now]
        if there:
            chosen = max(there)
        else:
            chosen = min(left, key=lambda i: (ready[i], -i))
            now = ready[chosen]
        now += seconds[chosen]
        left.remove(chosen)
        order.append(chosen)
    return order


def merged(
    order: Sequence[int],
    ready: Sequence[float],
    seconds: Sequence[float],
    num_bytes: Sequence[int],
    kinds: Sequence[str],
    message_s: float,
    each_waited_for: bool = False,
) -> Groups:
    """Neighbours in one message where the later one is ready, before the earlier could have left by more than the
    time that a message costs, and that is more than laying them together does. ``kinds``: only what is of one kind may
    be laid together; "": nothing may. ``each_waited_for``: what comes with another delays that one by less than it
    saves."""
    groups: list[list[int]] = []
    now = 0.0  # when the wire is free for the last group
    for i in order:
        last = groups[-1] if groups else []
        together = sum(num_bytes[j] for j in last) + num_bytes[i]
        begin = max(now, max((ready[j] for j in last), default=0.0))
        if (
            last
            and kinds[i]
            and all(kinds[j] == kinds[i] for j in last)
            and together <= MERGED_BYTES
            and ready[i] - begin < message_s - COPY_S * together
            and message_s > COPY_S * together
            and (not each_waited_for or seconds[i] < message_s)
        ):
            last.append(i)
            continue
        now = begin + sum(seconds[j] for j in last)
        groups.append([i])
    return tuple(map(tuple, groups))
