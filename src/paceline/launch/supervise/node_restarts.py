"""Restarts a failed node as a joining node, which joins with a token, as long as other nodes hold all state."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.launch.supervise.local_nodes import FAILED, Team
from paceline.launch.supervise.restart_policy import RETRY_DELAY_S, STABLE_AFTER_S
from paceline.report.log import log

RETURNS = 3  # of one node, as long as it does not live for STABLE_AFTER_S, longer than an admission takes, in between


class NodeRestarts:
    """``begin``: starts a node's processes anew. ``ticket`` exists as soon as there is a run to join."""

    def __init__(self, ticket: Path, returns: int, begin: Callable[[int], None]):
        self.ticket, self.returns, self.begin = ticket, returns, begin
        self.begin_anew(False)

    def begin_anew(self, alone: bool) -> None:
        """For another start of the run. ``alone``: no node elsewhere writes a ticket here, so an old one is of a run
        that was killed."""
        self._num_begun: dict[int, int] = {}
        self._begun_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}
        self._alone, self.met = alone, False
        if alone:
            self.ticket.unlink(missing_ok=True)

    def hopes(self, node: int) -> bool:
        """Whether a node that failed may still come back."""
        self.met = (self.met and self._alone) or self.ticket.exists()
        return self.met and self._count(node) < self.returns

    def _count(self, node: int) -> int:
        """How often a failed node has come back since it last ran for STABLE_AFTER_S without failing."""
        ended_s = self._ended_s.setdefault(node, time.monotonic())
        lived_s = ended_s - self._begun_s.get(node, ended_s)
        return self._num_begun.get(node, 0) if lived_s <= STABLE_AFTER_S else 0

    def look(self, team: Team) -> None:
        """Starts those that failed again, when their pause is over."""
        for node in [node for node, state in team.states().items() if state == FAILED and self.hopes(node)]:
            count, now = self._count(node), time.monotonic()
            if now < self._ended_s[node] + RETRY_DELAY_S * 2**count:
                continue
            del self._ended_s[node]
            self._num_begun[node], self._begun_s[node] = count + 1, now
            team.end(node)
            log.warning(f"node {node} ended, and is started again")
            self.begin(node)
