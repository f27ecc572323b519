"""Activity: what the training thread reported last; how long it may wait follows its own step times."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from paceline.elastic import failure_detector
from paceline.report import activity
from paceline.report.activity import BACK_S, BETWEEN_S, MAX_S, MIN_S, OUTSIDE, UNKNOWN_S, Activity


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_the_innermost_counts_and_afterwards_the_one_around_it():
    mine = Activity()
    assert (mine.status()["doing"], mine.since()) == (OUTSIDE, None)
    with mine.at("computing"):
        with mine.at("agreeing", waits=True):
            told = mine.status()
            assert (told["doing"], told["waits"]) == ("agreeing", True)
            assert 0 <= time.monotonic() - mine.since() < 5
        assert (mine.status()["doing"], mine.status()["waits"], mine.since()) == ("computing", False, None)
    assert mine.status()["doing"] == OUTSIDE


def test_other_threads_only_add_what_is_on_the_wire():
    mine = Activity()
    mine.begin(7)

    def other():
        with mine.at("something of its own"), mine.waiting("sum of bucket 3 (4.0 MB)"):
            assert mine.status()["doing"] == "agreeing: sum of bucket 3 (4.0 MB)"

    with mine.at("agreeing", waits=True):
        in_thread(other)
    assert (mine.status()["step"], mine.status()["doing"]) == (7, OUTSIDE)


@pytest.mark.parametrize(
    ("steps", "limit_s"), [((), UNKNOWN_S), ([0.1] * 9, MIN_S), ([2.0] * 80, 20.0), ([9.0] * 30, MAX_S)]
)
def test_a_wait_may_last_as_long_as_ten_steps(steps, limit_s):
    mine = Activity()
    for number, seconds in enumerate(steps):
        mine.begin(number)
        mine.end(seconds, 0.0)
    assert mine.limit_s == pytest.approx(max(limit_s, BETWEEN_S))
    mine.begin(len(steps))
    assert mine.limit_s == pytest.approx(limit_s)


def test_between_steps_who_may_come_back_is_waited_for_less():
    mine = Activity()
    mine.begin(0)
    mine.end(0.1, 0.0)
    assert mine.limit_s == BETWEEN_S
    mine.between_s = BACK_S
    assert mine.limit_s == BACK_S
    mine.begin(1)
    assert mine.limit_s == MIN_S


def test_one_slow_step_of_many_changes_nothing_and_old_ones_are_forgotten():
    mine = Activity()
    for seconds in (*[5.0] * 70, *[0.1] * 70, 5.0):
        mine.begin(0)
        mine.end(seconds, 0.0)
    mine.begin(0)
    assert mine.limit_s == MIN_S


def test_the_stack_is_that_of_the_thread_that_trains():
    mine, asked, told = Activity(), threading.Event(), []

    def asleep():
        mine.begin(0)
        asked.set()
        time.sleep(1.0)

    def ask():
        assert asked.wait(10)
        told.append(mine.stack())

    trains = threading.Thread(target=asleep)
    trains.start()
    in_thread(ask)
    trains.join(10)
    assert "in asleep" in told[0]
    assert "time.sleep(1.0)" in told[0]


COLLECTED = """
import gc, threading
from paceline.report.activity import Activity

class Holder:
    pass

mine, over = Activity(), threading.Event()
mine.begin(0)
for _ in range(20):
    threading.Thread(target=over.wait, daemon=True).start()
gc.set_threshold(1, 1, 1)
for _ in range(200):
    gc.disable()
    for _ in range(5):
        one = Holder()
        one.itself, one.own = one, threading.local()
        one.own.x = 1
    gc.enable()
    assert "<module>" in mine.stack()
print(gc.isenabled())
gc.disable()
mine.stack()
print(gc.isenabled())
"""


def test_asking_for_a_stack_while_garbage_is_collected_stops_nobody():
    """Story: Python 3.11 waits for its own lock where a threading.local is collected in sys._current_frames()."""
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]


FORKED = """
import gc, os, sys, threading, time
from paceline.data import collection
from paceline.report import activity

