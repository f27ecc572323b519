"""Latency and bandwidth of the link, measured on training's own messages: seconds per message, and per byte.

A lane is a queue, so a message's time runs from its send, or from the arrival of the message before it, to its own
arrival. A rank that enters a collective early waits for the others, so the shortest time of all ranks is that of the
network. The vote gives every rank the same times, so all compute the same rates.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from paceline.messages import CommCost

SPAN = 5  # steps: a median over them follows a changed link after three
LARGE_BYTES = 1 << 18
MIN_S = 1e-9


class WireRates:
    """Medians over the last `SPAN` steps."""

    def __init__(self) -> None:
        self._per_byte: deque[float] = deque(maxlen=SPAN)
        self._latency: deque[float] = deque(maxlen=SPAN)

    def saw(self, gradients: Sequence[tuple[CommCost, float]]) -> None:
        """Adds one step's messages, each with its duration in seconds."""
        gradients = [(cost, seconds) for cost, seconds in gradients if cost.in_sequence and seconds > 0]
        large = [each for each in gradients if each[0].in_sequence >= LARGE_BYTES] or gradients
        if not large:
            return
        per_byte = sum(seconds for _, seconds in large) / sum(cost.in_sequence for cost, _ in large)
        self._per_byte.append(max(MIN_S / LARGE_BYTES, per_byte))
        small = [(cost, seconds) for cost, seconds in gradients if cost.in_sequence < LARGE_BYTES and cost.steps]
        if small and len(small) < len(gradients):
            rests = [max(0.0, seconds - per_byte * cost.in_sequence) / cost.steps for cost, seconds in small]
            self._latency.append(statistics.median(rests))

    @property
    def known(self) -> bool:
        return len(self._per_byte) == SPAN

    @property
    def per_byte(self) -> float:
        return statistics.median(self._per_byte) if self._per_byte else 0.0

    @property
    def latency(self) -> float:
        return statistics.median(self._latency) if self._latency else 0.0
