"""Quorum after a failure: every case of up to five members."""

from __future__ import annotations

import contextlib
import itertools
import sys

import pytest

from paceline import session
from paceline.elastic.quorum import ALIVE, DEAD, UNREACHABLE, MemberHistory, MemberStatus, QuorumVerdict, decide
from paceline.errors import LinkError
from paceline.launch.signals import RESUME_CODE

PRESENT, EXPECTED, AHEAD = MemberStatus.PRESENT, MemberStatus.EXPECTED, MemberStatus.AHEAD
AGAINST = MemberStatus.SILENT, MemberStatus.SUSPECT
SIZES = range(1, 6)


def views(side, size):
    """All that the members of ``side`` can know of the other members: every assignment of statuses."""
    others = [rank for rank in range(size) if rank not in side]
    for hows in itertools.product((MemberStatus.SILENT, MemberStatus.SUSPECT, MemberStatus.ENDED), repeat=len(others)):
        known = dict(zip(others, hows, strict=True))
        yield [known.get(rank, PRESENT) for rank in range(size)]


def parts(size):
    """Every pair of parts that do not reach each other; some members are in neither."""
    for sides in itertools.product(range(3), repeat=size):
        one, other = ([rank for rank in range(size) if sides[rank] == side] for side in range(2))
        if one and other:
            yield one, other


@pytest.mark.parametrize("size", SIZES)
def test_two_parts_never_both_have_a_quorum(size):
    """No member takes a living member for one that has certainly ended."""
    both = 0
    for one, other in parts(size):
        quorate = [
            any(
                decide(view).quorum
                for view in views(side, size)
                if all(view[rank] is not MemberStatus.ENDED for rank in against)
            )
            for side, against in ((one, other), (other, one))
        ]
        both += all(quorate)
        assert not all(quorate), (one, other)
    assert both == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_part_that_may_be_behind_never_continues_without_a_holder_of_the_newest_commit(size):
    """A first part had a quorum and continued; whatever became of it, it is silent or suspect to the others. The story:
    A and B commit without C, both end, C returns."""
    tried = 0
    for one, other in parts(size):
        for before in views(one, size):
            if not decide(before).quorum or any(before[rank] is MemberStatus.ENDED for rank in other):
                continue
            for view in views(other, size):
                if any(view[rank] is MemberStatus.ENDED for rank in one):  # they were silent before: `MemberHistory`
                    continue
                tried += 1
                decision = decide(view)
                assert not decision.quorum, (before, view)
                assert decision.verdict in (QuorumVerdict.WAIT, QuorumVerdict.RESTORE)
    assert tried or size < 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("minimum", SIZES)
def test_where_nobody_is_silent_or_doubted_the_survivors_never_end(size, minimum):
    for hows in itertools.product((PRESENT, MemberStatus.ENDED), repeat=size):
        if PRESENT in hows:
            decision = decide(hows, minimum)
            assert decision.quorum
            assert (decision.verdict is QuorumVerdict.CONTINUE) == (hows.count(PRESENT) >= minimum)
            assert (decision.verdict is QuorumVerdict.WAIT) == (hows.count(PRESENT) < minimum)


@pytest.mark.parametrize("size", SIZES)
def test_every_case_has_one_verdict_and_whoever_may_be_alive_is_waited_for(size):
    for hows in itertools.product(MemberStatus, repeat=size):
        if PRESENT not in hows:
            continue
        decision = decide(hows)
        assert decision.why or decision.verdict is QuorumVerdict.CONTINUE
        if AHEAD in hows:
            assert decision.verdict is QuorumVerdict.END
        elif EXPECTED in hows:
            assert decision.verdict is QuorumVerdict.WAIT
        if AHEAD in hows or EXPECTED in hows:
            assert not decision.quorum
        if decision.verdict is QuorumVerdict.RESTORE:
            assert MemberStatus.SILENT not in hows
            assert MemberStatus.SUSPECT in hows
        if decision.quorum:  # more is known of one more: never against it
            for rank, how in enumerate(hows):
                if how in AGAINST:
                    assert decide([*hows[:rank], PRESENT, *hows[rank + 1 :]]).quorum


@pytest.mark.parametrize(
    ("hows", "verdict", "words"),
    [
        ("cs", QuorumVerdict.CONTINUE, ""),
        ("sc", QuorumVerdict.WAIT, "cut off from host0"),
        ("dc", QuorumVerdict.RESTORE, "host0 may have continued without this process"),
        ("gc", QuorumVerdict.CONTINUE, ""),
        ("css", QuorumVerdict.WAIT, "cut off from host1, host2"),
        ("cgs", QuorumVerdict.CONTINUE, ""),
        ("gcs", QuorumVerdict.CONTINUE, ""),
        ("gsc", QuorumVerdict.WAIT, "cut off from host1"),
        ("ac", QuorumVerdict.END, "continued without it"),
        ("ec", QuorumVerdict.WAIT, "waits for host0: alive"),
    ],
)
def test_the_cases_that_people_meet(hows, verdict, words):
    letters = {how.value[0]: how for how in MemberStatus}
    decision = decide([letters[each] for each in hows], 1, [f"host{rank}" for rank in range(len(hows))])
    assert decision.verdict is verdict
    assert words in decision.why


