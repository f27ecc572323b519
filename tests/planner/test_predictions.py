"""Seconds per step of rows that were not run, in closed form from a profile."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.planner.candidates import JobFacts, split
from paceline.planner.cost_model import CALL_S, MESSAGES, PROCESS_SYNC_S, STEP_S, THREAD_SYNC_S, predicted_s
from paceline.planner.measure.profile import Profile, Setting
from paceline.registry import says

FACTS = JobFacts(rows=32, gradient_bytes=1000)
MADE_UP = Profile(
    FACTS,
    base="1/8/1//0",
    whole_s=0.12,
    layers_s={
        "1/8/1//0": 0.10,
        "2/32/1//0": 0.20,
        "1/16/2//0": 0.22,
        "2/32/1/bf16/0": 0.10,
    },
    num_calls=10,
    update_s={"1": 0.04, "2": 0.02, "2/fused": 0.01},
    copy_per_s=1e6,
    message_s=1e-4,
    input_s=0.002,
)


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ("sequential", 0.10 * 4 * 1.2 + 0.04 + 0.002),
        ("threads:2", 0.20 * 1.2 + 0.02 + 0.002),
        ("threads:2+fused", 0.20 * 1.2 + 0.01 + 0.002),
        ("processes:2", 0.22 * 1.2 + 0.02 + (1000 + 750) / 1e6 + MESSAGES * 1e-4 + PROCESS_SYNC_S + 0.001),
        ("replicas:2", 0.22 * 1.2 + 0.02 + 750 / 1e6 + THREAD_SYNC_S + 10 * CALL_S + 0.002),
        ("threads:2+bf16", 0.10 * 1.2 + 0.02 + 0.002),
        ("processes:2+bf16", 0.11 * 1.2 + 0.02 + (1000 + 750) / 1e6 + MESSAGES * 1e-4 + PROCESS_SYNC_S + 0.001),
    ],
)
def test_a_prediction_is_the_sum_of_the_parts(row, seconds):
    assert predicted_s(row, MADE_UP, 2) == pytest.approx(seconds + STEP_S)


@pytest.mark.parametrize("row", ["threads:2+compile", "threads:2+channels_last", "processes:2"])
def test_what_a_profile_cannot_tell_is_not_predicted(row):
    assert predicted_s(row, MADE_UP, 4) is None


def test_copies_that_were_not_timed_are_as_fast_as_one_at_best():
    seconds = 0.10 * 1.2 + 0.02 + (1000 + 1000 * 3 / 4 * 1.5) / 1e6 + MESSAGES * 1e-4 + PROCESS_SYNC_S + 0.0005
    assert predicted_s("processes:4", MADE_UP, 4) == pytest.approx(seconds + STEP_S)


TURNS_S = 8 * (2 * says("engine", "pipeline", "turn_s") + 10 * CALL_S)


@pytest.mark.parametrize(
    ("times", "largest", "seconds"),
    [
        ({"1/4/2//0/2": 0.03}, {"2": 0.6}, 0.03 * (1 + 7 * 0.6)),  # a micro-batch of the whole model
        ({"1/4/2//0/2": 0.03}, {}, 0.03 * 9 / 2),  # even stages: nine halves
        ({"1/4/2//0": 0.03}, {}, 0.03 * 1.2 * 9 / 2),  # only layers are known
        ({"1/4/2//0": 0.01, "1/4/2//0/2": 0.03}, {}, 0.03 * 9 / 2),
    ],
)
def test_stages_compute_at_once_but_for_the_first_and_last_micro_batches(times, largest, seconds):
    """Of 8 micro-batches in two stages."""
    profile = dataclasses.replace(MADE_UP, layers_s={**MADE_UP.layers_s, **times}, largest=largest)
    assert predicted_s("pipeline:2", profile, 2) == pytest.approx(seconds + 0.02 + TURNS_S + 0.002 + STEP_S)
    half = dataclasses.replace(profile, layers_s={**profile.layers_s, "2/32/1/bf16/0": 0.05})  # of 0.20
    assert predicted_s("pipeline:2+bf16", half, 2) == pytest.approx(seconds / 4 + 0.02 + TURNS_S + 0.002 + STEP_S)


def test_a_hybrid_is_both():
    """Two processes of 16 rows each, in 8 micro-batches of two stages: all four stages compute at once."""
    profile = dataclasses.replace(MADE_UP, layers_s={**MADE_UP.layers_s, "1/2/4//0": 0.03})
    both, processes = (split(row, 4) for row in ("processes:2/pipeline:2+fused", "processes:2+fused"))
    assert (both.copies, both.stages, both.at_once, both.threads, both.processes, both.words) == (
        *(2, 2, 4, 1, 2),
        ("fused",),
    )
    alone_s = predicted_s(
        "processes:2", dataclasses.replace(profile, layers_s={**profile.layers_s, "2/16/2//0": 0.1}), 4
    )
    want_s = alone_s - 0.1 * 1.2 + 0.03 * 1.2 * 9 / 2 + TURNS_S
    assert predicted_s("processes:2/pipeline:2", profile, 4) == pytest.approx(want_s)
    assert processes.stages == 1


def test_one_thread_on_all_rows_lies_on_the_line_through_fewer_rows():
    """Reading the weights costs the same however many rows there are: 20 ms here, and 10 ms a row."""
    times = {**MADE_UP.layers_s, "1/4/1//0": 0.06}
    profile = dataclasses.replace(MADE_UP, layers_s=times)
    assert predicted_s("sequential", profile, 2) == pytest.approx(0.34 * 1.2 + 0.04 + 0.002 + STEP_S)


@pytest.mark.parametrize(("fewer_s", "layers_s"), [(0.01, 0.40), (0.12, 0.10)])
def test_noise_does_not_let_more_rows_take_less_time_nor_more_than_in_proportion(fewer_s, layers_s):
    """8 rows took 0.10 s: 32 take that at least, and 0.40 s at most."""
    profile = dataclasses.replace(MADE_UP, layers_s={**MADE_UP.layers_s, "1/4/1//0": fewer_s})
    assert predicted_s("sequential", profile, 2) == pytest.approx(layers_s * 1.2 + 0.04 + 0.002 + STEP_S)


def test_threads_without_a_time_take_that_of_as_many_rows_on_as_many_cores():
    times = {key: seconds for key, seconds in MADE_UP.layers_s.items() if not key.startswith("2/")}
    profile = dataclasses.replace(MADE_UP, layers_s=times)
    assert predicted_s("threads:2", profile, 2) == pytest.approx(0.22 * 1.2 + 0.02 + 0.002 + STEP_S)


def test_a_step_in_micro_batches_takes_the_layers_once_for_each():
    facts = dataclasses.replace(MADE_UP.facts, parts=2)
    profile = dataclasses.replace(MADE_UP, facts=facts)
    assert facts.part_rows == 16
    halves_s = predicted_s("sequential", profile, 2) - 0.04 - 0.002 - STEP_S
    once = dataclasses.replace(MADE_UP, facts=dataclasses.replace(facts, rows=16, parts=1))
    assert halves_s == pytest.approx(2 * (predicted_s("sequential", once, 2) - 0.04 - 0.002 - STEP_S))


def test_a_profile_round_trips_and_a_setting_too(tmp_path):
    MADE_UP.write(tmp_path / "profile.json")
    assert Profile.of((tmp_path / "profile.json").read_text()) == MADE_UP
    assert str(Setting.of(split("processes:2+fused+bf16", 4), 9, True)) == "2/5/2/bf16/1"
    assert str(Setting.of(split("threads:4", 4), 9, True)) == "4/9/1//1"
