"""Who may continue after a failure: dynamic voting among the members of the last generation, as one pure function.

    CONTINUE  the members present are a quorum, and not fewer than the minimum: they form the next generation and train
    WAIT      with a quorum, below the minimum: they form it, and take no step before joining nodes have made it large
              enough. Without a quorum: some members do not answer, and may be training without these
    END       another part has formed a later generation: this process starts again, as a joining node
    RESTORE   the members that may have formed one have ended: the newest commit may have ended with them, so the run
              resumes from its newest checkpoint

A quorum is more members present than other members that may still be alive, or as many with the lowest rank. Members
that have certainly ended vote for neither part, so one survivor of two may continue. A process that was started again
has no vote: it is a joining node until it holds the state.

*Assumptions*: processes fail by stopping, or stall; messages are lost, delayed, or cut off between any two. If the
kernel closes a process's sockets with FIN, the process has ended. All members of a generation apply the same commits;
each of them holds the newest, unless another part formed a generation without it. Before it did, the other part did not
hear this process for a second at least. This process notices that too, and from then on suspects each member of the
other part that ends (`MemberHistory`).

*Invariants* (`tests/elastic/test_quorum.py`, exhaustive up to five members): two parts never both have a quorum; a part
never continues if another may have continued without it; if no member is silent or suspect, the survivors never end.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ALIVE, DEAD, UNREACHABLE = "here", "gone", "silent"  # what a probe of a member's process shows
Member = TypeVar("Member")


class MemberStatus(enum.Enum):
    """What this process knows of one member of the last generation."""

    PRESENT = "came"  # takes part in this rendezvous
    EXPECTED = "expected"  # answers, or has not been silent for long: it may still arrive
    SILENT = "silent"  # has failed, or is cut off; it may be training elsewhere
    ENDED = "gone"  # has certainly ended, as a member of this generation
    SUSPECT = "doubted"  # has ended; before that, it may have trained without these
    AHEAD = "ahead"  # is in a later generation, without this process


class QuorumVerdict(enum.Enum):
    CONTINUE = "go on"
    WAIT = "wait"
    END = "end"
    RESTORE = "restore"


@dataclass(frozen=True)
class QuorumDecision:
    """``quorum``: the members present form the next generation, whether they train in it (CONTINUE) or WAIT. ``why``:
    the reason as text, if they do not train."""

    verdict: QuorumVerdict
    quorum: bool = False
    why: str = ""


def decide(statuses: Sequence[MemberStatus], minimum: int = 1, names: Sequence[str] = ()) -> QuorumDecision:
    """``statuses``: of each member, by its rank in the last generation; the deciding process is PRESENT."""
    names = names or [f"rank {rank}" for rank in range(len(statuses))]
    by = {each: [rank for rank, status in enumerate(statuses) if status is each] for each in MemberStatus}
    present, against = by[MemberStatus.PRESENT], sorted(by[MemberStatus.SILENT] + by[MemberStatus.SUSPECT])

    def listed(ranks: Iterable[int]) -> str:
        return ", ".join(names[rank] for rank in ranks)

    if by[MemberStatus.AHEAD]:
        why = "the others could not reach this node for a while, and continued without it; start it again"
        return QuorumDecision(QuorumVerdict.END, why=why)
    if expected := by[MemberStatus.EXPECTED]:
        return QuorumDecision(QuorumVerdict.WAIT, why=f"waits for {listed(expected)}: alive, and has not arrived yet")
    if len(present) > len(against) or (len(present) == len(against) and present[:1] < against[:1]):
        if len(present) >= minimum:
            return QuorumDecision(QuorumVerdict.CONTINUE, quorum=True)
        why = f"{len(present)} of {len(statuses)} nodes are left; at least {minimum} are required (--nodes)"
        return QuorumDecision(QuorumVerdict.WAIT, quorum=True, why=why)
    if by[MemberStatus.SILENT]:
        return QuorumDecision(
            QuorumVerdict.WAIT,
            why=f"cut off from {listed(against)}, and the larger part of a run continues, of two equal parts the one "
            f"with the lowest rank",
        )
    return QuorumDecision(
        QuorumVerdict.RESTORE,
        why=f"{listed(against)} may have continued without this process, which was suspended or received nothing for a "
        f"while, and has ended; what it trained since then is lost, unless it had finished",
    )


@dataclass(frozen=True)
class MemberHistory(Generic[Member]):
    """What the probes of the other members have shown so far: a value; `after` returns the next one.

    ``suspects``: members that may have continued without this process: they were silent, or it was suspended, and they
    have not been present since."""

    suspects: frozenset[Member] = frozenset()
    seen: Mapping[Member, str] = field(default_factory=dict)  # by the last probe
    silent_s: Mapping[Member, float] = field(default_factory=dict)  # since when

    def after(self, seen: Mapping[Member, str], present: Collection[Member], now: float) -> MemberHistory[Member]:
        """``seen``: results of the newest probes. ``present``: members of this generation in this rendezvous."""
        latest = {**self.seen, **seen}
        silent = {member: self.silent_s.get(member, now) for member, how in latest.items() if how == UNREACHABLE}
        cleared = {member for member in present if latest.get(member, ALIVE) == ALIVE}
        return MemberHistory(self.suspects.union(silent) - cleared, latest, silent)

    def status(self, member: Member, present: Collection[Member], now: float, suspect_after_s: float) -> MemberStatus:
        """``suspect_after_s``: without an answer, before a member counts as silent."""
        how = self.seen.get(member, ALIVE)
        if how == DEAD:
            return MemberStatus.SUSPECT if member in self.suspects else MemberStatus.ENDED
        if member in present:
            return MemberStatus.PRESENT
        silent = how == UNREACHABLE and now - self.silent_s[member] >= suspect_after_s
        return MemberStatus.SILENT if silent else MemberStatus.EXPECTED
