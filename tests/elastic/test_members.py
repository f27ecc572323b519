"""Membership: one process for each rank, of the same package, that answers, and that all others reach."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path

import pytest
import torch

import paceline
import ranks
from nodes import OPTIMIZERS, build
from paceline import transport
from paceline.checkpoint.run_folder import RunFolder
from paceline.codec import none
from paceline.data.load_balance import Limits
from paceline.data.sampler import Assignment
from paceline.elastic import consistency, reconfigure, view_change
from paceline.elastic.membership import Members, alone, connect
from paceline.elastic.quorum import ALIVE, UNREACHABLE
from paceline.elastic.reconfigure import MemberAddress, Reconfiguration
from paceline.engine.sequential import Engine
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError
from paceline.exchange.allreduce import Exchange
from paceline.job import Job
from paceline.launch.local import free_port
from paceline.link.net import rendezvous, route
from paceline.link.net.rendezvous import Unreached
from paceline.link.net.store_server import RendezvousStore
from paceline.registry import parse
from paceline.report.activity import Activity
from paceline.step.run_state import RunState
from paceline.transport import Control, Membership, ViewChange
from partly import partly

SECRET = b"of this run"


def together(*works):
    """The result of each, or the LinkError that it raises; all run at the same time."""
    found = [None] * len(works)

    def one(i):
        try:
            found[i] = works[i]()
        except LinkError as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


# one process for each rank


def test_a_second_process_of_the_same_rank_is_refused_and_the_first_trains():
    port = free_port()
    meetings = together(*(lambda rank=rank: rendezvous.join(rank, 2, "127.0.0.1", port)[0] for rank in (0, 1, 1)))
    (refused,) = [each for each in meetings if isinstance(each, LinkError)]
    assert "another process has already come to the meeting point" in str(refused)
    assert "as rank 1; give each its own RANK" in str(refused)
    assert sorted(each.rank for each in meetings if each is not refused) == [0, 1]
    for each in meetings:
        if each is not refused:
            each.close()


# of the same package


def test_a_node_with_other_files_of_the_package_is_refused_by_name(monkeypatch):
    here = threading.local()
    monkeypatch.setattr(consistency, "code", lambda: f"files of {here.rank}")

    def work(link):
        here.rank = link.rank
        model = build()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        mine, engine = Job(model, optimizer, lambda output, target: output.sum(), 8), Engine()
        engine.open(mine.model, mine.optimizer, mine.loss)
        consistency.compare(link, mine, engine, Exchange(), parse("codec", "none"))

    with pytest.raises(
        ValueError, match=r"different files of paceline: rank \d on thread-\d has .* \d, other than rank"
    ):
        ranks.run(2, work)


def test_any_byte_of_any_file_makes_another_package(tmp_path, monkeypatch):
    home = Path(paceline.__file__).parent
    shutil.copytree(home, tmp_path / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    before = consistency.code()
    monkeypatch.setattr(consistency, "__file__", str(tmp_path / "paceline" / "elastic" / "consistency.py"))
    assert consistency.code.__wrapped__() == before
    with (tmp_path / "paceline" / "elastic" / "failure_detector.py").open("a") as file:
        file.write("\n")
    assert consistency.code.__wrapped__() != before


# that answers


@pytest.fixture
def mute():
    """An address where the kernel answers and the process does not, as for a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield MemberAddress("mute", "host2", "127.0.0.1", server.getsockname()[1])


def test_who_does_not_greet_is_silent(mute, monkeypatch):
    monkeypatch.setattr(reconfigure, "CONNECT_S", 0.3)
    point = RendezvousStore("127.0.0.1", 0, SECRET)
    assert MemberAddress("one", "host0", "127.0.0.1", point.port).probe() == ALIVE
    point.close()
    assert mute.probe() == UNREACHABLE


@pytest.mark.dear
def test_a_stopped_member_is_left_behind(mute, monkeypatch):
    """Story: its kernel answered, so the others waited for it, for five minutes."""
    monkeypatch.setattr(reconfigure, "CONNECT_S", 0.3)
    monkeypatch.setattr(reconfigure, "SUSPECT_AFTER_S", 0.6)
    monkeypatch.setattr(reconfigure, "TRY_S", 0.6)
    points = [RendezvousStore("127.0.0.1", 0, SECRET) for _ in range(2)]
    places = [MemberAddress(f"name{i}", f"host{i}", "127.0.0.1", point.port) for i, point in enumerate(points)]
    members = [Reconfiguration(i, [*places, mute], 0, point, SECRET) for i, point in enumerate(points)]
    met = together(*(member.reconfigure for member in members))
    assert [(generation, who) for _, generation, who in met] == [(1, [0, 1])] * 2
    for meeting, *_ in met:
        meeting.close()
    for point in points:
        point.close()


