"""The part of a node that fails is its neighbour's: nothing of the optimizer's state is lost with any one node."""

import itertools

import pytest
from test_outlived import check as check_files
from test_outlived import launch
from test_run_waiting import Run, normed, outlive
from test_survive import Fate, check, train

from nodes import Plain, build
from paceline.errors import LinkError
from paceline.launch.signals import RESUME_CODE

OPERATIONS = 19  # of `Plain` in one step: three buckets pushed, each with a copy, and pulled; words and votes
SHARDS = {"exchange": "server", "optimizer": "adam"}


@pytest.mark.dear("2-True", "1-False", "0-True", "0-False")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("victim", range(3))
def test_any_node_may_die_at_any_operation(victim, after):
    model = build(Plain)
    for number in range(1, 2 * OPERATIONS):
        fate = Fate((0, victim, number), after=after)
        check(train(3, fate, model, **SHARDS), fate, model, "adam")


def test_with_a_clipped_gradient():
    model = build(Plain)
    for number in (3, 9, 14, 18):
        fate = Fate((0, 1, number))
        results = train(3, fate, model, **SHARDS, clip=0.05)
        undisturbed = train(3, Fate(), model, **SHARDS, clip=0.05)
        assert sum(result is None for result in results) == 1
        check_same(results, undisturbed)


def check_same(results, others):
    states = [result[1] for result in (*results, *others) if result]
    for one, other in itertools.pairwise(states):
        for name in one:
            assert (one[name] - other[name]).norm() <= 1e-9 * other[name].norm()


def ended(size, fate):
    """Why the survivors may not go on; None where they have trained as if nothing had happened."""
    model = build(Plain)
    try:
        results = train(size, fate, model, **SHARDS)
    except LinkError as error:
        return error
    check(results, fate, model, "adam")
    return None


@pytest.mark.parametrize("number", [5, 17, 22])
@pytest.mark.parametrize("second", range(4))
def test_two_may_die_at_once_unless_they_are_neighbours(second, number):
    """Of five nodes, node 4 and another one. Before the first commit every node has the whole."""
    error = ended(5, Fate((0, 4, number), (0, second, number)))
    if second in (1, 2) or number == 5:
        assert error is None
        return
    assert error.resumes
    part = 5 if second == 0 else 4
    assert f"part {part} of 5 of the optimizer's state, and its copy, were lost with two neighbouring" in str(error)


def test_another_may_die_while_the_parts_of_the_first_are_copied_again():
    """Unless it has the only copy by then, as both neighbours have: nodes 0 and 1 of those who are left."""
    errors = {
        (victim, number): ended(4, Fate((0, 1, 22), (1, victim, number)))
        for victim, number in itertools.product(range(3), (2, 6, 11, 15))
    }
    assert {victim for (victim, _), error in errors.items() if error} == {0, 1}
    assert all(error.resumes for error in errors.values() if error)


@pytest.mark.dear("vote")
@pytest.mark.parametrize("fates", [("0:3:backward", "2:7:vote")], ids=["vote"])
def test_processes_that_are_killed(tmp_path, fates):
    done = launch(tmp_path, *fates, "server")
    said, _ = check_files(tmp_path, done, ["1-0"], num_losses=2)
    assert said[0]["world"] == [0, 1]


@pytest.mark.dear
def test_below_the_minimum_a_node_is_waited_for_and_gets_its_part(tmp_path):
    run = Run(tmp_path, ["0:2:backward", "2:2:backward", "server", "sync", "clip"], num_nodes=4, minimum=4)
    outlive(run, exact=False)
    normed(tmp_path)
    assert run.started == {0: 2, 1: 1, 2: 2, 3: 1}


@pytest.mark.dear
def test_two_neighbours_that_are_killed_at_once_end_the_run_to_be_resumed(tmp_path):
    done = launch(tmp_path, "1:7:backward", "2:7:backward", "server")
    assert done.returncode == RESUME_CODE, done.stdout + done.stderr
    assert "part 2 of 3 of the optimizer's state, and its copy, were lost with two neighbouring nodes" in done.stderr
    assert f"exit code {RESUME_CODE}: resume from the newest checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
