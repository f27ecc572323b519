"""Below the minimum of nodes, survivors wait with everything in memory, and continue with the nodes that return."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from test_returned import Samples, batches, check

import ranks
from nodes import OPTIMIZERS, Normed, build, gap, reference
from paceline.checkpoint import checkpoint
from paceline.elastic import below_minimum
from paceline.environment import wait_s
from paceline.launch.signals import HANGUP
from paceline.transport import Control
from relaunching import Run

# all leave in the same round


class Left(Exception):
    pass


class Hall(below_minimum.Waiter):
    """``says``: for each round, the entries of this process's report that differ from the default."""

    def __init__(self, num_nodes, minimum, says):
        self.number, self.minimum, self.says, self.rounds, self.ends = num_nodes, minimum, says, 0, None
        self.copies = 0

    @property
    def num_nodes(self):
        return self.number

    def report(self):
        self.rounds += 1
        nothing = {"guests": 0, "follows": False, "stop": 0, "hung": False, "over": False}
        return nothing | self.says.get(self.rounds, {})

    def copy(self):
        self.copies += 1
        return True

    def admit(self):
        self.number += 1

    def end(self, number):
        self.ends = self.rounds, number
        raise Left


class Words(Control):
    """`all_gather` over a memory link."""

    def __init__(self, link):
        self.link, self.generation = link, link.generation

    def all_gather(self, *words):
        mine = torch.frombuffer(bytearray(words[0]), dtype=torch.uint8)
        return [bytes(part.numpy()) for part in self.link.all_gather(mine).wait()]


def doors(says, minimum=5, size=3, generation=0):
    """The waiters of ``size`` processes, each of which reports ``says`` of its rank."""

    def work(link):
        link.generation = generation
        door = Hall(size, minimum, says.get(link.rank, {}))
        with contextlib.suppress(Left):
            below_minimum.wait(door, Words(link), lambda seconds: None)
        return door

    return ranks.run(size, work)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(("word", "number"), [({"stop": 15}, 15), ({"over": True}, 0)])
def test_all_leave_in_the_round_in_which_they_hear_of_it(rank, word, number):
    found = [door.ends for door in doors({rank: {4: word}, 0: {9: {"over": True}} | ({4: word} if not rank else {})})]
    heard = number or not rank  # that time is over, is the leader's to say
    assert found == [(4, number) if heard else (9, 0)] * 3


def test_one_that_is_cut_off_from_its_launcher_waits_on_where_another_is_not():
    hung = {"hung": True}
    found = doors({0: {2: hung, 5: hung}, 1: {2: hung, 5: hung}, 2: {5: hung}})
    assert [door.ends for door in found] == [(5, HANGUP)] * 3


def test_they_continue_as_soon_as_they_are_enough():
    found = doors({0: {2: {"guests": 1}, 6: {"guests": 1}}})
    assert [(door.rounds, door.number, door.ends) for door in found] == [(6, 5, None)] * 3


def test_who_was_to_be_admitted_by_a_leader_that_is_lost_is_not():
    found = doors({0: {2: {"guests": 7}, 3: {"guests": 8, "follows": True}, 4: {"over": True}}}, generation=7)
    assert [(door.number, door.ends, door.copies) for door in found] == [(4, (4, 0), 1)] * 3


def test_enough_need_not_wait_and_none_are_never_enough():
    assert below_minimum.enough(2, 2)
    assert below_minimum.enough(1, 0)
    assert not below_minimum.enough(1, 2)


def test_for_how_long_is_a_number_of_seconds(monkeypatch):
    monkeypatch.delenv("PACELINE_WAIT", raising=False)
    assert wait_s() == 600.0
    for text, seconds in (("0", 0.0), ("2.5", 2.5)):
        monkeypatch.setenv("PACELINE_WAIT", text)
        assert wait_s() == seconds
    for text in ("-1", "soon", "nan", "inf"):
        monkeypatch.setenv("PACELINE_WAIT", text)
        with pytest.raises(ValueError, match="must be a number of seconds from 0"):
            wait_s()


