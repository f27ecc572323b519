"""The event log has complete lines only, and a resumed run is read with each step's last values."""

import json
import math
import resource
import signal
import subprocess
import sys
import threading

import pytest

import records
from launching import launch
from nodes import Plain
from paceline.report.page.charts import quantity
from paceline.report.page.run import load
from paceline.report.page.summary import tiles
from paceline.report.record import Record, read
from records import step, write

DENSE = 8 * sum(weight.numel() for weight in Plain().parameters())  # bytes that each of two nodes sends in a step
EXCHANGES = {
    "server": DENSE,
    "diloco:2": DENSE * 2 / 5,  # two of five steps
    "allreduce:forms=dense, feedback/lowrank:1": 8 * ((96 + 128) + (128 + 128) + (128 + 3) + (128 + 128 + 3)),
    "allreduce:forms=dense, qsgd": -(-DENSE // 8 // 512) * (512 + 8),
}
CUT = "pipeline:2,micros=2,cut=head"


@pytest.mark.dear
@pytest.mark.parametrize(
    ("engine", "exchanges"),
    [("sequential", EXCHANGES), *((name, {"allreduce:forms=dense": DENSE}) for name in (CUT, f"processes:2/{CUT}"))],
    ids=["exchanges", "pipeline", "hybrid"],
)
def test_a_run_names_its_method_and_what_it_sends(tmp_path, engine, exchanges):
    cases = {name: f"plain,sgd,0,{','.join((name + ', none').split(', ')[:2])}" for name in exchanges}
    launch("many.py", tmp_path, *cases.values(), engine=engine, num_nodes=2)
    for name, case in cases.items():
        run = load(tmp_path / "runs" / case)
        num_bytes = run.steps["sent_bytes"].mean()
        assert 0 <= num_bytes - exchanges[name] < 500, "votes"
        told = {"engine": engine, "exchange": name, "sent per step": quantity(num_bytes, "B")}
        for key, value in told.items():
            assert f"<dt>{key}</dt><dd>{value}</dd>" in tiles(run)


def test_threads_do_not_mix_their_lines(tmp_path):
    record = Record(tmp_path)

    def tell(who):
        for number in range(300):
            record.write("word", who=who, number=number, text="x" * (number % 50) * 100)

    threads = [threading.Thread(target=tell, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record.close()
    events = read(tmp_path)
    assert len(events) == 1200
    for who in range(4):
        assert [event["number"] for event in events if event["who"] == who] == list(range(300))


def test_a_disk_that_is_full_for_a_while(tmp_path):
    """A file that may not grow takes a part of a line, then nothing, as a full disk does. Nor can stderr be one."""
    record = Record(tmp_path)
    record.write("word", number=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        for number in range(1, 50):
            record.write("word", number=number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    record.write("word", number=50)
    record.close()
    numbers = [event["number"] for event in read(tmp_path)]
    assert numbers == [*range(len(numbers) - 1), 50]
    assert 1 < len(numbers) < 10


def test_a_run_killed_in_the_middle_of_a_line_is_read_and_resumed(tmp_path):
    write(tmp_path, step(0), step(1))
    with (tmp_path / "record.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "step": 2, "lo\x00\x00')
    assert [event["step"] for event in read(tmp_path)] == [0, 1]
    record = Record(tmp_path)
    record.write("join", engine="sequential")
    record.close()
    assert [event["event"] for event in read(tmp_path)] == ["step", "step", "join"]


def test_a_torn_line_longer_than_one_look_back(tmp_path):
    write(tmp_path, step(0))
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write("x" * 200_000)
    Record(tmp_path).close()
    assert [event["step"] for event in read(tmp_path)] == [0]
    (tmp_path / "record.jsonl").write_text("y" * 200_000)
    Record(tmp_path).close()
    assert (tmp_path / "record.jsonl").read_text() == ""


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    script = f"""
from pathlib import Path
from paceline.report.record import Record
record = Record(Path({str(tmp_path)!r}))
number = 0
while True:
    record.write("word", number=number, text="x" * 20000)
    number += 1
    if number == 50: print("go", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    child.stdout.readline()
    child.kill()
    child.communicate()
    numbers = [event["number"] for event in read(tmp_path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 50


def test_what_json_does_not_know_is_written_in_words(tmp_path):
    record = Record(tmp_path)
    record.write("plan", rows=[{"measured_s": math.inf, "spread_s": 0.12345678, "engine": tmp_path}], loss=math.nan)
    record.close()
    (line,) = (tmp_path / "record.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(constant)

    event = json.loads(line, parse_constant=refuse)
    assert event["rows"] == [{"measured_s": "inf", "spread_s": 0.123457, "engine": str(tmp_path)}]
    assert event["loss"] == "nan"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no such folder; give the folder that training named"),
        ("", r"holds no record\.jsonl, so it is not a run"),
        (b"", r"record\.jsonl is empty: the run ended before its first event"),
        (b'{"event": "st', r"record\.jsonl is empty"),
        (b'{"event": "a", "time": 1}\nnonsense\n', r"line 2 is not an event: got b'nonsense.*Delete that line"),
        (b'{"event": "a", "time": 1}\n[1]\n', r"line 2 is not an event"),
        (b'{"event": "a"}\n', r"line 1 is not an event.*with 'event' and 'time'"),
        (b'{"event": 3, "time": 1}\n', r"line 1 is not an event"),
        (b'{"event": "a", "time": "noon"}\n', r"line 1 is not an event"),
        (b"\xff\xfe\n", r"line 1 is not an event"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(tmp_path, content, message):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        if content != "":
            (folder / "record.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_steps_done_again_after_a_resume_replace_those_before(tmp_path):
    epoch = {"event": "epoch", "loss": 0.5, "accuracy": 0.9}
    first = [records.join(), *(step(n, loss=1.0) for n in range(4)), {**epoch, "epoch": 0}]
    repeated = [*(step(n, loss=7.0) for n in range(4, 8)), {**epoch, "epoch": 1, "loss": 7.0}]
    again = [records.join(), *(step(n, loss=2.0) for n in range(4, 6))]
    run = load(write(tmp_path, *first, *repeated, *again))
    assert run.steps["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert run.steps["loss"].tolist() == [1, 1, 1, 1, 2, 2]
    assert run.epochs["epoch"].tolist() == [0]
    assert run.num_redone == 4
    assert run.resumed == [(7, pytest.approx(5.0))]


def test_the_pause_before_a_resume_is_no_training_time(tmp_path):
    start = 1_800_000_000.0
    first = [records.join(time=start), step(0, time=start + 1)]
    night = start + 30_000
    plan = {"event": "plan", "time": night - 5, **records.PLAN}
    run = load(write(tmp_path, *first, plan, records.join(time=night), step(1, time=night + 2)))
    assert run.steps["time_s"].tolist() == [1, 3]
    assert run.time_s == 3


def test_a_clock_set_back_does_not_run_backwards(tmp_path):
    run = load(write(tmp_path, records.join(time=100.0), step(0, time=102.0), step(1, time=50.0), step(2, time=103.0)))
    assert run.steps["time_s"].tolist() == [2, 2, 3]


def test_sums_of_an_epoch_become_means(tmp_path):
    sums = {"event": "epoch", "epoch": 0, "rows": 200, "right": 150, "loss_sum": 50.0, "test_accuracy": 0.7}
    run = load(write(tmp_path, step(0), sums, {"event": "epoch", "epoch": 1, "loss": 0.1, "accuracy": 0.8}))
    assert run.epochs["loss"].tolist() == [0.25, 0.1]
    assert run.epochs["accuracy"].tolist() == [0.75, 0.8]


def test_shares_of_cores_and_gpus_become_one_number(tmp_path):
    usage = {
        "event": "usage",
        "cpu_percent": 150,
        "machine_cpu_percent": 50,
        "core_percents": [100, 100, 0, 0],
        "gpus": [{"gpu": 0, "percent": 40, "memory_used_bytes": 10}, {"gpu": 1, "memory_used_bytes": 5}],
    }
    run = load(write(tmp_path, usage))
    names = ("run_cores", "machine_cores", "gpu_percent", "gpu_memory_bytes")
    assert [run.usage[name].tolist() for name in names] == [[1.5], [2.0], [40], [15]]


def test_an_end_is_undone_by_a_resume(tmp_path):
    end = {"event": "end", "reason": "Ctrl-C"}
    assert load(write(tmp_path / "a", step(0), end)).end == "Ctrl-C"
    assert load(write(tmp_path / "b", records.join(), step(0), end, records.join(), step(1))).end == ""


def test_every_numeric_field_is_a_column(tmp_path):
    """Also one that only later steps have: not a number before, and where a step lacks it."""
    write(tmp_path, step(0), step(1, skew=0.5), step(2, skew="unknown"), step(3, skew=2))
    skew = load(tmp_path).column("steps", "skew")
    assert [None if math.isnan(value) else value for value in skew] == [None, 0.5, None, 2.0]
    assert [math.isnan(value) for value in load(tmp_path).column("steps", "no_event_has_this")] == [True] * 4