def test_who_has_stood_still_does_not_take_the_others_for_killed():
    """They may have continued without it, and ended: then the run would have two results."""
    point, gone = (RendezvousStore("127.0.0.1", 0, SECRET) for _ in range(2))
    places = [MemberAddress(f"name{i}", f"host{i}", "127.0.0.1", each.port) for i, each in enumerate((gone, point))]
    member, other = (Reconfiguration(1, places, 0, point, SECRET) for _ in range(2))
    gone.close()
    with pytest.raises(LinkError, match=r"rank 0 on host0 may have continued without this process") as raised:
        member.reconfigure(still_s=34.0)
    assert raised.value.resumes
    meeting, _, ranks = other.reconfigure()
    assert ranks == [1]
    meeting.close()
    point.close()


# that all others reach


@pytest.mark.dear
def test_of_two_that_do_not_reach_each_other_any_more_the_later_one_leaves(monkeypatch):
    """Story: all repeated the rendezvous, found each time that two of them could not train together, and all ended."""
    port = free_port()

    def begin(rank):
        members = connect("torch", rank, 3, "127.0.0.1", port)
        members.stand_by()
        return members

    all_members = together(*(lambda rank=rank: begin(rank) for rank in range(3)))
    complaint = route.complaint

    def cut(me, members, *more):
        if len(members) == 3 and me.rank:
            return f"{me} does not reach {members[3 - me.rank]}"
        return complaint(me, members, *more)

    monkeypatch.setattr(route, "complaint", cut)

    def again(members):
        try:
            return members.reconfigure()
        except LinkError:
            members.join_desk.store.close()  # as at the end of its process
            raise

    first, second, third = together(*(lambda members=members: again(members) for members in all_members))
    assert isinstance(third, Unreached)
    assert "does not reach" in str(third)
    assert [(view.link.rank, view.link.size, view.previous) for view in (first, second)] == [
        (0, 2, (0, 1)),
        (1, 2, (0, 1)),
    ]
    together(first.link.close, second.link.close)


def test_a_link_that_ends_with_the_first_loss_says_so_before_training():
    class Other(partly(transport.Link)):
        size = 2

    with pytest.raises(ValueError, match="does not survive the failure of a node"):
        Members(Other(), Activity()).stand_by(1)
    alone().stand_by(1)  # without others nothing can be lost


def run_of(world, assignment, **options):
    """The part of a training that knows its members."""
    model = build()
    job = Job(model, torch.optim.SGD(model.parameters(), 0.1), None, **options)
    return RunState(job, world, Engine(), Exchange(), Control(), none.Codec(), Membership(), assignment)


def test_where_the_last_node_of_several_processes_has_left_all_know_that_none_is_divided():
    """A node that joins later has known no other size."""
    assignment, limits = Assignment(0, 2), Limits((1, 1), (8, 8))
    run = run_of(LaunchEnvironment(0, 1, 0, 3, local_sizes=(1, 1, 2)), assignment, batch_size=8)
    view_change.set_assignment(run, assignment, limits, (1, 1))
    assert run.world.sizes == (1, 1)
    view_change.set_assignment(run, assignment, limits, (1, 2))
    assert run.world.sizes == (1, 2)


# who is left, computes more


@pytest.mark.parametrize(("batch_norm", "times"), [("local", 2), ("sync", 1)])
def test_more_rows_than_a_node_takes_are_divided_or_where_they_are_normalised_together_told(batch_norm, times, capsys):
    """Story: of two nodes with unlike limits, one made two rounds of sums, and the other waited for half an hour."""
    run = run_of(LaunchEnvironment(num_nodes=3), Assignment(0, 3), batch_size=96, batch_norm=batch_norm)
    view_change.set_assignment(run, Assignment(0, 2), Limits((1, 1), (40, 50)), (1, 1))
    assert run.engine.accumulate == times
    run.leader, run.num_steps = True, 7
    handler = view_change.ViewChangeHandler(run, RunFolder(None, run.record))
    handler.announce(
        ViewChange(previous_ranks=(0, 1), lost=("three",), generation=1, why="silent", seconds=1.0, rows=(48, 48))
    )
    said = capsys.readouterr().err
    assert "three failed at step 7" in said
    told = "node 0 computes 48 rows at once, and its most_rows is 40: batch_norm='sync' divides no batch" in said
    assert told == (batch_norm == "sync")
    assert "node 1" not in said
