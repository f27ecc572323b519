"""Resource usage is measured correctly, costs little CPU time, and never delays training."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from paceline.report import usage
from paceline.report.record import Record, read
from paceline.report.usage import Probe, Usage
from waiting import OwnTime, until

SPIN = "import time\nprint('go', flush=True)\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
TAKEN = 150_000_000
TAKE = f"print('go', flush=True)\ninput()\nblock = bytearray(b'x') * {TAKEN}\nprint('taken', flush=True)\ninput()"


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path)
    yield record
    record.close()


def seen(record):
    begun = (record.folder / "record.jsonl").stat().st_size
    return [event for event in read(record.folder) if event["event"] == "usage"] if begun else []


@pytest.fixture
def busy_child():
    child = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE)
    child.stdout.readline()
    yield child
    child.kill()
    child.communicate()


def test_processor_time_adds_up(record, busy_child):
    """Conservation: the sum of percent times seconds equals the kernel's CPU time of the processes."""
    processes = [psutil.Process(busy_child.pid)]  # beside this one, servers of other tests may come and go

    def spent():
        times = [process.cpu_times() for process in processes]
        return sum(time.user + time.system for time in times)

    before = spent()
    with Usage(record, 0.2, root=busy_child.pid):
        until(lambda: spent() - before > 4.0, 60)  # much, so that the little outside of all probes does not count
    used = spent() - before
    events = [event for event in seen(record) if "processes" in event]
    times = [event["time"] for event in events]
    recorded = sum(e["cpu_percent"] / 100 * (b - a) for a, b, e in zip(times, times[1:], events[1:], strict=False))
    assert recorded == pytest.approx(used, rel=0.2)
    assert all(event["processes"] == len(processes) for event in events)


def test_the_machine_is_seen(record, busy_child):
    with Usage(record, 0.1):
        until(lambda: len(seen(record)) >= 3)
    events = seen(record)
    whole = [event for event in events if "machine_cpu_percent" in event]
    for event in whole:
        assert 0 < event["machine_cpu_percent"] <= 100
        assert len(event["core_percents"]) == psutil.cpu_count()
        assert event["memory_used_bytes"] + event["memory_available_bytes"] == psutil.virtual_memory().total
        assert event["context_switches_per_s"] > 0
        assert event["net_sent_bytes_per_s"] >= 0
    assert whole
    documented = (Path(__file__).parents[2] / "docs" / "record.md").read_text()
    assert [name for name in set().union(*events) if f"`{name}`" not in documented] == []


@pytest.fixture
def taking_child():
    """Takes memory when told. Of this process others share pages, which count as its own when they end."""
    child = subprocess.Popen([sys.executable, "-S", "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    yield child
    child.kill()
    child.communicate()


def test_memory_grows_by_what_is_taken(record, taking_child):
    with Usage(record, 0.05, root=taking_child.pid):
        until(lambda: any("pss_bytes" in event for event in seen(record)))
        taking_child.stdin.write(b"\n")
        taking_child.stdin.flush()
        taking_child.stdout.readline()
        looks = len(seen(record))
        until(lambda: len(seen(record)) > looks + 1)
    rss = [event["rss_bytes"] for event in seen(record) if "rss_bytes" in event]
    assert rss[-1] - rss[0] == pytest.approx(TAKEN, rel=0.1)
    pss = [event["pss_bytes"] for event in seen(record) if "pss_bytes" in event]
    assert len(pss) == 2, "dear, so at the beginning and at the end of so short a run"
    assert pss[-1] - pss[0] == pytest.approx(TAKEN, rel=0.1)


def test_below_half_a_percent_of_a_core(record):
    sampler = Usage(record)
    with sampler:
        while not (record.folder / "record.jsonl").stat().st_size:
            time.sleep(0.01)
        clock = time.pthread_getcpuclockid(sampler._thread.ident)
        before = time.clock_gettime(clock)
        time.sleep(3)
        spent = time.clock_gettime(clock) - before
    assert len(seen(record)) >= 3
    assert spent < 0.005 * 3


def test_what_takes_long_is_done_rarely():
    def burn(since):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return {"looked": True}

    look = Probe(1.0, [burn])
    taken = [now for now in range(100, 200) if look.take(now)]
    assert len(taken) == 100 // (0.02 / usage.MAX_COST) == 5


def test_what_cannot_be_read_is_left_out_and_told_once(record):
    def broken(since):
        raise PermissionError("not here")

    sampler = Usage(record, 0.05)
    sampler._probes[2].instruments.append(broken)
    with sampler:
        time.sleep(0.4)
    hints = [event["text"] for event in read(record.folder) if event["event"] == "hint"]
    assert len(hints) == 1
    assert "broken cannot be read" in hints[0]
    assert len(seen(record)) >= 2


def test_stop_does_not_wait_for_a_machine_that_hangs(record):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(since):
        hangs.set()
        goes_on.wait(60)
        return {}

    sampler = Usage(record, 0.05)
    sampler._probes[1].instruments.append(hang)
    sampler.start()
    assert hangs.wait(20)
    clock = OwnTime()
    sampler.stop()
    assert clock.passed_s() < usage.STOP_S + 1
    goes_on.set()
    sampler._thread.join()


def test_a_run_that_has_ended_is_no_error(record):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with Usage(record, 0.05, root=child.pid):
        time.sleep(0.2)
    assert {event["processes"] for event in seen(record) if "processes" in event} == {0}


def test_a_launcher_s_other_children_count(record, monkeypatch, busy_child):
    """Two processes of a node share a launcher: this one records the usage of the node, not only its own."""
    assert Usage(record)._probes[0].instruments[0].__self__.root == os.getpid()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with Usage(record, 0.1):
        until(lambda: any(event.get("processes", 0) >= 3 for event in seen(record)))


@pytest.mark.dear
def test_a_full_disk_stops_nothing(tmp_path, capfd):
    (tmp_path / "record.jsonl").symlink_to("/dev/full")
    record = Record(tmp_path)
    with Usage(record, 0.02):
        time.sleep(0.2)
    record.close()
    assert capfd.readouterr().err.count("cannot be written (No space left on device)") == 1


def test_an_interval_must_be_one(record):
    with pytest.raises(ValueError, match="interval_s must be more than 0 seconds, got 0"):
        Usage(record, 0)


def test_nothing_is_left_running(record):
    before = threading.active_count()
    with Usage(record, 0.05):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
