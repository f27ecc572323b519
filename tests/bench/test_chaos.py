"""Faults on real nodes: they have their effect and are taken back, a training outlives them, and the laws can fail."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from cluster import Cluster
from disks import tmpfs
from machines import needs_cluster, needs_machines
from paceline_bench.chaos import campaign, faults, summary, training
from paceline_bench.chaos.__main__ import chosen, main
from paceline_bench.chaos.fault_run import MIN_NODES, Outcome
from paceline_bench.chaos.faults import CLASSES, ENDING, LOSING, Fault, strike
from paceline_bench.chaos.invariants import breaches
from paceline_bench.chaos.journal import Journal, Life, read
from paceline_bench.chaos.ways import ALLREDUCE, WAYS

pytestmark = pytest.mark.long

CLONE_NEWNET = 0x40000000
CABLES = {faults.CABLE: (1,), faults.ONE_WAY: (1,), faults.PAIR: (1, 0), faults.PARTITION: (1,)}
STEPS = 4
LOSSES, WEIGHTS = training.undisturbed(STEPS)


# the laws


def tell(folder, node, step, rows, generation=0, applies=True, loss=0.0, mark=1, launch=1):
    journal = Journal(folder, launch, f"node{node}", 0)
    journal.generation = generation
    journal.note(tried=step, rows=list(rows))
    if applies:
        journal.note(applied=step, loss=LOSSES[step] + loss, mark=mark, nodes=2)


def judged(folder, steps=STEPS, way=ALLREDUCE):
    lives: dict[str, Life] = {}
    read(folder, lives)
    return breaches(list(lives.values()), folder, steps, way=WAYS[way])


def told(folder, but=()):
    """Two nodes that train as they should, except in the steps of ``but``."""
    for step in range(STEPS):
        if step not in but:
            whole = training.rows(step)
            tell(folder, 0, step, whole[:10])
            tell(folder, 1, step, whole[10:])
    for node in range(2):
        torch.save(WEIGHTS, folder / f"1.node{node}.0.pt")


def test_a_training_as_it_should_be_breaks_no_law(tmp_path):
    told(tmp_path)
    assert judged(tmp_path) == []


def test_a_step_that_a_dead_node_took_part_in_is_whole_and_one_that_was_made_again_is_without_it(tmp_path):
    told(tmp_path, but=(1, 2))
    for step, generation in ((1, 0), (2, 0)):
        tell(tmp_path, 0, step, training.rows(step)[:10], generation, applies=step == 1)
        tell(tmp_path, 1, step, training.rows(step)[10:], generation, applies=False)
    tell(tmp_path, 0, 2, training.rows(2), 1)
    assert judged(tmp_path) == []


ROWS = training.rows(2)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([{"rows": ROWS}, {"rows": ROWS[3:4]}], f"rows \\[{ROWS[3]}\\] too often, \\[\\] too seldom"),
        ([{"rows": ROWS[1:]}], f"rows \\[\\] too often, \\[{ROWS[0]}\\] too seldom"),
        ([{"rows": ROWS}, {"rows": ROWS, "generation": 1}], r"applied in generations \['0', '1'\]"),
        ([{"rows": ROWS[:10]}, {"rows": ROWS[10:], "mark": 2}], "2 different weights on 2 processes"),
        ([{"rows": ROWS, "loss": 1e-7}], "loss .* at step 2, undisturbed"),
        ([{"rows": ROWS, "applies": False}], "steps 2 to 2 were never applied"),
    ],
)
def test_each_law_can_be_broken(tmp_path, parts, says):
    told(tmp_path, but=(2,))
    for node, part in enumerate(parts):
        tell(tmp_path, node, 2, **part)
    ((launch, step, what),) = judged(tmp_path)
    assert (launch, step) == (1, 2)
    assert re.search(says, what), what


DROPPED = training.undisturbed(1, norm=WAYS["diloco"].norm)[0][0]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([{"rows": ROWS[1:]}, {"rows": []}], None),
        ([{"rows": ROWS, "mark": 0}, {"rows": [], "mark": 5}], None),
        ([{"rows": ROWS}, {"rows": ROWS[3:4]}], f"rows \\[{ROWS[3]}\\] too often"),
        ([{"rows": ROWS}, {"rows": [], "mark": 2}], "2 different weights on 2 processes"),
        ([{"rows": ROWS, "loss": math.nan}], "loss nan at step 2"),
        ([{"rows": ROWS, "applies": False}], "steps 2 to 2 were never applied"),
    ],
)
def test_where_work_may_be_dropped_the_other_laws_hold(tmp_path, parts, says):
    for step in (0, 1, 3):
        tell(tmp_path, 0, step, training.rows(step), loss=3 * DROPPED / (1 + step) - LOSSES[step])
    torch.save({"weight": torch.ones(2)}, tmp_path / "1.node0.0.pt")
    for node, part in enumerate(parts):
        tell(tmp_path, node, 2, **part)
    found = [what for *_, what in judged(tmp_path, way="diloco")]
    assert bool(found) == bool(says), found
    assert re.search(says or "", "".join(found)), found


def test_where_work_may_be_dropped_training_must_have_come_further(tmp_path):
    for step in range(STEPS):
        tell(tmp_path, 0, step, training.rows(step), loss=DROPPED - LOSSES[step])
    torch.save({"weight": torch.ones(2)}, tmp_path / "1.node0.0.pt")
    ((_, step, what),) = judged(tmp_path, way="diloco")
    assert step == STEPS
    assert "the loss of the last epoch is" in what


def test_other_weights_in_the_end_are_told(tmp_path):
    told(tmp_path)
    other = {name: value * (1 + 1e-8) if value.is_floating_point() else value for name, value in WEIGHTS.items()}
    torch.save(other, tmp_path / "1.node1.0.pt")
    words = [what for *_, what in judged(tmp_path)]
    assert words[0] == "1.node1.0 ended with other weights than 1.node0.0"
    assert "1.node1.0 ended 1.0e-08 from the undisturbed weights" in words


def test_weights_of_an_earlier_start_may_differ_in_their_last_bits(tmp_path):
    """Story: nodes that were killed between the last step and their exit were resumed, on another number of nodes."""
    told(tmp_path)
    for nodes, start in ((1, 1), (2, 2)):
        for node in range(nodes):
            factor = 1 + 1e-12 * start
            state = {name: value * factor if value.is_floating_point() else value for name, value in WEIGHTS.items()}
            torch.save(state, tmp_path / f"{start + 1}.node{node}.0.pt")
    assert judged(tmp_path) == []
    torch.save(WEIGHTS, tmp_path / "3.node1.0.pt")
    assert [what for *_, what in judged(tmp_path)] == ["3.node1.0 ended with other weights than 3.node0.0"]


def test_a_breach_is_the_last_fault_before_it():
    some = [Outcome(1, launch, Fault(CLASSES[0], (1,)), 4, step, 0.0) for launch, step in ((1, 10), (1, 50), (2, 20))]
    campaign.blame(some, [(1, 30, "a"), (2, 20, "b"), (1, 3, "c")], lambda words: None)
    assert [one.wrong for one in some] == [["a"], [], ["b", "c"]]
    with pytest.raises(ValueError, match="nothing had struck"):
        campaign.blame([], [(1, 3, "c")], lambda words: None)


# the faults


def test_faults_are_of_those_who_take_part():
    for seed in range(300):
        dice = Random(seed)
        kind = dice.choice(CLASSES)
        fault = Fault.of(dice, kind, [1, 2, 3], 1)
        assert set(fault.victims) <= {1, 2, 3}
        assert (1 in fault.victims) or kind != faults.KILL_0
        assert (1 not in fault.victims) or kind != faults.KILL
        assert len(fault.victims) < MIN_NODES + (kind == faults.PAIR) or kind not in LOSING
        assert (fault.lasts_s > 0) == (kind in faults.LASTS)


def inside(cluster, node, work):
    """What ``work`` gives, on a node: a socket stays where it was made."""
    found = []

    def run():
        with open(f"/run/netns/{cluster.name(node)}") as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET) == 0
        found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    return found[0]


class Line:
    """From node 0 to node 1: connections, and what is sent over them."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.server = inside(cluster, 1, lambda: socket.create_server((cluster.address(1), 4000)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.close()

    def up(self, limit_s=0.4):
        def call():
            try:
                with socket.create_connection((self.cluster.address(1), 4000), limit_s):
                    return True
            except OSError:
                return False

        return inside(self.cluster, 0, call)

    def sends(self, count):
        """Seconds for so many bytes, and an answer."""
        address = self.cluster.address(1)
        caller = inside(self.cluster, 0, lambda: socket.create_connection((address, 4000), 5))
        with caller, self.server.accept()[0] as taker:
            begin = time.monotonic()
            threading.Thread(target=caller.sendall, args=(bytes(count),)).start()
            while count:
                count -= len(taker.recv(1 << 16))
            return time.monotonic() - begin

    def comes_back(self):
        end = time.monotonic() + 20
        while not self.up():
            assert time.monotonic() < end
        while self.server.getblocking() and self._drain():
            pass
        return True

    def _drain(self):
        """Takes the connections that were only tried."""
        self.server.settimeout(0.0)
        try:
            self.server.accept()[0].close()
        except BlockingIOError:
            return False
        finally:
            self.server.settimeout(None)
        return True


