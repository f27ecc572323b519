"""Who may continue after a failure: dynamic voting among the members of the last generation, as one pure function.

    GO_ON     those who came are a quorum, and not fewer than the minimum: they form the next generation, and train
    WAIT      with a quorum, below the minimum: they form it, and take no step before joining nodes have made it large
              enough. Without a quorum: some members do not answer, and may be training without these
    END       another part has formed a later generation: this process starts again, as a joining node
    RESTORE   those who may have formed one have ended: the newest commit may have ended with them, so the run resumes
              from its newest checkpoint

A quorum is more of the members who came than of those who may still be alive, or as many with the lowest rank. Members
that have certainly ended vote for neither part, so one survivor of two may continue. A process that was started again
has no vote: it is a joining node until it holds the state.

*Assumptions*: processes fail by stopping, or stand still; messages are lost, late, or cut off between any two. An
orderly hang-up of a process's sockets proves that it has ended. All members of a generation apply the same commits, so
each of them holds the newest, unless another part formed a generation without it. For that the other part must not have
heard it for a second at least, which it notices too: from then on it doubts each member there that ends (`Roll`).

*Laws* (`tests/test_quorum.py`, exhaustive up to five members): two parts never both have a quorum; a part without which
another may have continued never continues; where nobody is silent and nobody was doubted, the survivors never end.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ALIVE, DEAD, UNREACHABLE = "here", "gone", "silent"  # what a look at a member's process shows
Member = TypeVar("Member")


class Found(enum.Enum):
    """What is known of one member of the last generation, as far as this process can tell."""

    CAME = "came"  # takes part in this rendezvous
    EXPECTED = "expected"  # answers, or has not been silent for long: it may come yet
    SILENT = "silent"  # has failed, or is cut off; it may be training elsewhere
    GONE = "gone"  # has certainly ended, as a member of this generation
    DOUBTED = "doubted"  # has ended; before, it may have trained without these
    AHEAD = "ahead"  # is in a later generation, without this process


class QuorumVerdict(enum.Enum):
    GO_ON = "go on"
    WAIT = "wait"
    END = "end"
    RESTORE = "restore"


@dataclass(frozen=True)
class QuorumDecision:
    """``quorum``: those who came form the next generation, whether they train in it (GO_ON) or WAIT. ``why``: in words,
    where they do not train."""

    verdict: QuorumVerdict
    quorum: bool = False
    why: str = ""


def decide(found: Sequence[Found], minimum: int = 1, names: Sequence[str] = ()) -> QuorumDecision:
    """``found``: of each member, by its rank in the last generation, the deciding one (CAME) included."""
    names = names or [f"rank {rank}" for rank in range(len(found))]
    by = {each: [rank for rank, how in enumerate(found) if how is each] for each in Found}
    came, against = by[Found.CAME], sorted(by[Found.SILENT] + by[Found.DOUBTED])

    def who(ranks: Iterable[int]) -> str:
        return ", ".join(names[rank] for rank in ranks)

    if by[Found.AHEAD]:
        why = "the others could not reach this node for a while, and continued without it; start it again"
        return QuorumDecision(QuorumVerdict.END, why=why)
    if by[Found.EXPECTED]:
        return QuorumDecision(QuorumVerdict.WAIT, why=f"waits for {who(by[Found.EXPECTED])}: alive, and not there yet")
    if len(came) > len(against) or (len(came) == len(against) and came[:1] < against[:1]):
        if len(came) >= minimum:
            return QuorumDecision(QuorumVerdict.GO_ON, quorum=True)
        why = f"{len(came)} of {len(found)} nodes are left, and at least {minimum} are asked for (--nodes)"
        return QuorumDecision(QuorumVerdict.WAIT, quorum=True, why=why)
    if by[Found.SILENT]:
        return QuorumDecision(
            QuorumVerdict.WAIT,
            why=f"cut off from {who(against)}, and the larger part of a run continues, of two equal parts the one "
            f"with the lowest rank",
        )
    return QuorumDecision(
        QuorumVerdict.RESTORE,
        why=f"{who(against)} may have continued without this process, which stood still or heard nothing of it for a "
        f"while, and has ended; what it trained since is lost, unless it had finished",
    )


@dataclass(frozen=True)
class Roll(Generic[Member]):
    """What looks at the other members have shown so far: a value, of which `after` gives the next.

    ``suspects``: those that may have continued without this process: they were silent, or this process stood still, and
    they have not come since.
    """

    suspects: frozenset[Member] = frozenset()
    seen: Mapping[Member, str] = field(default_factory=dict)  # by the last look
    silent_s: Mapping[Member, float] = field(default_factory=dict)  # since when

    def after(self, seen: Mapping[Member, str], came: Collection[Member], now: float) -> Roll[Member]:
        """``seen``: of those looked at just now. ``came``: to this rendezvous, as members of this generation."""
        latest = {**self.seen, **seen}
        silent = {member: self.silent_s.get(member, now) for member, how in latest.items() if how == UNREACHABLE}
        cleared = {member for member in came if latest.get(member, ALIVE) == ALIVE}
        return Roll(self.suspects.union(silent) - cleared, latest, silent)

    def found(self, member: Member, came: Collection[Member], now: float, doubt_s: float) -> Found:
        """``doubt_s``: without an answer, before a member counts as silent."""
        how = self.seen.get(member, ALIVE)
        if how == DEAD:
            return Found.DOUBTED if member in self.suspects else Found.GONE
        if member in came:
            return Found.CAME
        return Found.SILENT if how == UNREACHABLE and now - self.silent_s[member] >= doubt_s else Found.EXPECTED
