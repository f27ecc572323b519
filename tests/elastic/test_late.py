"""Joining nodes: the leader refuses each with a reason, or admits it; failed ones cost the members little."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from test_survivors import cut

from paceline.data.load_balance import Limits
from paceline.elastic import joiner, reconfigure
from paceline.elastic.fault_tolerant import NUMBERS, FaultTolerantControl
from paceline.elastic.joiner import JoinClient, JoiningLink
from paceline.elastic.reconfigure import MemberAddress, Reconfiguration
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError
from paceline.exchange.flow.control import Control
from paceline.launch import local
from paceline.launch.supervise import node_restarts
from paceline.launch.supervise.local_nodes import Team
from paceline.link import gloo as plain
from paceline.link import memory, tls
from paceline.link.net.store_server import RendezvousStore
from paceline.link.net.ticket import JoinTicket
from paceline.transport import Joiner, Membership, View, pack_frames
from waiting import until

SECRET = b"of this run"


@pytest.fixture
def team(tmp_path):
    """Members on this machine, and a join token for them; closes their sockets at the end."""
    points, made = [], []

    def make(size):
        points[:] = [RendezvousStore("127.0.0.1", 0, SECRET) for _ in range(size)]
        places = [
            MemberAddress(f"{rank}-name", f"host{rank}", "127.0.0.1", point.port) for rank, point in enumerate(points)
        ]
        made[:] = [Reconfiguration(rank, places, 0, points[rank], SECRET) for rank in range(size)]
        ticket = tmp_path / "ticket.json"
        JoinTicket(SECRET.decode(), f"1:{size}", [place.write() for place in places]).write(ticket)
        return made, ticket

    yield make
    for each in ASKING:
        each.late.leave()
        if each.late._store:
            each.late._store.close()
    ASKING.clear()
    for each in made:
        if each.bulk_server:
            each.bulk_server.close()
    for point in points:
        point.close()


ASKING = []


class Asking(threading.Thread):
    """A joining node that sends one request; then ``response`` or ``error``."""

    def __init__(self, ticket, node="", **said):
        super().__init__(daemon=True)
        self.late, self.said, self.response, self.error = JoiningLink(ticket, node), said, None, ""
        ASKING.append(self)
        self.start()

    def run(self):
        try:
            self.response = self.late.request(self.said)
        except LinkError as error:
            self.error = str(error)


def test_a_ticket_is_its_owners_alone_and_says_what_it_is_not(tmp_path):
    path = tmp_path / "new" / "ticket.json"
    path.parent.mkdir()
    ticket = JoinTicket("word", "2:4", ["name 127.0.0.1 80 host"])
    ticket.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert JoinTicket.read(path) == ticket
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    trap = path.with_name(f"{path.name}.{os.getpid()}.part")
    trap.symlink_to(tmp_path / "elsewhere")
    ticket.write(path)
    assert not (tmp_path / "elsewhere").exists()
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no ticket of a run"):
        JoinTicket.read(path)


@pytest.mark.parametrize("hides", [False, True])
def test_to_a_run_that_is_encrypted_one_comes_encrypted_and_to_another_not(tmp_path, hides):
    path, kinds = tmp_path / "ticket.json", {False: plain.Link, True: tls.Link}
    JoinTicket("word", "2:4", ["name 127.0.0.1 80 host"], hides).write(path)
    JoiningLink(path, "", kinds[hides])
    with pytest.raises(ValueError, match="start it as the others"):
        JoiningLink(path, "", kinds[not hides])


def test_a_question_reaches_who_leads_now_and_is_gone_with_who_asked(team):
    """Rank 0 has failed: the members' own list is newer than the join token."""
    members, ticket = team(3)
    members[0].store.close()
    left = [Reconfiguration(rank, members[0].members[1:], 1, members[1 + rank].store, SECRET) for rank in range(2)]
    asking = Asking(ticket, began=3)
    (name, said), *more = until(left[0].waiting).items()
    assert not more
    assert said["began"] == 3
    assert not left[1].waiting()
    left[0].answer(name, {"position": [1, 2, 0]})
    asking.join(20.0)
    assert asking.response["position"] == [1, 2, 0]
    until(lambda: left[0].bulk_server and left[0].bulk_server.channels)
    where = left[0].bulk_server.address, left[0].bulk_server.port
    asking.late.leave()
    # once nobody asks, nobody listens for who does
    until(lambda: not left[0].waiting() and left[0].bulk_server is None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=5.0)


