"""Trainings in virtual time, on which faults strike at every message: the laws hold, and a seed tells everything."""

import dataclasses
from collections import Counter

import pytest

from paceline.elastic.quorum import MemberStatus, decide
from paceline.errors import LinkError
from paceline.link.memory import Members
from paceline_bench.simulated.__main__ import main
from paceline_bench.simulated.fault_link import CLASSES, LONG, PARTITION, Net
from paceline_bench.simulated.scenarios import WAYS
from paceline_bench.simulated.schedule import Schedule, cases
from paceline_bench.simulated.simulate import play
from paceline_bench.simulated.summary import Summary, tally
from paceline_bench.simulated.virtual_time import World

pytestmark = pytest.mark.long

COUNT = 150  # on a busy machine a schedule may take a quarter of a second


@pytest.mark.dear("40000")
@pytest.mark.parametrize("first", [0, 40_000])
def test_no_schedule_breaks_a_law_and_every_class_of_fault_has_struck(first):
    found = Summary.of(range(first, first + COUNT))
    assert found.violations == {}
    assert set(found.ranks) >= {2, 3, 4}
    assert set(found.ways) == set(WAYS)
    assert all(found.struck[kind] for kind in CLASSES), found.struck
    assert found.meetings > COUNT / 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_an_undisturbed_schedule_applies_every_step_and_nobody_meets(way, size):
    schedule = Schedule(3, size, {}, way)
    outcome = play(schedule)
    assert outcome.violations == []
    assert (outcome.fired, outcome.num_meetings, outcome.left_out) == (Counter(), 0, 0)
    assert sum("has applied" in line for line in outcome.history) == size * schedule.steps
    if size > 1:
        assert outcome.num_messages == WAYS[way].num_messages(size, schedule.steps)


def test_a_schedule_is_a_function_of_its_seed():
    for seed in (0, 7, 23, 104, 210):
        one, other = play(Schedule.of(seed)), play(Schedule.of(seed))
        assert one.history == other.history
        assert one.history
    assert play(Schedule.of(7)).history != play(Schedule.of(8)).history


def test_the_first_faults_leave_out_no_message_no_kind_no_size_and_no_way():
    """Of undisturbed runs of three steps, in so many even seeds; 104,000 seeds have them all."""
    wanted = set(cases())
    assert {size for size, *_ in wanted} == set(range(2, 9))
    assert len(wanted) == len(cases()) < 52_000  # of which each takes two seeds
    struck = set()
    for seed in range(0, 2 * len(wanted), 2):
        one = Schedule.of(seed)
        struck |= {(one.size, one.way, message, kind) for message, kind in one.faults.items()}
        assert one.samples == 36
    assert struck >= wanted


def test_of_two_parts_that_do_not_hear_each_other_one_goes_on():
    """Whatever the parts, and whenever it begins: never two, and where anybody lives on, it is the larger one."""
    split = 0
    for seed in range(40):
        schedule = Schedule(seed, 2 + seed % 4, {seed % 20: PARTITION})
        outcome = play(schedule)
        assert outcome.violations == []
        split += bool(outcome.left_out)
        assert not outcome.given_up
        assert 2 * outcome.left_out <= schedule.size
        if outcome.left_out:
            assert outcome.fired[LONG[PARTITION]]
    assert split > 5


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
        world.sleep(seconds)
        seen.append((world.now(), seconds))

    for seconds in (3600.0, 60.0, 86400.0):
        world.start(0, lambda seconds=seconds: sleeper(seconds))
    world.run()
    assert seen == [(60.0, 60.0), (3600.0, 3600.0), (86400.0, 86400.0)]


def test_who_is_notified_goes_on_and_nobody_else():
    world, seen = World(3), []
    condition, other = world.Condition(), world.Condition()

    def waits(name, where):
        came = where.wait_for(lambda: "said" in seen, 10.0)
        seen.append((name, came, world.now()))

    def says():
        world.sleep(1.0)
        seen.append("said")
        condition.notify_all()

    for rank, work in enumerate([lambda: waits("told", condition), lambda: waits("untold", other), says]):
        world.start(rank, work)
    world.run()
    assert seen == ["said", ("told", True, 1.0), ("untold", True, 10.0)]


def met(net, size):
    """What each rank heard when all came to meet: the size of the next generation, or why not."""
    said = {}

    def one(link):
        try:
            said[link.rank] = Members(link).reconfigure().link.size
        except LinkError as error:
            said[link.rank] = str(error)

    for link in net.links(size):
        net.start(link.rank, lambda link=link: one(link))
    net.run()
    return said


def test_who_comes_too_late_to_a_meeting_is_told():
    net = Net(5, {})
    net.stall(1, 100.0)
    assert met(net, 2) == {0: 1, 1: f"rank 1: end: {decide([MemberStatus.AHEAD]).why}"}


def test_the_smaller_part_waits_and_is_told_that_it_is():
    net = Net(5, {})
    net.stall(0, 100.0)
    net.stall(1, 100.0)
    assert met(net, 3) == dict.fromkeys(range(3), 3)
    net = Net(5, {})
    net.stall(0, 400.0)
    net.stall(1, 400.0)
    assert met(net, 3)[2].startswith("rank 2: restore: cut off from rank 0, rank 1")


def test_one_is_played_again_with_its_history(capsys):
    assert main(["--seed", "12"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == str(Schedule.of(12))
    assert said[1:] == play(Schedule.of(12)).history


def test_many_are_recorded(tmp_path, capsys):
    assert main(["--count", "20", "--first", "40", "--record", str(tmp_path / "chaos")]) == 0
    text = (tmp_path / "chaos" / "README.md").read_text()
    assert text.startswith("# Simulated faults: 20 schedules, 0 broke a law")
    assert "the seeds are 40 to 59" in text
    assert all(f"| {kind} |" in text for kind in CLASSES)
    assert "20 schedules" in capsys.readouterr().out


def test_those_of_one_way_are_recorded_with_the_seeds_they_are_among(tmp_path):
    assert main(["--count", "300", "--way", "hybrid", "--record", str(tmp_path)]) == 0
    played = [seed for seed in range(300) if Schedule.of(seed).way == "hybrid"]
    assert played
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(f"# Simulated faults: {len(played)} schedules, 0 broke a law")
    assert "the seeds are 0 to 299, of which these train as 'hybrid'" in text


@pytest.mark.dear
def test_two_processes_play_what_one_does():
    assert tally(0, 24, processes=2) == Summary.of(range(24))


def test_when_time_is_up_no_seed_is_left_out_between():
    found = tally(0, 10_000, seconds=1e-9)
    assert found.schedules == 0
    assert dataclasses.asdict(found) == dataclasses.asdict(Summary())
