"""Real histories below the minimum of nodes: what is told of them, whose start is whose, and one that is played."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machines import needs_machines
from paceline_bench.chaos import below_minimum, training
from paceline_bench.chaos.below_minimum import ALL, BELOW, ENDING, STORIES, History, Waits, told
from paceline_bench.chaos.invariants import unlike
from paceline_bench.chaos.journal import Applied, Life


def test_every_history_that_was_wrong_or_hung_is_told_with_its_seed():
    found = [History(seed, STORIES[seed % len(STORIES)], 3, 2) for seed in range(10)]
    found[7].wrong.append("step 7 twice")
    found[8].hung, found[8].killed = "16 s", [(1.0, 2, 30), (1.0, 0, 30)]
    text = told(found)
    assert text.startswith("# 10 real histories below the minimum of nodes: 1 wrong, 1 hung")
    assert f"| {BELOW} | 2 | 0 | 2 | 0 | 0.0 | 1 | 0 |" in text
    assert f"| {ALL} | 2 | 2 | 2 | 0 | 0.0 | 0 | 1 |" in text
    assert "seed 7, below: 3 nodes, at least 2; killed" in text
    assert "WRONG: step 7 twice" in text
    assert "seed 8, all: 3 nodes, at least 2; killed node 2 at step 30, node 0 at step 30" in text


def test_a_start_is_known_by_its_rendezvous_and_a_joining_node_belongs_to_that_of_those_it_joins(tmp_path, monkeypatch):
    said = []
    for node, port in (("0", "7"), ("1", "7"), ("1", "7"), ("0", "3"), ("1", "3")):
        monkeypatch.setenv("GROUP_RANK", node)
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("PACELINE_HOST", "")
        said.append(training._this_start(tmp_path))
        assert os.environ["PACELINE_HOST"] == f"node{node}"
    assert said == [1, 1, 1, 2, 2]
    monkeypatch.setenv("PACELINE_JOIN_TICKET", "ticket.json")
    monkeypatch.setenv("MASTER_PORT", "9")
    assert training._this_start(tmp_path) == 2
    assert training.starts(tmp_path) == ["7", "3"]


def test_what_strikes_is_the_seeds(tmp_path):
    one, other = (Waits(7, tmp_path) for _ in range(2))
    assert one.history == other.history
    assert one.dice.random() == other.dice.random()
    assert one.history.minimum <= one.history.nodes
    assert {Waits(seed, tmp_path).history.story for seed in range(len(STORIES))} == set(STORIES)


def course(node: int, marks: dict[int, int], rows: list[int]) -> Life:
    life = Life(Path(f"1.node{node}.0.7.jsonl"))
    for step, mark in marks.items():
        life.tried[step, 0], life.last[step] = rows, 0
        life.applied[step] = Applied(0.0, 0, 0.0, mark, 2)
    return life


def test_a_resume_is_compared_with_one_by_hand_while_the_same_nodes_compute_the_same_rows():
    by_hand = [course(0, {4: 7, 5: 8, 6: 9}, [1]), course(1, {4: 7, 5: 8, 6: 9}, [2])]
    assert unlike(reversed(by_hand), by_hand) == (3, "")
    other = [course(0, {4: 7, 5: 8, 6: 1}, [1]), course(1, {4: 7, 5: 8, 6: 1}, [2])]
    assert unlike(other, by_hand) == (3, "step 6 ended with other weights than resumed by hand")
    assert unlike([course(0, {4: 7, 5: 1}, [1, 2])], by_hand) == (0, "")
    late = [course(0, {4: 7, 5: 8, 6: 1}, [1]), course(1, {4: 7, 5: 8, 6: 1}, [2]), course(2, {6: 1}, [3])]
    assert unlike(late, by_hand) == (2, "")
    assert unlike([course(0, {5: 8, 6: 9}, [1])], by_hand) == (0, "step 4 was applied by one of them alone")


def test_what_a_start_found_is_kept_once(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoint-00000020").mkdir(parents=True)
    monkeypatch.setenv("PACELINE_FOLDER", str(run))
    training._keep_found(tmp_path, 2)
    (run / "checkpoint-00000040").mkdir()
    training._keep_found(tmp_path, 2)
    assert [path.name for path in training.found(tmp_path, 2).glob("check*")] == ["checkpoint-00000020"]
    assert len(list(training.found(tmp_path, 2).parent.iterdir())) == 1


@pytest.mark.dear
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, pytest.param(5, marks=needs_machines), 6])
def test_a_history_is_as_if_nothing_had_happened(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(below_minimum, "LIMIT_S", 110.0)
    history = Waits(seed, tmp_path).play()
    assert history.story == STORIES[seed]
    assert (history.wrong, history.hung) == ([], "")
    assert history.killed
    assert history.starts > 1 or history.story != ALL  # who is killed at the end may just have ended by itself
    if history.story != ENDING:  # its newest checkpoint may be the last, after which there is no step
        assert (history.by_hand > 0) == (history.starts > 1)
