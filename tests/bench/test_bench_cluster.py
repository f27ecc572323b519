"""A race over several nodes counts what the cards send, pairs what ran side by side, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from machines import left_behind, needs_cluster
from paceline.cli import app
from paceline.engine.compute.timeline import Timeline
from paceline_bench import cluster
from paceline_bench.cluster import emulated_scaling, namespaces, peers, prediction_error, tasks
from paceline_bench.cluster.driver import _ended_by_signals
from paceline_bench.cluster.namespaces import Cluster, check_rate
from paceline_bench.cluster.race import Entry, Lap, Pace, Phase, Race, Result, faster, light, result, run
from paceline_bench.cluster.slow_node import held
from paceline_bench.cluster.work import Work
from paceline_bench.single.paired import Spread

pytestmark = pytest.mark.long

TINY = sum(p.numel() for p in Work("tiny", 1).model().parameters())
OURS, DDP, NONE = Entry("paceline"), Entry("ddp", "ddp"), Entry("none", "none")


def quiet(doing: str) -> None:
    pass


def raced(seconds: dict[str, list[float]], turns: dict[str, list[int]] | None = None, sent: float = 2e6) -> Result:
    entries = tuple(Entry(name, name) for name in seconds)
    race = Race("tiny", 4, 2, entries, (Phase("1gbit"),))
    laps = {
        name: Lap((turns or {}).get(name, list(range(len(each)))), each, [sent] * len(each))
        for name, each in seconds.items()
    }
    return Result(race, [laps])


# arithmetic


def test_ratios_are_of_turns_side_by_side():
    """A slow peer that ran in two turns of four is compared with ours in those two alone."""
    got = raced({"a": [3.0, 8.0], "b": [1.0, 100.0, 2.0, 100.0]}, {"a": [0, 2]})
    assert got.ratio(0, "a", "b") == Spread.of_ratios([3.0, 8.0], [1.0, 2.0])
    assert got.ratio(0, "b", "b").median == 1.0
    assert got.rate(0, "a") == pytest.approx(8 / 5.5)
    with pytest.raises(ValueError, match="a and c never ran in one turn"):
        raced({"a": [1.0], "c": [1.0]}, {"a": [0], "c": [1]}).ratio(0, "a", "c")


def test_the_lower_bound_of_the_interval_counts():
    steady = raced({"a": [2.0] * 20, "b": [1.0] * 20})
    assert faster("t", steady, 0, "b", "a", 2.0).reached
    assert not faster("t", steady, 0, "b", "a", 2.01).reached
    noisy = raced({"a": [2.0, 6.0] * 10, "b": [1.0] * 20})
    assert math.exp(0.5 * math.log(12)) > 3.4, "the mean ratio"
    assert not faster("t", noisy, 0, "b", "a", 3.4).reached
    assert light("t", steady, 0, "b", 2.0).reached
    assert not light("t", steady, 0, "b", 1.9).reached


@pytest.mark.parametrize(("most", "turns"), [(1, 20), (3, 20), (6, 20), (7, 3), (20, 20), (5, 7)])
def test_a_slow_contender_has_as_many_turns_as_it_may_and_never_the_first_alone(most, turns):
    entry = Entry("slow", most=most)
    played = [turn for turn in range(turns) if entry.plays(turn, turns)]
    assert len(played) == min(most, turns)
    assert played[-1] == turns - 1


def test_rounds_are_added_and_stay_paired():
    one, two = raced({"a": [1.0, 2.0], "b": [3.0, 4.0]}), raced({"a": [5.0, 6.0], "b": [7.0]}, {"b": [1]})
    one.add(two)
    assert one.laps[0]["a"].turns == [0, 1, 2, 3]
    assert one.laps[0]["b"].turns == [0, 1, 3]
    assert one.ratio(0, "a", "b") == Spread.of_ratios([1.0, 2.0, 6.0], [3.0, 4.0, 7.0])


def test_bytes_are_those_of_the_node_that_sends_most():
    race = Race("tiny", 4, 2, (NONE,), (Phase(None),))
    said = [
        {"laps": [{"none": {"turns": [0, 1], "seconds": [1.0, 1.0], "sent": sent}}], "notes": ["x"]}
        for sent in ([1, 5], [4, 2])
    ]
    got = result(race, said)
    assert got.laps[0]["none"].sent == [4, 5]
    assert got.notes == ["x"]
    for node in said:
        node["laps"][0]["none"] = {"turns": [], "seconds": [], "sent": []}
    with pytest.raises(ValueError, match="none had no turn within 600 s"):
        result(race, said)


def test_a_race_is_read_as_it_was_written(tmp_path):
    entries = OURS, Entry("x", "ddp", "sequential+bf16", {"codec": "half"}, {"A": "b"}, 5, 3, True)
    race = Race("tiny", 4, 3, entries, (Phase("1gbit", 5, 1), Phase(None)), 9.0, (1, 0.5), 5.0)
    race.write(tmp_path / "race.json")
    assert Race.read(tmp_path / "race.json") == race


def test_every_task_has_its_demands_and_its_minutes():
    assert set(tasks.TASKS) >= {"alexnet-1gbit", "alexnet-100mbit", "rounded", "vgg16", "resnet", "transformer"}
    assert set(tasks.TASKS) >= {"nodes4", "nodes8", "halfspeed", "changing-rate"}
    for name, task in (tasks.TASKS | cluster.MORE).items():
        assert re.search(r"\d+ minutes", task.__doc__ or ""), name


def test_a_race_over_late_links_says_so():
    got = raced({"a": [1.0, 1.0], "b": [1.0, 1.0]})
    assert "one way" not in got.table()
    late = Result(dataclasses.replace(got.race, delay_ms=5.0), got.laps)
    assert "links of 1gbit, 5 ms one way\n" in late.table()
    assert light("t", late, 0, "a", 2.0).what.startswith("tiny b4, 2 nodes, 1gbit, 5 ms one way: ")


# what is trained


@pytest.mark.parametrize(
    ("name", "parameters", "shape"),
    [("tiny", TINY, (3, 8, 8)), ("transformer", 10_121_600, (256,)), ("alexnet", 57_016_131, (3, 224, 224))],
)
def test_work_is_of_the_size_it_says(name, parameters, shape):
    work = Work(name, 2, rank=1)
    assert work.x.shape == (2, *shape)
    assert not torch.equal(work.x, Work(name, 2, rank=0).x)
    assert sum(p.numel() for p in work.model().parameters()) == pytest.approx(parameters, rel=0.02)


def test_the_transformer_sees_no_later_token():
    work = Work("transformer@16", 2)
    model = work.model().eval()
    other = work.x.clone()
    other[:, 10:] = 0
    with torch.no_grad():
        one, two = model(work.x), model(other)
    assert one.shape == (2, 4096, 16)
    assert torch.allclose(one[..., :10], two[..., :10], atol=1e-5)
    assert not torch.allclose(one[..., 10:], two[..., 10:], atol=1e-3)


def test_every_peer_is_a_sentence_and_a_start():
    assert {"none", "none-paceline", "ddp", "ddp-tuned", "ddp-fp16", "ddp-powersgd", "horovod"} <= set(peers.names())
    for name in peers.names():
        source = (peers.folder() / f"{name.replace('-', '_')}.py").read_text()
        assert "def start(work):" in source
        assert source.startswith('"""')