@needs_cluster
def test_what_strikes_a_cable_is_felt_and_taken_back(tmp_path):
    with Cluster(2) as cluster, Line(cluster) as line:
        scene = SimpleNamespace(cluster=cluster, disk=tmp_path)
        for kind, victims in CABLES.items():
            assert line.comes_back()
            undo = strike(Fault(kind, victims), scene)
            assert not line.up(), kind
            undo()
        assert line.comes_back()
        undo = strike(Fault(faults.SLOW, (1,)), scene)
        assert line.sends(100_000) > 0.4
        undo()
        assert line.up(5.0)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(wanted, pid):
    end = time.monotonic() + 10
    while state(pid) not in wanted:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_node_is_stopped_continued_and_killed():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        scene = SimpleNamespace(pids=lambda node: [process.pid] if node == 1 else [])
        undo = strike(Fault(faults.STOP, (0, 1)), scene)
        wait_for("T", process.pid)
        undo()
        wait_for("SR", process.pid)
        strike(Fault(faults.KILL, (1,)), scene)()
        assert process.wait(10) == -signal.SIGKILL
        strike(Fault(faults.KILL, (1,)), scene)  # it has gone, and nobody else has its number


def test_a_disk_is_filled_and_freed(tmp_path):
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        undo = strike(Fault(faults.DISK, ()), SimpleNamespace(disk=disk))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (disk / "more").write_bytes(bytes(8192))
        undo()
        (disk / "more").write_bytes(bytes(8192))


