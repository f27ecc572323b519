"""A tracker receives every number with its step and time; an error names a missing package or event log."""

import os
import subprocess
import sys
import threading
import time

import pytest

import records
from needs import module
from paceline.report import trackers
from paceline.report.page.run import load
from paceline.report.record import Record, read


def curve(run, tag):
    """(step, value) as TensorBoard itself reads its files."""
    module("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    found = accumulator.EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return [(scalar.step, scalar.value) for scalar in found.Scalars(tag)]


def test_tensorboard_gets_what_the_record_has(tmp_path):
    run = records.whole(tmp_path / "run", num_steps=40)
    module("tensorboard")
    num_scalars = trackers.follow(run, "tensorboard")
    steps = [event for event in read(run) if event["event"] == "step"]
    assert curve(run, "step/loss") == [(event["step"], pytest.approx(event["loss"])) for event in steps]
    per_s = [64 / event["seconds"] for event in steps]
    assert [value for _, value in curve(run, "step/samples_per_s")] == pytest.approx(per_s, rel=1e-5)
    assert len(curve(run, "epoch/test_accuracy")) == 6
    assert curve(run, "usage/cpu_percent")
    assert num_scalars > 40 * 8


def test_numbers_that_the_script_logs_keep_their_names(tmp_path):
    module("tensorboard")
    logged = [{"event": "log", "time": 3.0 + n, "step": n, "name": "f1", "value": n / 2} for n in range(3)]
    nothing = {"event": "log", "time": 7.0, "step": 3, "name": "f1", "value": "nan"}
    run = records.write(tmp_path, records.join(), *(records.step(n) for n in range(4)), *logged, nothing)
    trackers.follow(run, "tensorboard")
    assert curve(run, "f1") == [(0, 0.0), (1, 0.5), (2, 1.0)]


@pytest.mark.parametrize(
    ("fields", "samples"),
    [({}, 640.0), ({"samples": 32}, 32), ({"rows": 32, "samples": 32}, 32), ({"rows": 32, "samples": 16}, 32)],
    ids=["nothing but the weight", "its own rows", "dealt", "one node's part of an average"],
)
def test_samples_are_counted_whatever_the_loss_divides_by(tmp_path, fields, samples):
    """Regression: the throughput of a language model counted tokens."""
    event = records.step(0, weight=640.0, seconds=0.5, **fields)
    run = records.write(tmp_path, records.join(), event)
    assert load(run).column("steps", "samples_per_s") == pytest.approx([2 * samples])
    assert trackers._numbers(event)["samples_per_s"] == pytest.approx(2 * samples)


def test_steps_done_again_replace_those_before(tmp_path):
    module("tensorboard")
    first, again = [records.step(n, loss=1.0) for n in range(6)], [records.step(n, loss=2.0) for n in range(3, 8)]
    run = records.write(tmp_path / "run", records.join(), *first, records.join(), *again)
    trackers.follow(run, "tensorboard")
    assert curve(run, "step/loss") == [(n, 1.0 if n < 3 else 2.0) for n in range(8)]


def test_a_live_run_is_followed_to_its_end(tmp_path):
    module("tensorboard")
    record = Record(tmp_path / "run")
    num_scalars = []
    follower = threading.Thread(
        target=lambda: num_scalars.append(trackers.follow(tmp_path / "run", "tensorboard", live=True, poll_s=0.02))
    )
    follower.start()
    for number in range(5):
        record.write("step", step=number, loss=float(number))
        time.sleep(0.05)
    assert follower.is_alive()
    record.write("end", reason="finished")
    follower.join(30)
    record.close()
    assert num_scalars == [5]
    assert curve(tmp_path / "run", "step/loss") == [(n, float(n)) for n in range(5)]


def test_a_run_that_was_stopped_and_resumed_is_followed_to_its_last_end(tmp_path):
    module("tensorboard")
    run, end = tmp_path / "run", {"event": "end", "time": 1.0, "reason": "signal 2"}
    records.write(run, records.join(), records.step(0), end, records.join(), records.step(1), end)
    trackers.follow(run, "tensorboard", live=True, poll_s=0.02)
    assert [step for step, _ in curve(run, "step/loss")] == [0, 1]


def test_a_server_that_is_lost_in_between_is_one_clear_error(monkeypatch):
    class Lost(Exception):
        pass

    class Client:
        def log_batch(self, *given):
            raise Lost("connection refused")

    flow = object.__new__(trackers.MLflow)
    flow._client, flow._id, flow._error_type, flow._failed, flow._queue = Client(), "1", Lost, False, [1]
    with pytest.raises(ValueError, match=r"MLflow no longer accepts data: connection refused; .* run `paceline track`"):
        flow.flush()
    flow.close()  # nothing more is asked of it


def test_a_line_half_written_is_waited_for(tmp_path):
    run = records.write(tmp_path / "run", records.step(0))
    with (run / "record.jsonl").open("a") as file:
        file.write('{"event": "step", "time": 1, "st')
        file.flush()
        source = trackers._tail(run, 0.01, None)
        assert next(source)["step"] == 0
        assert next(source) is None
        file.write('ep": 1}\n{"event": "end", "time": 2}\n')
        file.flush()
        assert [event["event"] for event in source if event] == ["step", "end"]


def test_a_run_that_was_killed_is_left_after_a_while(tmp_path):
    run = records.write(tmp_path / "run", records.step(0))
    assert [event and event["step"] for event in trackers._tail(run, 0.01, 0.05)].count(0) == 1


@pytest.mark.dear
def test_mlflow_gets_what_the_record_has(tmp_path, monkeypatch):
    module("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = records.whole(tmp_path / "run", num_steps=20, num_epochs=2)
    trackers.follow(run, "mlflow")
    script = """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
print(run.info.status, run.data.tags["join/engine"])
print(*(f"{m.step}={m.value}" for m in client.get_metric_history(run.info.run_id, "step/loss")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    status, losses = done.stdout.splitlines()
    assert status == "FINISHED processes:2"
    assert losses.split() == [f"{e['step']}={e['loss']}" for e in read(run) if e["event"] == "step"]


def test_wandb_takes_a_run_offline(tmp_path):
    module("wandb")
    run = records.whole(tmp_path / "run", num_steps=20, num_epochs=2)
    # a process of its own: wandb leaves threads and a service behind it until exit
    script = (
        "from pathlib import Path; from paceline.report import trackers; "
        f"print(trackers.follow(Path({str(run)!r}), 'wandb'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert int(done.stdout.split()[-1]) > 20 * 8
    (kept,) = run.glob("wandb/offline-run-*/*.wandb")
    text = kept.read_bytes()
    assert b"step/loss" in text
    assert b"processes:2" in text


@pytest.mark.parametrize(
    ("tracker", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")],
)
def test_a_missing_package_is_one_clear_error(tmp_path, monkeypatch, tracker, module):
    monkeypatch.setitem(sys.modules, module, None)  # as Python itself marks a module that cannot be imported
    run = records.write(tmp_path / "run", records.step(0))
    with pytest.raises(ValueError, match=rf"{tracker}.*not installed.*pip install 'paceline\[track\]'"):
        trackers.follow(run, tracker)


@pytest.mark.parametrize(
    ("name", "hint"), [("tensorbord", "'tensorboard'"), ("W&B", "'wandb'"), ("MLFlow", "'mlflow'")]
)
def test_an_unknown_tracker_is_told_the_known_ones(tmp_path, name, hint):
    with pytest.raises(ValueError, match=f"known: tensorboard, mlflow, wandb; did you mean {hint}"):
        trackers.follow(tmp_path, name)


@pytest.mark.parametrize("live", [False, True])
def test_no_run_no_tracker(tmp_path, live):
    with pytest.raises(ValueError, match=r"no such folder"):
        trackers.follow(tmp_path / "nowhere", "tensorboard", live=live)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no record\.jsonl"):
        trackers.follow(tmp_path / "empty", "tensorboard", live=live)
    assert not (tmp_path / "empty" / "tensorboard").exists()
