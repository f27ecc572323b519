"""Below the minimum of nodes, survivors keep everything in memory and take no step, until joining nodes are enough.

    round by round   every process says what it knows (a signal, time is over), the leader also who is to be admitted
    state transfer   goes on beside the rounds, at full speed: nothing else is sent
    admission        as between two steps (`admission`): as soon as the nodes are enough then, or all who come are level
    the end          enough nodes: the step is computed. A signal: all save, and end. Time is over: likewise, with
                     RESUME_CODE

Each round is an operation among all (`elastic.fault_tolerant`), so more failures meanwhile leave
fewer to wait.
*Laws*: all leave in the same round, for the same reason; no step is taken below the minimum.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline.elastic.quorum import Found, QuorumVerdict, decide
from paceline.launch.signals import HANGUP
from paceline.transport import Control

POLL_S = 0.1  # between two rounds in which there is nothing to do
SHORT_S = 0.005  # while state is being sent


class WaitingMember:
    """A member that waits for more nodes, and its tasks meanwhile. ``minimum``: number of nodes that train."""

    minimum = 1

    @property
    def num_nodes(self) -> int:
        raise NotImplementedError

    def look(self) -> dict[str, Any]:
        """This process's word: ``guests``: the generation in which somebody is to be admitted, 0 for none; ``follows``:
        state is being sent; ``stop``: a signal that came; ``hung``: the launcher has hung up; ``over``: it has waited
        for long enough."""
        raise NotImplementedError

    def copy(self) -> bool:
        """Where the leader's node is: the next part of the state, where there is a place for it."""
        raise NotImplementedError

    def admit(self) -> None:
        raise NotImplementedError

    def end(self, number: int) -> None:
        """All do it: after signal ``number``, or 0 where time is over. Raises."""
        raise NotImplementedError


def enough(num_nodes: int, minimum: int) -> bool:
    """Whether so many, who know of nobody else, may train."""
    return decide([Found.CAME] * num_nodes, minimum).verdict is QuorumVerdict.GO_ON


def wait(member: WaitingMember, control: Control, pause: Callable[[float], None]) -> None:
    """Until there are enough. Every process of every member must call it. Raises what `WaitingMember.end` raises."""
    while not enough(member.num_nodes, member.minimum):
        said = [json.loads(words) for words in control.all_gather(json.dumps(member.look()).encode())]
        leader = said[0]
        if stop := max(each["stop"] for each in said):
            member.end(stop)
        if all(each["hung"] for each in said):
            member.end(HANGUP)
        if leader["over"]:
            member.end(0)
        copied = leader["follows"] and member.copy()
        # a leader that was lost while it said so names a generation that has been
        if leader["guests"] > control.generation:
            member.admit()
        elif not copied:
            pause(SHORT_S if leader["follows"] else POLL_S)