# on real links


@needs_cluster
def test_bytes_are_counted_in_closed_form_and_nothing_stays():
    """Dense DDP of two nodes sends every gradient once; ours the rows of the large layer and the rest dense."""
    rows = 4
    race = Race("tiny", rows, 2, (NONE, DDP, OURS), (Phase(None, 3, 1), Phase("100mbit", 3, 1)), 60.0)
    got = run(race, Pace(), quiet)
    factors = 4 * rows * (512 + 512) + 4 * (TINY - 512 * 512)
    for phase in range(2):
        assert got.laps[phase]["ddp"].turns == [0, 1, 2]
        assert got.megabytes(phase, "none") < 0.01
        assert 1.0 <= 1e6 * got.megabytes(phase, "ddp") / (4 * TINY) < 1.15
        assert 1.0 <= 1e6 * got.megabytes(phase, "paceline") / factors < 1.6, "small messages have headers and votes"
    # 1.1 MB at 100 Mbit/s, less what the burst lets through at once
    assert got.laps[1]["ddp"].step_s > 0.5 * 4 * TINY * 8 / 100e6
    assert got.laps[1]["ddp"].step_s > got.laps[1]["none"].step_s
    assert not left_behind()


@needs_cluster
def test_every_node_knows_the_names_of_all():
    """Story: Horovod died of SIGSEGV at its start, where the name of its own host led to no address."""
    ask = "import socket; print(socket.gethostbyname('node0'), socket.gethostbyname(socket.gethostname()))"
    with Cluster(2) as cluster:
        told = [cluster.start(node, [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) for node in (0, 1)]
        said = [process.communicate(timeout=30)[0].split() for process in told]
        assert said == [[cluster.address(0), cluster.address(node)] for node in (0, 1)]
    assert not left_behind()


@pytest.mark.dear
@needs_cluster
def test_every_peer_takes_its_turns_beside_ours():
    """Each file of the folder that can run here, as the races begin it; DDP's bf16 hook and PowerSGD among them."""
    able = [name for name in peers.names() if not peers.lacking(name)]
    assert {"none", "none-paceline", "ddp", "ddp-tuned", "ddp-fp16", "ddp-powersgd"} <= set(able)
    entries = *(Entry(name, name) for name in able), OURS
    got = run(Race("tiny", 4, 2, entries, (Phase(None, 2, 0),), 60.0), Pace(), quiet)
    for entry in entries:
        assert got.laps[0][entry.name].turns == [0, 1], entry.name
        assert got.laps[0][entry.name].step_s > 0
    assert any(note.startswith("ddp-tuned: buckets of ") for note in got.notes)
    sent = {entry.name: got.megabytes(0, entry.name) for entry in entries}
    assert max(sent["none"], sent["none-paceline"]) < 0.01
    assert sent["ddp-powersgd"] < sent["ddp-fp16"] < 0.6 * sent["ddp"]
    assert not left_behind()


def test_horovod_is_raced_apart_where_it_is_and_where_not_the_record_says_so(monkeypatch):
    """Story: its thread slowed all others of the race by a tenth, in their own turns."""
    raced_with = []

    def ran(race, pace, show):
        raced_with.append([entry.name for entry in race.entries])
        lap = {entry.name: Lap([0, 1], [1.0, 1.0], [2e6, 2e6]) for entry in race.entries}
        return Result(race, [lap] * len(race.phases))

    monkeypatch.setattr(tasks, "run", ran)
    for why in ("", "peer 'horovod' needs what is not installed here"):
        monkeypatch.setattr(peers, "lacking", lambda name, why=why: why)
        for name in ("alexnet-1gbit", "alexnet-100mbit", "alexnet-fast", "vgg16"):
            raced_with.clear()
            said = [found.what for found in tasks.TASKS[name](Pace(), quiet)]
            with_it = [len(race) for race in raced_with if "horovod" in race]
            assert with_it == ([] if why else [2]), name
            told = [each for each in said if "horovod is not raced" in each]
            assert told == ([f"horovod is not raced: {why}"] if why else []), name


@pytest.mark.dear
@needs_cluster
def test_a_node_that_fails_is_told_and_nothing_stays():
    race = Race("tiny", 4, 2, (Entry("paceline", options={"codec": "topkk"}),), (Phase(None, 1, 0),), 20.0)
    with pytest.raises(ValueError, match=r"node \d failed.*(?s:.)*no codec named 'topkk'"):
        run(race, Pace(), quiet)
    assert not left_behind()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_heeded_only_where_it_is_asked_for(number):
    """Story: it came while `ip` made a namespace; the handler raised, all was taken down, and then `ip` was done."""
    with _ended_by_signals() as heed:
        heed()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            heed()


@pytest.mark.dear
@needs_cluster
def test_a_signal_takes_the_cluster_down_with_it():
    command = [sys.executable, "-m", "paceline", "bench", "cluster", "--model", "tiny", "--steps", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    mark = f"pl{process.pid}-"

    def there() -> bool:
        return mark in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    try:
        end = time.monotonic() + 90
        while not there() and time.monotonic() < end:
            time.sleep(0.1)
        assert there()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        assert not there()
    finally:
        process.kill()
        process.wait()


@pytest.mark.dear
@needs_cluster
def test_the_command_races_and_writes_a_record(tmp_path):
    asked = ["bench", "cluster", "--model", "tiny", "--batch-per-node", "4", "--rate", "1gbit", "--steps", "3"]
    asked += ["--against", "ddp,none", "--out", str(tmp_path)]
    said = CliRunner().invoke(app, asked)
    assert said.exit_code == 0, said.output
    record = (tmp_path / "README.md").read_text()
    found = json.loads((tmp_path / "raw.json").read_text())
    assert [one["what"] for one in found[1:]] == ["paceline over ddp", "paceline over none"]
    for name in ("ddp", "none", "paceline"):
        assert re.search(rf"^\| {name} \| [\d.]+ \|.*\| 3 \|", record, re.MULTILINE), record
    assert found[0]["details"] in record


@needs_cluster
def test_a_cable_takes_another_rate_while_it_is_up():
    with Cluster(2, "1gbit") as two:
        for rate in ("50mbit", None, "1gbit", "1gbit", None):
            two.shape(rate)
            said = subprocess.run(
                ["tc", "qdisc", "show", "dev", f"{two.mark}v1"], capture_output=True, text=True, check=True
            ).stdout
            shown = {"50mbit": "rate 50Mbit", "1gbit": "rate 1Gbit", None: "noqueue"}[rate]
            assert shown in said
    assert not left_behind()


def test_a_process_is_held_to_a_part_of_its_core():
    spin = "import time\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        with held(process.pid, 0.2) as how:
            time.sleep(0.2)
            before, start = _used(process.pid), time.monotonic()
            time.sleep(1.5)
            part = (_used(process.pid) - before) / (time.monotonic() - start)
        assert part < 0.35, how
        assert re.search("quota|stopped", how)
        assert "paceline" not in Path(f"/proc/{process.pid}/cgroup").read_text()
    finally:
        process.kill()
        process.wait()


def _used(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.dear
@needs_cluster
def test_emulated_compute_is_labelled_and_its_dense_twin_sends_more():
    (found,) = emulated_scaling.curves(Pace(1, 2), quiet, (("tiny", 4, 2),), (2,), (None,))
    assert found.what.startswith("EMULATED")
    sent = dict(re.findall(r"^\| 2 \| no limit \| (\w+) \|.*\| ([\d.]+) \| [\d.]+ \|$", found.details, re.MULTILINE))
    assert 1e6 * float(sent["dense"]) == pytest.approx(4 * TINY, rel=0.15)
    assert float(sent["paceline"]) < 0.2 * float(sent["dense"])


@pytest.mark.dear
def test_no_layer_of_the_dense_twin_may_be_factors(tmp_path):
    emulated_scaling.keep("tiny", 4, tmp_path / "line.json")
    line = Timeline.read(tmp_path / "line.json")
    assert any(bucket.linear for bucket in line.buckets)
    twin = emulated_scaling.all_dense(line)
    assert not any(bucket.linear for bucket in twin.buckets)
    assert [bucket.numel for bucket in twin.buckets] == [bucket.numel for bucket in line.buckets]


# mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "alexnet-2gbit"], "no task named alexnet-2gbit; known: alexnet-fast"),
        (["--model", "tiny", "--rate", "fast"], "rate 'fast' is none of a link's; write 10gbit"),
        (["--model", "tiny", "--against", "ddpp"], "no peer named 'ddpp'; known: ddp, "),
        (["--model", "tiny", "--fidelity", "approximate"], "fidelity 'approximate' is not raced here"),
        (["--model", "tiny", "--nodes", "1"], "2 nodes, 1 row, 1 step and 1 round or more; got 1 nodes"),
        (["--model", "tiny", "--delay", "5"], "the link's rate is not limited; give --rate 200mbit or less"),
        (["--only", "vgg16", "--delay", "5"], "--delay 5 needs the benchmark of --model"),
        (["--model", "tiny", "--only", "vgg16"], "--model selects one benchmark and --only vgg16 others"),
        (["--model", "tiny@x"], "after @ comes the edge of an image"),
        (["--model", "alexnett"], "alexnett"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CliRunner().invoke(app, ["bench", "cluster", *words], catch_exceptions=False)


def test_who_is_not_root_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"makes its nodes on this machine.*need root"):
        next(cluster.run(["alexnet-1gbit"], Pace(), quiet))


def test_rates_are_those_that_tc_knows():
    assert [check_rate(rate) for rate in (None, "none", "1gbit", "100mbit")] == [None, None, "1gbit", "100mbit"]


def test_absent_fashion_images_name_their_package(tmp_path):
    from paceline_bench.cluster.time_to_accuracy import images

    with pytest.raises(ValueError, match="apt-get install dataset-fashion-mnist"):
        images("train", (tmp_path,))


@pytest.mark.dear
@needs_cluster
def test_a_row_that_was_never_run_is_predicted_then_measured():
    cell = prediction_error.Cell("tiny", 4, 2, ("100mbit", "1gbit"))
    found = list(prediction_error.against_measured(Pace(1, 2), quiet, (cell,)))
    rows = re.findall(r"^\| tiny b4, 2 nodes, (\w+) \| ([\d.]+) \| ([\d.]+) \|", found[0].details, re.MULTILINE)
    assert [rate for rate, _, _ in rows] == ["100mbit", "1gbit"]
    # four rows of 512 and 512 words go over the wire, at least
    assert float(rows[0][1]) > 4 * 4 * 1024 * 8 / 100e6
    assert [one.demanded for one in found] == ["-", "<= 10%", "<= 20%"]


def test_rates_are_read_in_tc_s_words():
    assert namespaces.bits_per_s("1gbit") == 1e9
    assert namespaces.bits_per_s("2.5gbit") == 2.5e9
    assert namespaces.bits_per_s("50mbit") == 5e7


@needs_cluster
def test_each_node_takes_in_its_packets_on_its_own_core():
    """Else whichever core has sent a packet also takes it in at the other end, as no machine does."""
    cores = sorted(os.sched_getaffinity(0))
    with Cluster(3) as cluster:
        for node in range(3):
            own = cores[node % len(cores)]
            for inside, device in ((["ip", "netns", "exec", cluster.name(node)], "e0"), ([], f"{cluster.mark}v{node}")):
                words = [*inside, "cat", f"/sys/class/net/{device}/queues/rx-0/rps_cpus"]
                mask = subprocess.run(words, capture_output=True, text=True, check=True).stdout
                assert int(mask.replace(",", ""), 16) == 1 << own


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [
        ("lstm", 2 * 10000 * 512 + 10000 + 2 * (8 * 512**2 + 8 * 512)),
        ("gpt2-tied", (16384 + 256) * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384),  # the vocabulary once
    ],
)
def test_a_language_model_learns_its_batch(name, num_weights):
    work = Work(f"{name}@8", 1)
    model = work.network()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_weights
    step = work.by_hand(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    first = step()
    for _ in range(5):
        last = step()
    assert last < first