def test_too_few_form_a_generation_and_say_how_many_are_asked_for():
    decision = decide([MemberStatus.ENDED, MemberStatus.ENDED, PRESENT], 2)
    assert (decision.verdict, decision.quorum) == (QuorumVerdict.WAIT, True)
    assert "1 of 3 nodes are left; at least 2 are required (--nodes)" in decision.why


def how(history, name, came=(), now=100.0):
    return history.status(name, came, now, 1.0)


def test_whoever_was_silent_once_and_ends_is_doubted_until_it_comes():
    history = MemberHistory()
    for now, seen in ((1.0, UNREACHABLE), (5.0, ALIVE), (6.0, DEAD)):
        history = history.after({"a": seen}, (), now)
    assert how(history, "a") is MemberStatus.SUSPECT
    history = MemberHistory()
    for now, seen, came in ((1.0, UNREACHABLE, ()), (5.0, ALIVE, ("a",)), (6.0, DEAD, ("a",))):
        history = history.after({"a": seen}, came, now)
    assert how(history, "a", ("a",)) is MemberStatus.ENDED
    assert how(MemberHistory().after({"a": DEAD}, (), 1.0), "a") is MemberStatus.ENDED


def test_for_a_process_that_stood_still_whoever_has_ended_is_doubted():
    history = MemberHistory(frozenset("ab")).after({"a": DEAD, "b": ALIVE}, ("b",), 1.0)
    assert how(history, "a") is MemberStatus.SUSPECT
    assert how(history.after({"b": DEAD}, (), 2.0), "b") is MemberStatus.ENDED


def test_silence_counts_after_a_while_and_ends_with_an_answer():
    history = MemberHistory().after({"a": UNREACHABLE}, (), 1.0)
    assert how(history, "a", now=1.5) is EXPECTED
    assert how(history.after({"a": UNREACHABLE}, (), 1.9), "a", now=2.0) is MemberStatus.SILENT
    history = history.after({"b": UNREACHABLE}, (), 2.0)  # nobody has looked at a
    assert how(history, "a", now=2.5) is MemberStatus.SILENT
    assert how(history.after({"a": ALIVE}, (), 3.0), "a", now=9.0) is EXPECTED
    assert how(MemberHistory(), "a", ("a",)) is PRESENT


def test_a_process_that_may_not_continue_says_so_by_its_exit_code(capsys):
    hook = session._one_line(sys.__excepthook__)
    for resumes in (False, True):
        with pytest.raises(SystemExit) if resumes else contextlib.nullcontext() as raised:
            hook(LinkError, LinkError("cut off", resumes=resumes), None)
        said = capsys.readouterr().err
        assert said.startswith("paceline: cut off")
        assert ("exit code 75: resume from the newest checkpoint" in said) == resumes
        assert raised is None or raised.value.code == RESUME_CODE == 75


# a process that was started again: a new life, with a name of its own


@pytest.mark.parametrize("size", range(2, 5))
def test_a_restarted_process_has_no_vote_until_it_holds_the_state(size):
    """Whatever rank 0 has seen of the others: if restarted processes of ended members come to its rendezvous, it finds
    the same status for each member as without them. They are members once admitted, in the next generation."""
    members, decisions = [f"{rank}-first" for rank in range(size)], set()
    for hows in itertools.product((ALIVE, UNREACHABLE, DEAD), repeat=size - 1):
        seen = dict(zip(members[1:], hows, strict=True))
        again = [f"{member[0]}-second" for member, how in seen.items() if how == DEAD]
        for answers in itertools.product((False, True), repeat=size - 1):
            came = [member for member, comes in zip(seen, answers, strict=True) if comes and seen[member] == ALIVE]
            alone, beside = (
                MemberHistory().after(seen | dict.fromkeys(more, ALIVE), [*came, *more], 1.0) for more in ((), again)
            )
            one, other = (
                [PRESENT, *(history.status(member, [*came, *more], 9.0, 1.0) for member in members[1:])]
                for history, more in ((alone, ()), (beside, again))
            )
            assert one == other
            decisions.add(decide(other).verdict)
    assert decisions == {QuorumVerdict.CONTINUE, QuorumVerdict.WAIT}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("minimum", SIZES)
def test_where_no_member_has_come_nobody_continues(size, minimum):
    """All members that held the state have ended, or are silent: only restarted processes are left, and ask to join."""
    for hows in itertools.product([how for how in MemberStatus if how is not PRESENT], repeat=size):
        decision = decide(hows, minimum)
        assert not decision.quorum
        assert decision.verdict is not QuorumVerdict.CONTINUE