# trainings


def played(*planned, nodes=3, epochs=20, ways=(ALLREDUCE,)):
    said: list[str] = []
    outcomes, _ = campaign.suffer(len(planned), 3, (), nodes, epochs, said.append, planned, ways)
    assert summary.failed(outcomes) == [], "\n".join(said)
    for one in outcomes:
        assert one.way in ways
        assert one.engine in WAYS[one.way].engines
    return outcomes


# one after the other: a training for each would mostly start processes
IN_TURN = [
    (
        Fault(faults.SLOW, (1,), 4.0),
        Fault(faults.DISK, (), 3.0),
        Fault(faults.CABLE, (1,), 2.0),
        Fault(faults.STOP, (0,), 13.0),
        Fault(faults.KILL, (3,)),
    ),
    (
        Fault(faults.PAIR, (1, 2), 2.0),
        Fault(faults.ONE_WAY, (2,), 13.0),
        Fault(faults.LAUNCHER_KILLED, ()),
        Fault(faults.KILL_0, (0,)),
        Fault(faults.ALL, (1, 2, 3)),
    ),
]


@pytest.mark.dear
@needs_machines
@pytest.mark.parametrize("in_turn", IN_TURN, ids=["first", "second"])
def test_every_class_of_fault_is_outlived(in_turn):
    """Over ssh, as users start it: a step is lost at most."""
    outcomes = played(*in_turn, nodes=4, epochs=45)
    assert [one.fault for one in outcomes] == list(in_turn)
    for one in outcomes:
        assert one.lost <= 1 or one.fault.kind in ENDING, one
        if one.fault.kind in (faults.STOP, faults.KILL, faults.KILL_0):
            assert not set(one.fault.victims) & set(one.left), one


