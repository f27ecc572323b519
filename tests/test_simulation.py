"""Trainings in virtual time, on which faults strike at every message: the laws hold, and a planted fault is seen."""

import dataclasses
from collections import Counter

import pytest

from paceline.bench import schedule
from paceline.bench.schedule import KINDS, Rank, Schedule, play
from paceline.bench.simulated import Tally, main
from paceline.contract import Agreement, LinkError, Verdict
from paceline.elastic.survive import Surviving
from paceline.link.faults import CLASSES, DEATH, Net
from paceline.link.virtual import World

COUNT = 100  # on a busy machine a schedule may take a fifth of a second


@pytest.mark.parametrize("first", [0, 10_000, 20_000, 30_000, 40_000, 50_000])
def test_no_schedule_breaks_a_law_and_every_class_of_fault_has_struck(first):
    found = Tally.of(range(first, first + COUNT))
    assert found.violations == {}
    assert set(found.ranks) >= {2, 3, 4}
    assert all(found.fired[kind] for kind in CLASSES), found.fired
    assert found.meetings > COUNT / 4


def test_a_schedule_is_a_function_of_its_seed():
    for seed in (0, 7, 23, 104):
        one, other = play(Schedule.of(seed)), play(Schedule.of(seed))
        assert one.history == other.history
        assert one.history
    assert play(Schedule.of(7)).history != play(Schedule.of(8)).history


def test_an_undisturbed_schedule_applies_every_step_and_nobody_meets():
    outcome = play(dataclasses.replace(Schedule.of(3), size=3, faults={}))
    assert outcome.violations == []
    assert (outcome.fired, outcome.num_meetings, outcome.left_out) == (Counter(), 0, 0)
    assert outcome.num_messages == 3 * (3 * schedule.STEPS + 1)


def test_the_first_faults_leave_out_no_message_and_no_kind():
    """Of an undisturbed run with two ranks: each message is struck by each kind."""
    expected = 2 * (3 * schedule.STEPS + 1)
    struck = set()
    for seed in range(60 * expected * len(KINDS)):
        one = Schedule.of(seed)
        if one.size == 2:
            struck |= set(one.faults.items())
    assert struck >= {(number, kind) for number in range(expected) for kind in KINDS}


def deaths(num_seeds=150):
    """Schedules of three ranks in which one dies, at each message in turn."""
    expected = 3 * (3 * schedule.STEPS + 1)
    return [Schedule(seed, 3, {seed % expected: DEATH}) for seed in range(num_seeds)]


def broken(schedules):
    return any(play(each).violations for each in schedules)


def test_those_who_are_left_forget_what_some_have_applied(monkeypatch):
    """Planted: after a loss the step is always computed again, though a rank that is left has applied it."""
    compare = Surviving._compare
    monkeypatch.setattr(Surviving, "_compare", lambda self: (None, compare(self)[1]))
    assert broken(deaths())


def test_a_rank_that_leaves_before_all_know(monkeypatch):
    """Planted: whoever has applied the last step goes, and takes the knowledge along."""
    monkeypatch.setattr(Rank, "part", lambda self: None)
    assert broken(deaths())


def test_a_refused_step_that_is_not_taken_back(monkeypatch):
    """Planted: those who are left go on with the next batch."""
    monkeypatch.setattr(Surviving, "_redo", lambda self: Agreement(Verdict.SKIP))
    assert broken(deaths(40))


def test_a_sample_that_is_dealt_twice(monkeypatch):
    """Planted: the seat among those who are left is the old one."""
    monkeypatch.setattr(Rank, "regroup", lambda self, news: None)
    assert broken(deaths(40))


def test_who_waits_without_end_is_told():
    world = World(1)
    world.start(0, lambda: world.wait(lambda: False))
    world.run()
    assert world.stuck.startswith("threads of ranks [0] wait without end")


def test_an_error_in_a_thread_is_raised():
    def wrong():
        raise ZeroDivisionError

    world = World(1)
    world.start(0, wrong)
    with pytest.raises(ZeroDivisionError):
        world.run()


def test_virtual_time_takes_no_time_and_keeps_its_order():
    world, seen = World(2), []

    def sleeper(seconds):
        world.wait(lambda: False, seconds)
        seen.append((world.now(), seconds))

    for seconds in (3600.0, 60.0, 86400.0):
        world.start(0, lambda seconds=seconds: sleeper(seconds))
    world.run()
    assert seen == [(60.0, 60.0), (3600.0, 3600.0), (86400.0, 86400.0)]


def test_who_comes_too_late_to_a_meeting_is_told():
    net, said = Net(5, {}), []
    net.stalled[1] = 100.0
    links = net.links(2)

    def one(link):
        try:
            said.append((link.rank, link.rebuild().size))
        except LinkError as error:
            said.append((link.rank, str(error)))

    for link in links:
        net.start(link.rank, lambda link=link: one(link))
    net.run()
    assert (0, 1) in said
    assert (1, "rank 1 came too late: ranks [0] went on without it") in said


def test_one_is_played_again_with_its_history(capsys):
    assert main(["--seed", "12"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == str(Schedule.of(12))
    assert said[1:] == play(Schedule.of(12)).history


def test_many_are_recorded(tmp_path, capsys):
    assert main(["--count", "20", "--record", str(tmp_path / "chaos")]) == 0
    text = (tmp_path / "chaos" / "README.md").read_text()
    assert text.startswith("# Simulated faults: 20 schedules, 0 broke a law")
    assert all(f"| {kind} |" in text for kind in CLASSES)
    assert "20 schedules" in capsys.readouterr().out