looking = threading.Event()

def slowly():
    looking.set()
    time.sleep(0.5)
    return {}

sys._current_frames = slowly
thread = threading.Thread(target=activity.Activity().stack)
thread.start()
looking.wait()
child = os.fork()
if not child:
    os._exit(10 * gc.isenabled() + collection._lock.acquire(timeout=1.0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_meanwhile_collects_its_garbage():
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["11"]


def test_it_costs_next_to_nothing():
    """A step reports its activity about ten times; a hundred times cost less than a millisecond."""
    mine = Activity()
    best_s = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(100):
            with mine.at("computing"):
                pass
        best_s = min(best_s, time.perf_counter() - start)
    assert best_s < 1e-3


def told(doing, waits, silent_s=0.0, step=4):
    return {
        "host": f"host of {doing}",
        "step": step,
        "doing": doing,
        "for_s": 6.0,
        "waits": waits,
        "step_s": 0.1,
        "silent_s": silent_s,
    }


def test_who_is_missing_is_who_does_not_wait_or_does_not_answer():
    everyone = {0: told("agreeing", True), 1: told("computing", False), 2: told("agreeing", True, silent_s=4.0)}
    assert activity.absent_ranks(everyone, 0) == [1, 2]
    line = activity.line(everyone, 0, 3, [1, 2])
    assert "rank 0 of 3 on host of agreeing at step 4 has waited 6 s for others in agreeing; not there: rank 1" in line
    assert "computing, for 6.0 s; a step took 0.1 s" in line
    assert "rank 2 on host of agreeing, silent for 4 s" in line
    stacks = activity.stacks(everyone, [1, 2], {1: '  File "a.py", line 1, in asleep\n'})
    assert stacks[1:2] == ['  File "a.py", line 1, in asleep']
    assert stacks[-1].endswith(activity.UNANSWERED)


def test_where_all_wait_the_network_is_to_blame():
    everyone = {rank: told("agreeing", True) for rank in range(3)}
    assert activity.absent_ranks(everyone, 1) == []
    assert "check the network between them: rank 0" in activity.line(everyone, 1, 3, [])


def test_where_all_wait_in_different_places_the_script_may_be_to_blame():
    """One node saves at another step than the others, as it counts steps itself."""
    everyone = {0: told("agreeing", True, step=5), 1: told("saving", True), 2: told("saving", True)}
    line = activity.line(everyone, 1, 3, [])
    assert "the network between them, and" in line
    assert "the same calls in every process" in line


def test_who_has_stood_still_is_in_doubt_of_the_others_until_a_step_that_began_afterwards_has_ended():
    """Messages that they sent before may complete the step in which it resumed."""
    where = Activity()
    where.begin(7)
    assert where.suspended_s == 0.0
    where.note_suspension(34.0)
    assert where.suspended_s == 34.0
    for step, doubt_s in ((8, 34.0), (9, 0.0), (10, 0.0)):
        where.begin(step)
        assert where.suspended_s == doubt_s


def test_notices_go_to_the_screen_in_one_piece(capsys):
    Activity().notice("one\ntwo")
    assert capsys.readouterr().err == "paceline: one\ntwo\n"


@pytest.mark.parametrize("arrived", [False, True], ids=["its machine is silent", "its machine answers"])
def test_who_gives_a_silent_machine_up_may_be_the_one_that_is_cut_off(monkeypatch, arrived):
    """So it does not take the others for killed if they have ended before the rendezvous."""
    mine = object.__new__(failure_detector.Heartbeat)
    mine.rank, mine.activity, mine.dead, mine.left = 0, Activity(), {}, set()
    mine._peers = {1: SimpleNamespace(arrived=arrived)}
    mine._received_s = {1: time.monotonic() - 100.0}
    mine._changed = threading.Condition()
    monkeypatch.setattr(mine._peers[1], "send", lambda *words: None, raising=False)
    assert mine._declare_silent() == [1]
    assert ("stalled" in mine.dead[1]) == arrived
    assert (mine.activity.suspended_s > 90.0) == (not arrived)
