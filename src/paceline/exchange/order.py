"""In which order pieces go onto the wire, and which of them together: data that all ranks have alike.

    as they come    the order of the specs, which is that of backward
    by need         whenever the wire is free, of the pieces that are ready the one that forward reads first; if none
                    is ready, the next that will be

Small neighbours that would be ready together anyway go as one message: each message saved is its latency saved.
*Laws*: a permutation of the specs; the wire never waits while something is ready; no order changes a result.
*Source*: Hashemi et al. 2018 (arXiv 1803.03288); merging: Shi, Chu & Li 2018 (arXiv 1811.11141).
"""

from __future__ import annotations

from collections.abc import Sequence

Groups = tuple[tuple[int, ...], ...]
MERGED_BYTES = 16 << 20
COPY_S = 1e-9  # per byte: what it costs to lay pieces together and to take them apart
NOTICED = 0.1  # of all seconds on the wire: messages that cost less are left as they are


def by_need(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """``ready``, ``seconds``: when each piece is there, and how long it takes. The last spec is read first."""
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
) -> Groups:
    """Neighbours in one message where the later one is ready, before the earlier could have left by more than the
    time that a message costs. ``kinds``: only what is of one kind may be laid together; "": nothing may."""
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
        ):
            last.append(i)
            continue
        now = begin + sum(seconds[j] for j in last)
        groups.append([i])
    return tuple(map(tuple, groups))
