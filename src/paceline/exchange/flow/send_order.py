"""The order in which buckets are sent, and which are merged into one message: the same on all ranks.

    by backward     the order of the buckets, in which backward makes them
    by need         whenever the network is free, the ready bucket that the next forward pass reads first; if none is
                    ready, the next that will be. Then a local search moves buckets by a few places while that makes the
                    forward pass end sooner: it waits for each bucket where it reads it. A layer's forward is taken to
                    last half as long as its backward

Small neighbours that are ready at nearly the same time are merged: each message saved saves its latency.
*Invariants*: a permutation of the buckets; by need, forward never ends later than by the order before the search, in
which the network never idles while a bucket is ready; no order changes a result.
*Source*: Hashemi et al. 2018 (arXiv 1803.03288); merging: Shi, Chu & Li 2018 (arXiv 1811.11141).
"""

from __future__ import annotations

from collections.abc import Sequence

Groups = tuple[tuple[int, ...], ...]
MERGED_BYTES = 16 << 20
COPY_S = 1e-9  # per byte: to concatenate buckets and to split them again
MAX_MOVED, REACH = 64, 4  # buckets, and places, of the search: a larger one takes longer than it saves
SOONER_S = 1e-4  # the least gain of a move
FORWARD = 0.5  # of backward's time for a layer
NOTICED = 0.1  # of all seconds on the wire: below this share of message latencies nothing is merged


def by_need(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """``ready``, ``seconds``: when each bucket is ready, and how long it takes. Forward reads the last bucket first."""
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
    """When the next forward pass ends; it begins when backward ends."""
    now, arrival = 0.0, [0.0] * len(ready)
    for i in order:
        now = arrival[i] = max(now, ready[i]) + seconds[i]
    now = max(ready)
    for i in reversed(range(len(ready))):
        now = max(now, arrival[i]) + FORWARD * max(0.0, ready[i] - (ready[i - 1] if i else ready[i]))
    return now


def at_once(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """The greedy order: the network never idles while a bucket is ready."""
    unsent, order, now = set(range(len(ready))), [], 0.0
    while unsent:
        available = [i for i in unsent if ready[i] <= now]
        if available:
            chosen = max(available)
        else:
            chosen = min(unsent, key=lambda i: (ready[i], -i))
            now = ready[chosen]
        now += seconds[chosen]
        unsent.remove(chosen)
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
    """Merges neighbours where waiting for the later one, and copying both, costs less than ``message_s``, the latency
    that one message less saves. ``kinds``: only buckets of one kind are merged, those of kind "" never.
    ``each_waited_for``: forward waits for each bucket, so a merged bucket may take less than ``message_s`` only."""
    groups: list[list[int]] = []
    now = 0.0  # when the network is free for the last group
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
