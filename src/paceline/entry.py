"""A node that comes late, until it is taken in. ``pace`` is `pace.Pace`.

    join       builds all that is its own, and asks where training is
    batches    waits to be taken in; takes over what all have in common; its first batch is the others' next
    before     it is alone: what it saves or evaluates is nobody's

A call of `batches` that the others have finished gives nothing here, so that loops of several calls go on in step.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from paceline import handover
from paceline.following import follow


class Entry:
    """``late``: the link of the process that has it. ``said``: what `compare.digests` says of this one."""

    def __init__(self, pace: Any, late: Any, said: dict[str, str]):
        self.pace, self.late, self.said = pace, late, said
        if late:
            late.glance = pace._glance

    def hello(self) -> None:
        """Where training is. Raises LinkError where this node is refused, or the run has ended."""
        pace = self.pace
        pace.epoch, pace.next_step, pace.began = self._ask({})["position"]
        pace._resumed = True

    def _ask(self, more: dict[str, Any]) -> dict[str, Any]:
        """Every process of the node calls it, and hears what comes before the answer."""
        words, hand = b"", self.pace.exchange.hand
        if self.late:
            limits = self.pace._limits
            own = {"size": self.pace.world.local_size, "least": limits.least[0], "most": limits.most[0]}
            words = json.dumps(self.late.request({"said": self.said, **own}, more, self._pass_on)).encode()
            hand(b"")  # which no message is
        else:
            while message := hand(b""):
                self._hear(message)
        told: dict[str, Any] = json.loads(bytes(hand(words)))
        return told

    def _pass_on(self, message: bytearray) -> None:
        self._hear(self.pace.exchange.hand(message))

    def enter(self, epochs: int) -> bool:
        """False where the others have finished this call, of so many epochs. Every process of the node calls it."""
        pace = self.pace
        if "over" in self._ask({"began": pace.began, "data": pace._data}):
            pace.epoch, pace.next_step = pace.began + epochs, 0
            if self.late:
                self.late.leave()  # nobody reads here until it asks again, by another line
            return False
        pace.exchange.enter()
        link = pace.exchange.link
        where = json.dumps([link.rank, link.size, link.generation]).encode()
        link.rank, link.size, link.generation = json.loads(bytes(pace.exchange.hand(where)))
        if not self.late:
            pace.engine.relink(None)
        while not self._hear(pace.exchange.hand(self.late.take() if self.late else b"")):
            pass
        if self.late:
            self.late.leave()
            pace.heed()
        # other masks than anybody has drawn before
        torch.manual_seed(pace.job.seed * 100_003 + 1_009 * link.generation + pace.world.rank)
        return True

    def _hear(self, message: bytes | bytearray) -> bool:
        """Whether it was the last."""
        said = handover.read(bytearray(message) if isinstance(message, bytes) else message)
        if "pieces" in said:
            follow(self.pace, said)
        if "part" in said:
            handover.take_part(self.pace, said)
        if "weights" in said:
            handover.take(self.pace, said)
        if "sizes" in said:
            handover.adopt(self.pace, said, self.pace.exchange.link.rank)
        return "sizes" in said
