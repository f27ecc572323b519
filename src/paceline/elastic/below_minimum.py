"""Below the minimum of nodes, survivors keep everything in memory and take no step, until joining nodes are enough.

    round by round   every process reports a signal, or that time is over, and the leader which nodes are to be admitted
    state transfer   continues beside the rounds, at full speed: nothing else is sent
    admission        as between two steps (`admission`): once the nodes are enough with the joining ones, or all joining
                     nodes have caught up
    the end          enough nodes: the step is computed. A signal: all save, and end. Time is over: likewise, with
                     RESUME_CODE

Each round is an operation among all (`elastic.fault_tolerant`), so the survivors of a further failure continue to wait.
*Invariants*: all leave in the same round, for the same reason; no step is taken below the minimum.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline.elastic.quorum import MemberStatus, QuorumVerdict, decide
from paceline.launch.signals import HANGUP
from paceline.transport import Control

POLL_S = 0.1  # between two rounds in which there is nothing to do
SHORT_POLL_S = 0.005  # while state is being sent


class Waiter:
    """What a process does in each round while it waits. ``minimum``: of nodes that train."""

    minimum = 1

    @property
    def num_nodes(self) -> int:
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """This process's report: ``guests``: the generation in which nodes are to be admitted, 0 for none; ``follows``:
        state is being sent; ``stop``: a signal received; ``hung``: the connection to the launcher has closed; ``over``:
        it has waited long enough."""
        raise NotImplementedError

    def copy(self) -> bool:
        """On the leader's node: copies the next part of the state into a free buffer, if there is one."""
        raise NotImplementedError

    def admit(self) -> None:
        raise NotImplementedError

    def end(self, number: int) -> None:
        """Called in all processes: after signal ``number``, or 0 if time is over. Raises."""
        raise NotImplementedError


def enough(num_nodes: int, minimum: int) -> bool:
    """Whether so many nodes may train, if no other may be alive."""
    return decide([MemberStatus.PRESENT] * num_nodes, minimum).verdict is QuorumVerdict.CONTINUE


def wait(waiter: Waiter, control: Control, pause: Callable[[float], None]) -> None:
    """Until there are enough. Every process of every member must call it. Raises what `Waiter.end` raises."""
    while not enough(waiter.num_nodes, waiter.minimum):
        reports = [json.loads(text) for text in control.all_gather(json.dumps(waiter.report()).encode())]
        leader = reports[0]
        if stop := max(each["stop"] for each in reports):
            waiter.end(stop)
        if all(each["hung"] for each in reports):
            waiter.end(HANGUP)
        if leader["over"]:
            waiter.end(0)
        copied = leader["follows"] and waiter.copy()
        # the report of a leader that has failed since names a generation that exists already
        if leader["guests"] > control.generation:
            waiter.admit()
        elif not copied:
            pause(SHORT_POLL_S if leader["follows"] else POLL_S)
