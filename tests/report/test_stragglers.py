"""A node that is slower than its share assumes is reported once, with its symptoms; noise is not reported."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from cluster import Cluster
from launching import HERE, environment
from machines import needs_cluster
from paceline.report.activity import Activity
from paceline.report.host_health import HostHealth, HostSample
from paceline.report.record import Record, read
from paceline.report.stragglers import NETWORK, NO_SYMPTOMS, Stragglers

SPIN = "import os\nprint(os.getpid(), flush=True)\nwhile True: pass"


class Clock:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


@pytest.fixture
def watch(tmp_path):
    """``run(steps, busy, ...)``: steps with these busy times of the nodes; ``found()``: the events written."""

    class Watch:
        def __init__(self):
            self.signs, self.clock = {}, Clock()
            self.record = Record(tmp_path)
            self.stragglers = Stragglers(self.record, self.everyone, balanced=False, now=self.clock)
            self.steps = 0

        def everyone(self):
            return {
                rank: {"host": f"host{rank}", "signs": self.signs.get(rank, []), "way_s": 1e-3} for rank in range(3)
            }

        def run(self, steps, busy, took_s=0.01, sent_bytes=1000, step_s=1.0, rows=()):
            for _ in range(steps):
                each = busy() if callable(busy) else busy
                self.clock.s += step_s
                self.steps += 1
                self.stragglers.after(self.steps, rows or [8] * len(each), [(b, 0.0) for b in each], took_s, sent_bytes)

        def found(self):
            self.record.write("end")
            return [event for event in read(tmp_path) if event["event"] == "straggler"]

    watch = Watch()
    yield watch
    watch.record.close()


def test_a_slow_node_is_named_once_with_its_signs(watch, capsys):
    watch.signs = {1: ["other programs use 1.0 of its 2 cores (spin, pid 7: 1.0)"]}
    watch.run(30, (0.2, 0.2, 0.2))
    assert watch.found() == []
    watch.run(60, (0.2, 0.5, 0.2))
    (event,) = watch.found()
    assert (event["node"], event["host"], event["seconds"], event["usual_seconds"]) == (1, "host1", 0.5, 0.2)
    assert event["step"] <= 30 + 9 + 4
    assert event["signs"] == watch.signs[1]
    text = "rank 1 on host1 is slower than its share assumes: 0.5 s of work in a step, the others 0.2 s"
    assert text in event["text"]
    assert capsys.readouterr().err == f"paceline: {event['text']}\n"


def test_it_is_named_again_in_the_record_alone_after_it_had_recovered(watch, capsys):
    watch.signs = {0: ["memory is short"]}
    for busy in ((0.5, 0.2, 0.2), (0.2, 0.2, 0.2), (0.5, 0.2, 0.2)):
        watch.run(30, busy)
    assert [event["node"] for event in watch.found()] == [0, 0]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_noise_and_steps_that_take_no_time_are_not_named(watch):
    dice = random.Random(3)
    watch.run(400, lambda: [0.2 * dice.lognormvariate(0, 0.2) for _ in range(3)])
    watch.run(50, (0.001, 0.015, 0.001))
    assert watch.found() == []


def test_new_shares_come_with_the_name_of_the_slow(watch, capsys):
    watch.stragglers.balanced = True
    watch.run(15, (0.2, 0.5), step_s=0.1)
    assert watch.found() == []
    watch.stragglers.on_assignment(15, (8, 8), (12, 4), (40.0, 16.0))
    watch.run(20, (0.3, 0.3), step_s=1.0)
    (event,) = watch.found()
    assert (event["old"], event["new"]) == ([8, 8], [12, 4])
    assert event["text"].endswith(f"{NO_SYMPTOMS}; rows of the global batch: 8, 8 -> 12, 4")


def test_who_made_the_shares_change_is_named_even_where_noise_hid_it(watch):
    watch.run(5, (0.2, 0.2), step_s=0.1)
    watch.stragglers.on_assignment(5, (8, 8), (9, 7), (40.0, 35.0))
    watch.stragglers.on_assignment(6, (8, 8), (12, 4), (40.0, 16.0))
    watch.stragglers.close()
    assert [(event["node"], event["new"]) for event in watch.found()] == [(1, [12, 4])]


def test_who_has_the_rows_of_one_that_was_slow_is_none(watch):
    watch.stragglers.on_assignment(15, (8, 8), (12, 4), (40.0, 16.0))
    watch.run(40, (0.3, 0.1), rows=(12, 4))
    watch.stragglers.on_assignment(40, (12, 4), (8, 8), (40.0, 40.0))
    watch.stragglers.close()
    assert [event["node"] for event in watch.found()] == [1]


def test_what_is_not_told_yet_is_told_at_the_end(watch):
    watch.run(13, (0.2, 0.5, 0.2), step_s=0.01)
    assert watch.found() == []
    watch.stragglers.close()
    assert [event["node"] for event in watch.found()] == [1]


def test_a_slow_network_is_named_where_all_nodes_take_what_they_took(watch):
    watch.run(30, (0.2, 0.2, 0.2), took_s=0.05)
    watch.run(30, (0.2, 0.2, 0.2), took_s=0.05, sent_bytes=9000)
    assert watch.found() == []
    watch.run(30, (0.2, 0.2, 0.2), took_s=0.4)
    (event,) = watch.found()
    assert "node" not in event
    assert "the network is slow: communication takes 0.4 s per step, and took 0.05 s at best before" in event["text"]
    assert NETWORK not in {each.node for each in watch.stragglers.pending}


@pytest.fixture
def stranger():
    """A busy program that is not a child of this process."""
    shell = subprocess.Popen(
        ["sh", "-c", f"exec {sys.executable} -c '{SPIN}' & wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    pid = int(shell.stdout.readline())
    shell.kill()  # what it started is an orphan now
    shell.wait()
    yield pid
    os.kill(pid, signal.SIGKILL)
    shell.stdout.close()


def test_programs_that_take_the_cores_are_named(stranger, monkeypatch):
    monkeypatch.setattr("paceline.report.host_health.MAX_NAMED", 1000)  # others may take more
    monkeypatch.setattr("paceline.report.host_health.MIN_NAMED", 0.01)
    signs = HostHealth(Activity())
    before = signs.sample()
    assert stranger in before.spent
    assert stranger not in before.ours
    assert os.getpid() in before.ours
    end = time.monotonic() + 30
    while True:
        time.sleep(0.5)
        found = signs.compare(before, signs.sample())
        if any(f"pid {stranger}" in words for words in found):
            break
        assert time.monotonic() < end, found
    assert "other programs use" in found[0]


def test_what_the_run_uses_itself_is_no_sign():
    signs = HostHealth(Activity())
    before = HostSample(0.0, busy_s=10.0, spent={1: ("init", 0.0, 0), 7: ("ours", 5.0, 0)}, ours=frozenset({7}))
    now = HostSample(5.0, busy_s=15.0, spent={1: ("init", 0.1, 0), 7: ("ours", 10.0, 0)}, ours=frozenset({7}))
    assert signs.compare(before, now) == []


def test_limits_short_memory_and_the_host_show(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    home = tmp_path / "sys/fs/cgroup/job"
    for folder in (home, tmp_path / "proc/self", tmp_path / "proc/pressure"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")

    def at(steal, throttled_s, memory_s, swapped):
        lines = [f"cpu{core} 0 0 0 0 0 0 0 {steal} 0 0\n" for core in cores]
        (tmp_path / "proc/stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\n" + "".join(lines))
        (home / "cpu.stat").write_text(f"nr_periods 9\nnr_throttled 1\nthrottled_usec {int(throttled_s * 1e6)}\n")
        words = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(memory_s * 1e6)}\n"
        (tmp_path / "proc/pressure/memory").write_text(words)
        (tmp_path / "proc/vmstat").write_text(f"pswpin {swapped}\npswpout 0\npgmajfault 5\n")
        return signs.sample()

    at_first = (0, 0.0, 0.0, 0)
    (home / "cpu.stat").write_text("throttled_usec 0\n")
    signs = HostHealth(Activity(), root=tmp_path)
    before = at(*at_first)
    for now, want in (
        ((10_000, 0.0, 0.0, 0), "its host gave"),
        ((0, 500.0, 0.0, 0), "the processor limit of its cgroup stopped it"),
        ((0, 0.0, 500.0, 0), "memory is short: something waited for it"),
        ((0, 0.0, 0.0, 10_000_000), "pages per second go to or from swap"),
    ):
        time.sleep(0.01)
        (found,) = signs.compare(before, at(*now))
        assert want in found
    assert signs.compare(before, at(*at_first)) == []


def test_late_data_is_a_sign():
    activity = Activity()
    activity.begin(0)
    activity.end(1.0, 0.6)
    assert list(HostHealth(activity)._data()) == ["its data comes late: 60 % of a step is waiting for it"]
    activity.end(1.0, 0.1)
    assert list(HostHealth(activity)._data()) == []


def test_a_look_costs_little():
    """At most a thousandth of a core: the cost of a sample determines the time of the next one."""
    signs = HostHealth(Activity())
    costs = []
    for _ in range(5):
        start = time.thread_time()
        signs.sample()
        costs.append(time.thread_time() - start)
    assert min(costs) < 0.5
    assert json.dumps(signs.compare(signs.sample(), signs.sample())) is not None


def until(condition, nodes):
    end = time.monotonic() + 200
    while not condition():
        assert all(node.poll() is None for node in nodes)
        assert time.monotonic() < end
        time.sleep(0.1)


def events(folder):
    path = folder / "record.jsonl"
    return read(folder) if path.exists() and path.stat().st_size else []


def reported(folder, node=1):
    return [event for event in events(folder) if event["event"] == "straggler" and event.get("node") == node]


def begin(cluster, folder, *words):
    command = [sys.executable, str(HERE / "scripts" / "slowed.py"), str(folder), *words]
    more = {"environment": environment(PACELINE_ENGINE="sequential"), "stderr": subprocess.PIPE, "text": True}
    return [cluster.start(node, command, **more) for node in range(2)]


def end(folder, nodes):
    (folder / "enough").touch()
    return [node.communicate(timeout=60)[1] for node in nodes]


@pytest.mark.dear
@needs_cluster
def test_a_node_whose_core_others_take_is_named_with_them_and_gives_rows_away(tmp_path):
    """Five of them: node 1 stays the slower one where another program takes the other node's core."""
    core = sorted(os.sched_getaffinity(0))[1 % len(os.sched_getaffinity(0))]
    spin, thieves = ["taskset", "-c", str(core), sys.executable, "-c", SPIN], []
    with Cluster(2) as cluster:
        try:
            thieves += [subprocess.Popen(spin, stdout=subprocess.DEVNULL) for _ in range(5)]
            nodes = begin(cluster, tmp_path)
            until(lambda: reported(tmp_path), nodes)
            outputs = end(tmp_path, nodes)
        finally:
            for thief in thieves:
                thief.kill()
                thief.wait()
    text = reported(tmp_path)[0]["text"]
    assert "rank 1 on node1 is slower than its share assumes" in text
    assert "other programs use" in text
    assert any(f"pid {thief.pid}" in text for thief in thieves)
    assert outputs[0].count(text) == 1
    shares = [event for event in read(tmp_path) if event["event"] == "shares"]
    assert any(event["new"][1] < 12 for event in shares)


@pytest.mark.dear
@needs_cluster
def test_a_node_whose_data_comes_late_is_named_with_that(tmp_path):
    with Cluster(2) as cluster:
        nodes = begin(cluster, tmp_path, "1")
        until(lambda: reported(tmp_path), nodes)
        outputs = end(tmp_path, nodes)
    text = reported(tmp_path)[0]["text"]
    assert re.search(
        r"rank 1 on node1 is slower than its share assumes: .*; its data comes late: \d+ % of a step", text
    )
    assert outputs[0].count(text) == 1


@pytest.mark.dear
@needs_cluster
def test_a_network_that_becomes_slow_is_named(tmp_path):
    with Cluster(2) as cluster:
        nodes = begin(cluster, tmp_path)
        until(lambda: sum(event["event"] == "step" for event in events(tmp_path)) > 40, nodes)
        cluster.shape("200kbit")
        until(lambda: reported(tmp_path, None), nodes)
        cluster.shape(None)
        outputs = end(tmp_path, nodes)
    text = reported(tmp_path, None)[0]["text"]
    assert re.search(r"the network is slow: communication takes \S+ s per step, and took \S+ s at best before", text)
    assert outputs[0].count(text) == 1