def test_a_node_that_is_here_already_is_refused_by_name(team):
    members, ticket = team(2)
    asking = Asking(ticket, node="1")
    until(lambda: members[0].waiting() or asking.error)
    asking.join(20.0)
    assert "node 1 of this run trains already, as rank 1 on host1" in asking.error


def test_of_two_that_come_as_the_same_node_the_second_is_refused(team):
    members, ticket = team(1)
    first = Asking(ticket, node="4")
    until(members[0].waiting)
    second = Asking(ticket, node="4")
    until(lambda: members[0].waiting() and second.error)
    assert "which waits to be admitted; end that one first" in second.error
    members[0].answer(next(iter(members[0].waiting())), {"over": True})
    first.join(20.0)
    assert first.response["over"]


def test_with_another_secret_or_after_the_end_there_is_nothing_to_come_to(team, monkeypatch):
    monkeypatch.setattr(joiner, "OVER_S", 0.5)
    members, ticket = team(2)
    stranger = JoinTicket("another", "1:2", JoinTicket.read(ticket).members)
    other = ticket.with_name("other.json")
    stranger.write(other)
    for path in (other, ticket):
        if path == ticket:
            for each in members:
                each.store.close()
        asking = Asking(path)
        asking.join(30.0)
        assert "the run has ended" in asking.error
        assert not path.exists()  # nobody tries again


def admit(members, joiners):
    """The result of each member: (generation, ranks, names of joined nodes), or the error text."""
    found = {}

    def one(rank):
        try:
            store, generation, ranks = members[rank].reconfigure(joiners if rank == 0 else ())
            found[rank] = generation, ranks, [guest.name for _, guest in members[rank].joined]
            with contextlib.closing(store):
                if members[rank].joined:
                    store.wait(["never"])  # as they do who wait for the new one
        except LinkError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_who_dies_when_it_is_to_be_taken_in_is_missed_at_once(team):
    members, ticket = team(2)
    asking = Asking(ticket, began=0)
    (name,) = until(members[0].waiting)
    until(lambda: asking.late._store)
    asking.late._store.close()
    begin = time.monotonic()
    found = admit(members, [Joiner(name, "late host", turn=members[0].waiting()[name]["turn"])])
    assert time.monotonic() - begin < 15.0  # and not as long as one waits for a member
    for rank in range(2):
        assert "the joining node late host has failed" in found[rank]
    asking.join(20.0)
    assert asking.response["decided"]["names"] == ["0-name", "1-name"]
    assert asking.response["decided"]["generation"] == 1


def test_who_has_gone_before_they_meet_is_left_out(team):
    members, _ = team(2)
    assert admit(members, [Joiner("2-nobody", "late host")]) == dict.fromkeys(range(2), (1, [0, 1], []))


def test_who_has_asked_again_before_they_meet_is_left_out_and_asked_what_it_wants(team):
    """Its connection broke in between: the state sent so far is lost with it."""
    members, ticket = team(2)
    asking = Asking(ticket, began=0)
    (name,) = until(members[0].waiting)
    before = members[0].waiting()[name]["turn"]
    found = admit(members, [Joiner(name, "late host", turn=before - 1)])
    assert found == dict.fromkeys(range(2), (1, [0, 1], []))
    members[0].answer(name, {"position": [0, 1, 0]})
    asking.join(20.0)
    assert asking.response["position"] == [0, 1, 0]


