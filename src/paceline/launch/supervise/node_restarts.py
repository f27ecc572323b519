"""Restarts a failed node as a joining node, with a join token, while other nodes hold all state."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.launch.supervise.local_nodes import FAILED, Team
from paceline.launch.supervise.restart_policy import RETRY_DELAY_S, STABLE_AFTER_S
from paceline.report.log import log

RETURNS = 3  # restarts of one node in a row; one that ran for STABLE_AFTER_S, longer than an admission, starts anew


class NodeRestarts:
    """``begin`` starts a node's processes again. ``ticket``: the join token's file, there once a run can be joined."""

    def __init__(self, ticket: Path, returns: int, begin: Callable[[int], None]):
        self.ticket, self.returns, self.begin = ticket, returns, begin
        self.begin_anew(False)

    def begin_anew(self, alone: bool) -> None:
        """Resets the counts for another start of the run. ``alone``: no node on another host writes the token here, so
        one that is there is of a killed run."""
        self._num_begun: dict[int, int] = {}
        self._begun_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}
        self._alone, self.joinable = alone, False
        if alone:
            self.ticket.unlink(missing_ok=True)

    def may_return(self, node: int) -> bool:
        """Whether a node that failed may still be restarted."""
        self.joinable = (self.joinable and self._alone) or self.ticket.exists()
        return self.joinable and self._count(node) < self.returns

    def _count(self, node: int) -> int:
        """How often a failed node was restarted since it last ran for STABLE_AFTER_S."""
        ended_s = self._ended_s.setdefault(node, time.monotonic())
        ran_s = ended_s - self._begun_s.get(node, ended_s)
        return self._num_begun.get(node, 0) if ran_s <= STABLE_AFTER_S else 0

    def restart_due(self, team: Team) -> None:
        """Restarts each failed node whose delay has passed."""
        for node in [node for node, state in team.states().items() if state == FAILED and self.may_return(node)]:
            count, now = self._count(node), time.monotonic()
            if now < self._ended_s[node] + RETRY_DELAY_S * 2**count:
                continue
            del self._ended_s[node]
            self._num_begun[node], self._begun_s[node] = count + 1, now
            team.end(node)
            log.warning(f"node {node} failed; restarting it")
            self.begin(node)