# nodes that are killed


def normed(found):
    """The same as plain PyTorch on whole batches."""
    source = Samples()
    data = [(source.x[turn], source.y[turn]) for turn in batches()]
    want, losses = reference(build(Normed), data, OPTIMIZERS["momentum"], clip=0.3)
    longest = max((json.loads(path.read_text())["losses"] for path in found.glob("?-?.json")), key=len)
    assert longest == pytest.approx(losses[-len(longest) :], rel=1e-9)
    for path in found.glob("?-?.pt"):
        assert gap(torch.load(path, weights_only=True), want) < 1e-9


def outlive(run, **how):
    said = run.to_the_end()
    done = SimpleNamespace(returncode=max(run.codes.values()), stdout="", stderr=said)
    events = check(run.folder, done, nodes=run.num_nodes, local=run.local, **how)
    assert events[-1]["event"] == "end"
    return said, [event for event in events if event["event"] in ("regroup", "wait", "waited", "redo")]


@pytest.mark.dear
def test_two_of_three_die_in_one_step_and_it_is_computed_again_once_both_are_back(tmp_path):
    """Story: the survivor ended, and the two restarted nodes found no member. One of them was rank 0."""
    run = Run(tmp_path, ["0:2:backward", "2:2:backward", "sync", "clip"], minimum=3)
    said, events = outlive(run, exact=False)
    normed(tmp_path)
    assert (run.started, set(run.codes.values())) == ({0: 2, 1: 1, 2: 2}, {0})
    met = [event["num_nodes"] for event in events if event["event"] == "regroup"]
    assert (min(met), met[-1]) == (1, 3)
    (begin,), (end,) = ([event for event in events if event["event"] == name] for name in ("wait", "waited"))
    assert begin["step"] == end["step"] == 2
    assert len(re.findall(r"\d of at least 3 nodes \(--nodes\) (is|are) left at step 2", said)) == 1
    assert re.search(r"host\d.* may come back within 60 s \(--wait\)", said)
    assert len([event for event in events if event["event"] == "redo"]) <= 3  # one for the forms


@pytest.mark.dear
def test_joining_nodes_of_several_processes_are_waited_for(tmp_path):
    run = Run(tmp_path, ["0:3:backward", "sync", "clip"], num_nodes=2, local=2)
    said, _ = outlive(run, exact=False)
    normed(tmp_path)
    assert run.started == {0: 2, 1: 1}
    assert "host0 may come back" in said


@pytest.mark.dear
@pytest.mark.parametrize("words", [("take",), ("2:7:evaluate",), ("1:5:save", "1:9:backward")], ids=str)
def test_more_are_lost_while_state_is_sent_or_nodes_wait(tmp_path, words):
    run = Run(tmp_path, ["0:2:forward", "2:2:backward", "sync", "clip", *words], minimum=3)
    outlive(run, exact=False)
    normed(tmp_path)


@pytest.mark.dear("15")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (0, 75)])
def test_a_signal_or_the_end_of_the_wait_saves_and_ends(tmp_path, number, code):
    """A checkpoint, and an exit code that asks for the run to be resumed from it."""
    waits, sent = "1 of at least 2 nodes (--nodes) is left at step 3", threading.Event()
    run = Run(tmp_path, ["0:3:forward"], num_nodes=2, wait_s=60.0 if number else 0.5, again=lambda node, code: False)

    def end(run):
        if number and waits in run.said() and not sent.is_set():
            sent.set()
            run.kill(1, number)

    said = run.to_the_end(end)
    assert run.codes == {0: -signal.SIGKILL, 1: code}, said
    assert waits in said
    assert "Traceback" not in said
    assert checkpoint.read_newest(tmp_path).step == 3
    if not number:
        assert "host0 did not come back within 0 s (--wait); saved" in said
        assert "exit code 75: resume the run from its newest checkpoint" in said