NODE = """
import json, os, pathlib, sys, time
node, folder = os.environ["GROUP_RANK"], pathlib.Path(sys.argv[1])
lives = folder / f"lives-{node}"
life = int(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text(str(life))
pathlib.Path(os.environ["PACELINE_TICKET_FILE"]).write_text("{}")
joins = os.environ.get("PACELINE_JOIN_TICKET")
late = joins == os.environ["PACELINE_TICKET_FILE"] and os.environ.get("PACELINE_NODE") == node
if late != (life > 1):
    sys.exit(9)
if node == "1" and life <= int(sys.argv[2]):
    sys.exit(7)
end = time.monotonic() + 30
while node == "0" and not (folder / "over").exists() and time.monotonic() < end:
    time.sleep(0.01)
if node == "1":
    (folder / "over").touch()
"""


def start(tmp_path, monkeypatch, lives, node=None):
    monkeypatch.setattr(node_restarts, "RETRY_DELAY_S", 0.02)
    monkeypatch.setenv("PACELINE_NODES", "1:2")
    command = [sys.executable, "-c", NODE, str(tmp_path), str(lives)]
    how = {"node": node, "signals": tuple} if node is not None else {"min_nodes": 1}
    return local.start(command, "sequential", 2, returns=3, **how)


def test_a_node_that_fails_is_started_again_and_comes_late(tmp_path, monkeypatch):
    assert start(tmp_path, monkeypatch, 2) == 0
    assert (tmp_path / "lives-1").read_text() == "3"
    assert (tmp_path / "lives-0").read_text() == "1"


def test_a_node_whose_others_are_elsewhere_comes_back_as_often_and_then_says_how_it_ended(tmp_path, monkeypatch):
    assert start(tmp_path, monkeypatch, 3, node=1) == 0
    assert (tmp_path / "lives-1").read_text() == "4"
    (tmp_path / "lives-1").unlink()
    assert start(tmp_path, monkeypatch, 9, node=1) == 7
    assert (tmp_path / "lives-1").read_text() == "4"


def test_a_node_that_ends_while_the_launcher_looks_is_started_again(tmp_path, monkeypatch):
    """Story: it failed just after it was seen to run, all had ended then, and the launcher ended too."""
    look = Team.states

    def states(team):
        found = look(team)
        for child in team.children:
            child.process.wait(30)
        return found

    monkeypatch.setattr(Team, "states", states)
    assert start(tmp_path, monkeypatch, 3, node=1) == 0
    assert (tmp_path / "lives-1").read_text() == "4"


def test_who_has_lived_in_peace_may_come_back_as_often_again(tmp_path, monkeypatch):
    monkeypatch.setattr(node_restarts, "STABLE_AFTER_S", 0.0)
    assert start(tmp_path, monkeypatch, 5) == 0
    assert (tmp_path / "lives-1").read_text() == "6"


def test_the_ticket_of_a_run_that_was_killed_is_nobodys(tmp_path, monkeypatch):
    """A node that fails before its run has a token does not get the token of an older run."""
    stale = tmp_path / "ticket.json"
    stale.write_text("{}")
    monkeypatch.setenv("PACELINE_TICKET_FILE", str(stale))
    monkeypatch.setenv("PACELINE_NODES", "2:2")
    script = "import os, sys; sys.exit(9 if 'PACELINE_JOIN_TICKET' in os.environ else 7)"
    assert local.start([sys.executable, "-c", script], "sequential", 2, returns=3, min_nodes=2) == 7


def test_a_ticket_says_where_those_are_who_train_now(team, tmp_path, monkeypatch):
    members, _ = team(2)
    path = tmp_path / "now.json"
    monkeypatch.setenv("PACELINE_TICKET_FILE", str(path))
    monkeypatch.setenv("PACELINE_SECRET", SECRET.decode())
    monkeypatch.setenv("PACELINE_NODES", "1:2")
    Reconfiguration(0, members[0].members[1:], 1, members[1].store, SECRET)
    found = JoinTicket.read(path)
    assert (found.secret, found.nodes) == (SECRET.decode(), "1:2")
    assert [MemberAddress.read(each.encode()).name for each in found.members] == ["1-name"]
    assert json.loads(members[1].store.posted("members")[""]) == list(found.members)