def test_no_class_of_fault_is_forgotten():
    """A partition has a training of its own below."""
    assert {fault.kind for each in IN_TURN for fault in each} | {faults.PARTITION} == set(CLASSES)


@pytest.mark.dear
@needs_machines
@pytest.mark.parametrize("way", ["server", "diloco"])
def test_every_way_outlives_a_killed_node(way):
    """What it held is held elsewhere, or it is dropped."""
    (one,) = played(Fault(faults.KILL, (2,)), nodes=4, epochs=6, ways=[way])
    assert one.left == (0, 1, 3)


@pytest.mark.dear
@needs_machines
def test_of_two_halves_that_with_rank_0_goes_on():
    (one,) = played(Fault(faults.PARTITION, (1, 2), 13.0), nodes=4)
    assert one.left == (0, 3)


# what is said


def test_a_table_has_a_line_for_each_class():
    one = Outcome(1, 1, Fault(faults.KILL, (1,)), 4, 10, 0.0, recovery_s=0.5, lost=1)
    other = dataclasses.replace(one, recovery_s=20.0, hung="20.0 s without a step", wrong=["a", "b"])
    end = dataclasses.replace(one, fault=Fault(faults.ALL, (0, 1)), recovery_s=9.0, lost=12)
    lines = summary.table([one, other, end]).splitlines()[2:]
    assert lines == [
        "| SIGKILL of a node | 2 | 0.50 | 20.00 | 1, 1 | 1 | 1 | 0 |",
        "| SIGKILL of all nodes | 1 | 9.00 | 9.00 | 12, 12 | 0 | 0 | 0 |",
        "| all that a run outlives | 2 | 0.50 | 20.00 | 1, 1 | 1 | 1 | 0 |",
        "| all | 3 | 9.00 | 20.00 | 1, 12 | 1 | 1 | 0 |",
    ]


def test_a_table_of_several_exchanges_has_a_line_for_each():
    one = Outcome(1, 1, Fault(faults.KILL, (1,)), 4, 10, 0.0, "server", "threads:1", recovery_s=0.5)
    lines = summary.table([one, one, dataclasses.replace(one, way="diloco", recovery_s=9.0)]).splitlines()
    assert lines[-2:] == [
        "| with diloco | 1 | 9.00 | 9.00 | 0, 0 | 0 | 0 | 0 |",
        "| with server | 2 | 0.50 | 0.50 | 0, 0 | 0 | 0 | 0 |",
    ]
    assert "4 nodes, server threads:1: SIGKILL" in str(one)


def test_classes_are_named_by_how_they_begin():
    assert chosen("SIGSTOP,cable") == [faults.STOP, faults.CABLE]
    assert chosen(None) == list(CLASSES)
    assert main(["--only", "meteorite"]) == 2


@pytest.mark.parametrize(("part", "found"), [(0.5, 2.0), (0.99, 3.0), (1.0, 3.0), (0.01, 1.0)])
def test_quantiles_are_of_what_was_seen(part, found):
    assert summary.quantile([3.0, 1.0, 2.0], part) == found
