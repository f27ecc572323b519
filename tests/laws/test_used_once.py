"""A record tells whether every sample of an epoch was used once: each way of not being so has its words."""

import json

import pytest

from paceline.report.page import summary
from paceline.report.page.run import load

PER_EPOCH, ROWS = 4, 8


def step(number, **other):
    epoch, batch = divmod(number, PER_EPOCH)
    said = {"event": "step", "time": float(number), "step": number, "epoch": epoch, "batch": batch, "rows": ROWS}
    return {**said, "samples": ROWS, "ends_epoch": batch == PER_EPOCH - 1, "seconds": 0.1, **other}


def written(folder, steps):
    lines = [{"event": "join", "time": 0.0, "num_nodes": 3}, *steps]
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load(folder)


def test_epochs_that_follow_each_other_used_every_sample_once(tmp_path):
    run = written(tmp_path, [step(number) for number in range(2 * PER_EPOCH)])
    assert summary.errors(run) == []
    assert summary.sample_usage(run) == "each once in 2 whole epochs"


def test_what_was_done_again_after_a_resume_counts_once(tmp_path):
    again = {"event": "join", "time": 9.0, "num_nodes": 2}
    steps = [*map(step, range(6)), again, *map(step, range(3, 2 * PER_EPOCH))]
    assert summary.sample_usage(written(tmp_path, steps)) == "each once in 2 whole epochs"


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([step(0), step(2)], "step 2: batch 2 of epoch 0, where 1 of 0 was due"),
        ([step(0), step(1, batch=0)], "step 1: batch 0 of epoch 0, where 1 of 0 was due"),
        ([step(0), step(1, samples=6)], "step 1: 6 samples of a batch of 8"),
        ([step(0), step(1, samples=10)], "step 1: 10 samples of a batch of 8"),
        ([step(3), step(4, epoch=2)], "step 4: batch 0 of epoch 2, where 0 of 1 was due"),
    ],
    ids=["left out", "twice", "a lost node's rows", "rows of two", "an epoch left out"],
)
def test_what_is_not_so_is_told(tmp_path, steps, says):
    run = written(tmp_path, steps)
    assert summary.errors(run) == [says]
    assert summary.sample_usage(run) == says


@pytest.mark.parametrize("exchange", ["local_sgd:4", "periodic:4"])  # the latter in records of the version before
def test_where_nodes_agree_now_and_then_one_node_s_samples_say_nothing(tmp_path, exchange):
    steps = [step(number, samples=3) for number in range(PER_EPOCH)]
    run = written(tmp_path, steps)
    assert summary.errors(run)
    run.join["exchange"] = exchange
    assert summary.sample_usage(run) == "each once in 1 whole epochs"


def test_a_script_that_deals_its_rows_itself_is_not_judged(tmp_path):
    steps = [
        {key: value for key, value in step(number).items() if key not in ("batch", "rows", "samples", "ends_epoch")}
        for number in range(3)
    ]
    assert summary.sample_usage(written(tmp_path, steps)) == ""