@pytest.mark.parametrize("name", ["PACELINE_JOIN_TICKET", "PACELINE_JOIN"])  # as it is called, and as it once was
def test_a_late_node_is_alone_at_first_whatever_the_run_was_when_it_began(monkeypatch, name):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    for each, value in zip(names, ("5", "6", "1", "2", "2", "nowhere", "1"), strict=True):
        monkeypatch.setenv(each, value)
    monkeypatch.setenv(name, "ticket.json")
    world = LaunchEnvironment.of_environment()
    assert (world.local_rank, world.local_size, world.node, world.num_nodes) == (1, 2, 0, 1)
    assert (world.join_ticket, world.min_nodes) == ("ticket.json", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"):
        LaunchEnvironment.of_environment()


# no vote before it holds the state


def test_a_restarted_process_has_no_vote_until_it_holds_the_state_where_a_part_is_cut_off(team, monkeypatch):
    """One of four nodes failed and was started again. It asks rank 0, which is cut off from the other two that hold the
    state: with a vote of the fourth, its part would be as large as theirs, and would continue as well."""
    monkeypatch.setattr(reconfigure, "SUSPECT_AFTER_S", 0.5)
    monkeypatch.setenv("PACELINE_WAIT", "1")
    members, ticket = team(3)
    asking = Asking(ticket, node="3", began=0)
    (name,) = until(members[0].waiting)
    cut(members, [[0], [1, 2]])
    who = Joiner(name, "host3", turn=members[0].waiting()[name]["turn"])
    found = admit(members, [who])
    assert "the larger part of a run continues" in found[0]
    assert found[1] == found[2] == (1, [1, 2], [])
    assert asking.response is None
    assert not asking.error


def test_a_restarted_process_does_not_continue_alone_when_all_that_held_the_state_have_ended(team, monkeypatch):
    monkeypatch.setattr(joiner, "OVER_S", 0.5)
    members, ticket = team(2)
    asking = Asking(ticket, node="2", began=0)
    until(members[0].waiting)
    for each in members:
        each.store.close()
    asking.join(30.0)
    assert asking.response is None
    assert "no member of the run answers any more; the run has ended" in asking.error


class Handover(Membership):
    """A node that is admitted beside two others; a second rendezvous would be a vote."""

    def __init__(self, others):
        self.link, self.others, self.asked = memory.world(1)[0], others, 0

    def reconfigure(self, admits=()):
        self.asked += 1
        assert self.asked == 1, "it takes part in who continues, and holds no state"
        links = memory.world(3)
        self.link = links[2]
        self.others(links)
        return View(self.link, (0, 1), (Joiner("2-again", "host2"),))


@pytest.mark.parametrize("heard", [0, 1])
def test_a_restarted_process_has_no_vote_while_it_is_handed_the_state(heard):
    """It is a member already when the nodes that hold the state end: before they compare operation numbers, or before
    their last message."""

    def end(links):
        for link in links[:2]:
            if heard:
                link.all_gather(torch.frombuffer(bytearray(pack_frames([NUMBERS.pack(7, 1), b""])), dtype=torch.uint8))
            link.close()

    class Given:
        def take(self):
            raise LinkError("rank 0 is lost")

        def request(self, *_):
            return {"position": [0, 0, 0]}

    members = Handover(end)
    control = FaultTolerantControl(Control(members), [])
    run = SimpleNamespace(
        control=control,
        engine=None,
        world=SimpleNamespace(local_size=1),
        limits=Limits((1, 1), (8, 8)),
        cursor=SimpleNamespace(began=0, facts={}),
    )
    coming = JoinClient(run, Given(), {}, lambda: None)
    with pytest.raises(LinkError, match="rank 0 is lost" if heard else "has left"):
        coming.enter(1)
    assert members.asked == 1
