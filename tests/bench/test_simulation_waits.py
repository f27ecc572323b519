"""Trainings in virtual time whose nodes fail and return: below the minimum and back, all at once, and the like."""

from __future__ import annotations

import pytest
import torch

from paceline.elastic import below_minimum
from paceline.elastic.quorum import MemberHistory
from paceline_bench.simulated.__main__ import main
from paceline_bench.simulated.fault_link import Net
from paceline_bench.simulated.rank import Rank
from paceline_bench.simulated.returns import Hall
from paceline_bench.simulated.schedule import STORIES, Schedule
from paceline_bench.simulated.simulate import play
from paceline_bench.simulated.summary import Summary

COUNT = 60  # ten of each story


@pytest.mark.dear
@pytest.mark.parametrize("first", range(0, 24_000, 6_000))
def test_no_history_breaks_a_law(first):
    found = Summary.of(range(first, first + COUNT), waits=True)
    assert found.violations == {}
    assert set(found.stories) == set(STORIES)
    assert found.admitted > COUNT / 2
    assert found.starts[2] >= COUNT / 12  # all at once
    assert not set(found.starts) - {1, 2, 3}


@pytest.mark.dear
def test_a_history_is_a_function_of_its_seed():
    for seed in range(len(STORIES)):
        one, other = (play(Schedule.of_waiting(seed)) for _ in range(2))
        assert one.history == other.history


def found(seeds):
    return any(play(Schedule.of_waiting(seed)).violations for seed in seeds)


def test_a_step_that_is_taken_below_the_minimum_is_found(monkeypatch):
    monkeypatch.setattr(below_minimum, "enough", lambda num_nodes, minimum: True)
    assert found(range(0, 60, 6))


@pytest.mark.dear
def test_a_joining_node_that_is_given_an_older_state_is_found(monkeypatch):
    """Planted: the leader sends what it has begun with, under the number of the step."""
    begin = Rank.__init__

    def noted(self, *given):
        begin(self, *given)
        self.first = self.state()

    def older(self):
        state = self.first.clone() if hasattr(self, "first") else torch.empty(0)
        state[0] = self.run.num_steps
        return state

    keep = Rank.state
    monkeypatch.setattr(Rank, "__init__", noted)
    assert not found(range(0, 60, 6))
    monkeypatch.setattr(Hall, "admit", lambda self, admit=Hall.admit: _as(self, admit, older, keep))
    assert found(range(0, 60, 6))


def _as(hall, admit, older, keep):
    Rank.state = older
    try:
        admit(hall)
    finally:
        Rank.state = keep


def test_a_part_that_continues_from_older_weights_is_found(monkeypatch):
    """Planted: one that did not hear the others trusts that they ended before they committed anything without it."""
    after = MemberHistory.after

    def trusting(self, *given):
        history = after(self, *given)
        return MemberHistory(frozenset(), history.seen, history.silent_s)

    monkeypatch.setattr(Net, "doubts", lambda self, one: False)
    monkeypatch.setattr(MemberHistory, "after", trusting)
    assert found(range(5, 600, 6))


def test_one_is_played_again_with_its_history(capsys):
    assert main(["--waits", "--seed", "7"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == str(Schedule.of_waiting(7))
    assert said[1:] == play(Schedule.of_waiting(7)).history
