"""Who comes late: asks whoever leads, is refused by name, or meets all others; strangers and the dead cost little."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
import time

import pytest
import torch

import paceline
from paceline import compare, handover, members
from paceline.contract import Guest, LinkError
from paceline.launch import again, local
from paceline.link import bulk, late, tls
from paceline.link import torch as plain
from paceline.link.bulk import MAX_STRANGERS, Hatch, reach
from paceline.link.late import Late
from paceline.link.meeting_point import MeetingPoint
from paceline.link.proof import Hiding
from paceline.link.survivors import Place, Survivors
from paceline.link.ticket import Ticket
from paceline.welcome import Welcome
from paceline.world import World

SECRET = b"of this run"


@pytest.fixture
def team(tmp_path):
    """Members on this machine, and a ticket to them; what they hold is closed."""
    points, made = [], []

    def make(size):
        points[:] = [MeetingPoint("127.0.0.1", 0, SECRET) for _ in range(size)]
        places = [Place(f"{rank}-name", f"host{rank}", "127.0.0.1", point.port) for rank, point in enumerate(points)]
        made[:] = [Survivors(rank, places, 0, points[rank], SECRET) for rank in range(size)]
        ticket = tmp_path / "ticket.json"
        Ticket(SECRET.decode(), f"1:{size}", [place.write() for place in places]).write(ticket)
        return made, ticket

    yield make
    for each in ASKING:
        each.late.leave()
        if each.late._point:
            each.late._point.close()
    ASKING.clear()
    for each in made:
        if each.hatch:
            each.hatch.close()
    for point in points:
        point.close()


ASKING = []


class Asking(threading.Thread):
    """A late node, which asks once; then ``told`` or ``error``."""

    def __init__(self, ticket, node="", **said):
        super().__init__(daemon=True)
        self.late, self.said, self.told, self.error = Late(ticket, node), said, None, ""
        ASKING.append(self)
        self.start()

    def run(self):
        try:
            self.told = self.late.request(self.said)
        except LinkError as error:
            self.error = str(error)


def until(what, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_a_ticket_is_its_owners_alone_and_says_what_it_is_not(tmp_path):
    path = tmp_path / "new" / "ticket.json"
    path.parent.mkdir()
    ticket = Ticket("word", "2:4", ["name 127.0.0.1 80 host"])
    ticket.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Ticket.read(path) == ticket
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    trap = path.with_name(f"{path.name}.{os.getpid()}.part")
    trap.symlink_to(tmp_path / "elsewhere")
    ticket.write(path)
    assert not (tmp_path / "elsewhere").exists()
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no ticket of a run"):
        Ticket.read(path)


@pytest.mark.parametrize("hides", [False, True])
def test_to_a_run_that_is_encrypted_one_comes_encrypted_and_to_another_not(tmp_path, hides):
    path, kinds = tmp_path / "ticket.json", {False: plain.Link, True: tls.Link}
    Ticket("word", "2:4", ["name 127.0.0.1 80 host"], hides).write(path)
    Late(path, "", kinds[hides])
    with pytest.raises(ValueError, match="start it as the others"):
        Late(path, "", kinds[not hides])


def test_a_question_reaches_who_leads_now_and_is_gone_with_who_asked(team):
    """Rank 0 has died: the members' own list is newer than the ticket."""
    members, ticket = team(3)
    members[0].point.close()
    left = [Survivors(rank, members[0].places[1:], 1, members[1 + rank].point, SECRET) for rank in range(2)]
    asking = Asking(ticket, began=3)
    (name, said), *more = until(left[0].waiting).items()
    assert not more
    assert said["began"] == 3
    assert not left[1].waiting()
    left[0].answer(name, {"position": [1, 2, 0]})
    asking.join(20.0)
    assert asking.told["position"] == [1, 2, 0]
    until(lambda: left[0].hatch and left[0].hatch.here)
    where = left[0].hatch.address, left[0].hatch.port
    asking.late.leave()
    # once nobody asks, nobody listens for who does
    until(lambda: not left[0].waiting() and left[0].hatch is None)
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
    assert "which waits to be taken in; end that one first" in second.error
    members[0].answer(next(iter(members[0].waiting())), {"over": True})
    first.join(20.0)
    assert first.told["over"]


def test_with_another_secret_or_after_the_end_there_is_nothing_to_come_to(team, monkeypatch):
    monkeypatch.setattr(late, "OVER_S", 0.5)
    members, ticket = team(2)
    stranger = Ticket("another", "1:2", Ticket.read(ticket).members)
    other = ticket.with_name("other.json")
    stranger.write(other)
    for path in (other, ticket):
        if path == ticket:
            for each in members:
                each.point.close()
        asking = Asking(path)
        asking.join(30.0)
        assert "the run has ended" in asking.error
        assert not path.exists()  # nobody tries again


def admit(members, guests):
    """What each of the members comes to: (generation, ranks, who came) or an error's words."""
    found = {}

    def one(rank):
        try:
            meeting, generation, ranks = members[rank].meet(guests if rank == 0 else ())
            found[rank] = generation, ranks, [guest.name for _, guest in members[rank].came]
            with contextlib.closing(meeting):
                if members[rank].came:
                    meeting.wait(["never"])  # as they do who wait for the new one
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
    until(lambda: asking.late._point)
    asking.late._point.close()
    begin = time.monotonic()
    found = admit(members, [Guest(name, "late host", turn=members[0].waiting()[name]["turn"])])
    assert time.monotonic() - begin < 15.0  # and not as long as one waits for a member
    for rank in range(2):
        assert "late host was to be taken in and is gone" in found[rank]
    asking.join(20.0)
    assert asking.told["decided"]["names"] == ["0-name", "1-name"]
    assert asking.told["decided"]["generation"] == 1


def test_who_has_gone_before_they_meet_is_left_out(team):
    members, _ = team(2)
    assert admit(members, [Guest("2-nobody", "late host")]) == dict.fromkeys(range(2), (1, [0, 1], []))


def test_who_has_asked_again_before_they_meet_is_left_out_and_asked_what_it_wants(team):
    """Its line broke in between: what it had been given went by that."""
    members, ticket = team(2)
    asking = Asking(ticket, began=0)
    (name,) = until(members[0].waiting)
    before = members[0].waiting()[name]["turn"]
    found = admit(members, [Guest(name, "late host", turn=before - 1)])
    assert found == dict.fromkeys(range(2), (1, [0, 1], []))
    members[0].answer(name, {"position": [0, 1, 0]})
    asking.join(20.0)
    assert asking.told["position"] == [0, 1, 0]


def test_a_message_arrives_bit_by_bit_on_a_line_of_its_own():
    hatch = Hatch("127.0.0.1", SECRET)
    said = {
        "weights": {
            "a": torch.arange(7.0).double(),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "none": torch.ones(0),
        },
        "odd": torch.arange(5, dtype=torch.int8),
        "step": torch.tensor(3.0),
        "shares": None,
        "text": "x" * 13,
        "flags": torch.tensor([True, False]),
    }
    try:
        line = reach(hatch.address, hatch.port, SECRET, "2-name")
        until(lambda: hatch.here)
        message = handover.Message(said)
        hatch.here["2-name"].send(message.parts(), message.num_bytes)
        got = line.receive()
        assert len(got) == message.num_bytes
        found = handover.read(got)
        assert found["text"] == said["text"]
        assert found["shares"] is None
        for name in ("odd", "step", "flags"):
            assert torch.equal(found[name], said[name])
        for name, value in said["weights"].items():
            assert torch.equal(found["weights"][name], value)
            assert found["weights"][name].dtype == value.dtype
        line.close()
    finally:
        hatch.close()


def ends(ours, theirs, secret):
    nonces = bytes(64)
    return (
        bulk.Bulk(ours, secret, 1, nonces, (bulk.DOWN, bulk.UP)),
        bulk.Bulk(theirs, secret, 1, nonces, (bulk.UP, bulk.DOWN)),
    )


@pytest.mark.parametrize("secret", [SECRET, Hiding(SECRET)], ids=["plain", "hidden"])
def test_much_at_once_arrives_bit_by_bit_and_where_it_is_hidden_nobody_reads_it(secret):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        sends, receives = ends(ours, theirs, secret)
        caught, sent = bytearray(), b"a weight that nobody should see, " * 300_000  # more than two parts

        class Wire:
            def send(self, part):
                caught.extend(part)
                return len(part)

        sends._line = Wire()
        for message in (sent, b"", sent):
            sends.send([memoryview(message)], len(message))
        assert (b"nobody should see" in caught) == (not isinstance(secret, Hiding))
        writer = threading.Thread(target=_write, args=(ours, caught), daemon=True)
        writer.start()
        assert [bytes(receives.receive()) for _ in range(3)] == [sent, b"", sent]
        writer.join(10.0)


@pytest.mark.parametrize("secret", [SECRET, Hiding(SECRET)], ids=["plain", "hidden"])
@pytest.mark.parametrize("at", [3, 20, 4_000_000, -1], ids=["length", "first", "second part", "seal"])
def test_a_flipped_byte_is_refused(at, secret):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        sends, receives = ends(ours, theirs, secret)
        caught, sent = bytearray(), bytes(5_000_000)

        class Wire:
            def send(self, part):
                caught.extend(part)
                return len(part)

        sends._line = Wire()
        sends.send([sent], len(sent))
        caught[at if at >= 0 else len(caught) + at] ^= 1
        writer = threading.Thread(target=_write, args=(ours, caught), daemon=True)
        writer.start()
        with pytest.raises(LinkError, match=r"wrong seal|were to come"):
            receives.receive()
        theirs.close()
        writer.join(10.0)


@pytest.mark.parametrize("hurry", [False, True])
def test_a_slow_wire_is_not_a_broken_one_but_while_all_others_wait(monkeypatch, hurry):
    """Story: below 4 Mbit/s no node of more than a few megabytes could come."""
    monkeypatch.setattr(bulk, "STALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = socket.create_connection(server.getsockname())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs, _ = server.accept()
    with ours, theirs:
        sends, _ = ends(ours, theirs, SECRET)
        heard, sent = bytearray(), bytes(1_000_000)

        def read():
            with contextlib.suppress(OSError):
                while words := theirs.recv(1 << 15):
                    heard.extend(words)
                    time.sleep(0.05)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        begin = time.monotonic()
        if hurry:
            threading.Timer(1.0, sends.hurry).start()  # in the middle of a message
            with pytest.raises(LinkError, match="too slowly"):
                sends.send([sent], len(sent))
        else:
            sends.send([sent], len(sent))
            assert time.monotonic() - begin > 2 * bulk.STALL_S
            sends.close()
            reader.join(20.0)
            assert sent in bytes(heard)
            assert len(heard) == len(sent) + 8 + 2 * (4 + 32)


def _write(line, data):
    try:
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_stranger_at_the_hatch_is_given_nothing():
    hatch = Hatch("127.0.0.1", SECRET)
    try:
        with pytest.raises(LinkError, match="did not prove"):
            reach(hatch.address, hatch.port, b"another", "2-name")
        with socket.create_connection((hatch.address, hatch.port), timeout=5.0) as line:
            line.sendall(b"GET / HTTP/1.1\r\n" * 10)
            heard = b""
            while words := line.recv(4096):
                heard += words
        assert len(heard) <= 41 + 32
        assert not hatch.here
    except ConnectionResetError:
        pass
    finally:
        hatch.close()


def test_strangers_who_say_nothing_keep_nobody_out():
    hatch, silent = Hatch("127.0.0.1", SECRET), []
    try:
        for _ in range(2 * MAX_STRANGERS):
            silent.append(socket.create_connection((hatch.address, hatch.port), timeout=5.0))
        with contextlib.closing(reach(hatch.address, hatch.port, SECRET, "2-name")):
            until(lambda: "2-name" in hatch.here)
        assert len(hatch._strangers) <= MAX_STRANGERS
    finally:
        for line in silent:
            line.close()
        hatch.close()


NODE = """
import json, os, pathlib, sys, time
node, folder = os.environ["GROUP_RANK"], pathlib.Path(sys.argv[1])
lives = folder / f"lives-{node}"
life = int(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text(str(life))
pathlib.Path(os.environ["PACELINE_TICKET"]).write_text("{}")
late = os.environ.get("PACELINE_JOIN") == os.environ["PACELINE_TICKET"] and os.environ.get("PACELINE_NODE") == node
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
    monkeypatch.setattr(again, "PAUSE_S", 0.02)
    monkeypatch.setenv("PACELINE_NODES", "1:2")
    command = [sys.executable, "-c", NODE, str(tmp_path), str(lives)]
    how = {"node": node, "asked": tuple} if node is not None else {"least": 1}
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


def test_who_has_lived_in_peace_may_come_back_as_often_again(tmp_path, monkeypatch):
    monkeypatch.setattr(again, "PEACE_S", 0.0)
    assert start(tmp_path, monkeypatch, 5) == 0
    assert (tmp_path / "lives-1").read_text() == "6"


def test_the_ticket_of_a_run_that_was_killed_is_nobodys(tmp_path, monkeypatch):
    """A node that fails before there is a run to come to is not sent to one that is no more."""
    stale = tmp_path / "ticket.json"
    stale.write_text("{}")
    monkeypatch.setenv("PACELINE_TICKET", str(stale))
    monkeypatch.setenv("PACELINE_NODES", "2:2")
    script = "import os, sys; sys.exit(9 if 'PACELINE_JOIN' in os.environ else 7)"
    assert local.start([sys.executable, "-c", script], "sequential", 2, returns=3, least=2) == 7


def test_a_ticket_says_where_those_are_who_train_now(team, tmp_path, monkeypatch):
    members, _ = team(2)
    path = tmp_path / "now.json"
    monkeypatch.setenv("PACELINE_TICKET", str(path))
    monkeypatch.setenv("PACELINE_SECRET", SECRET.decode())
    monkeypatch.setenv("PACELINE_NODES", "1:2")
    Survivors(0, members[0].places[1:], 1, members[1].point, SECRET)
    found = Ticket.read(path)
    assert (found.secret, found.nodes) == (SECRET.decode(), "1:2")
    assert [Place.read(each.encode()).name for each in found.members] == ["1-name"]
    assert json.loads(members[1].point.posted("members")[""]) == list(found.members)


def test_a_late_node_is_alone_at_first_whatever_the_run_was_when_it_began(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("5", "6", "1", "2", "2", "nowhere", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PACELINE_JOIN", "ticket.json")
    world = World.of_environment()
    assert (world.local_rank, world.local_size, world.node, world.num_nodes) == (1, 2, 0, 1)
    assert (world.late, world.least) == ("ticket.json", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"):
        World.of_environment()


class Doorkeeper:
    """One node asks to follow; what it is told is kept."""

    def __init__(self, pace):
        said = {"turn": 1, "host": "late", "said": {}, "began": pace.began, "size": 1, "least": 1, "most": 8}
        self.asked, self.told = {"late": said}, {}

    def waiting(self):
        return self.asked

    def answer(self, name, told):
        self.told[name] = told


def test_where_no_memory_is_left_for_a_copy_the_node_is_refused_and_training_goes_on(monkeypatch):
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential")
    with pace:
        door = Doorkeeper(pace)
        monkeypatch.setattr(type(pace.ledger), "porter", door)
        welcome = Welcome(pace, {})

        def full(*given, **more):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(torch, "empty_like", full)
        until(lambda: welcome._look(False) or door.told)
        monkeypatch.undo()
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        assert door.told["late"]["refused"] == f"the node that leads has no memory for a copy of {num_bytes} bytes"
        before = model.weight.detach().clone()
        pace.step((torch.ones(8, 4), torch.ones(8, 2)))
        assert not torch.equal(before, model.weight)


class Noted:
    """A line that keeps what is sent."""

    def __init__(self):
        self.messages, self.closed, self.breaks = 0, False, False

    def send(self, parts, num_bytes):
        if self.breaks:
            raise LinkError("gone")
        self.messages += 1

    def hurry(self):
        pass

    def close(self):
        self.closed = True


def welcoming(pace, monkeypatch):
    door = Doorkeeper(pace)
    door.lines = []
    door.line = lambda name: door.lines.append(Noted()) or door.lines[-1]
    monkeypatch.setattr(type(pace.ledger), "porter", door)
    return door, Welcome(pace, {})


def test_who_comes_by_another_line_is_given_all_anew(monkeypatch):
    """What the kernel took for the line before, and lost, counted as sent."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)

        def level():
            welcome._look(False)
            if (following := welcome._following.get("late")) and following.placed:
                following.part(handover.part(pace, following.next))
            return welcome._ready

        (ready,) = until(level)
        assert (ready.turn, door.lines[0].messages) == (1, 1)
        came = door.asked["late"]
        door.asked["late"] = {key: value for key, value in came.items() if key != "began"} | {"turn": 2}
        welcome._look(False)
        assert "position" in door.told["late"]
        assert not welcome._ready
        door.asked["late"] = came | {"turn": 3}
        (ready,) = until(level)
        assert ready.turn == 3
        assert [line.messages for line in door.lines] == [1, 1]
        welcome.begin_again()
        monkeypatch.undo()


def test_a_line_that_breaks_is_closed_and_nothing_waits_for_it_until_the_node_asks_anew(monkeypatch):
    """What would be sent to nobody has no end. The node is not refused: its line is told, and it comes by another."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        line = Noted()
        line.breaks, door.line = True, lambda name: line

        def broken():
            welcome._look(False)
            following = welcome._following["late"]
            if following.placed:
                following.part(handover.part(pace, following.next))
            return following.broken and following

        following = until(broken)
        assert line.closed
        for _ in range(3):
            following.before(pace.agreement, None)()
            welcome._look(False)
        assert following._messages.qsize() <= 1  # the word that ends the thread
        assert not welcome._ready
        assert not door.told
        welcome.begin_again()
        monkeypatch.undo()


def test_who_does_not_come_when_all_meet_for_it_is_met_for_no_more(monkeypatch):
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        monkeypatch.setattr(welcome, "_meet", lambda: ())
        meetings = 0
        while not door.told and meetings < 10:
            welcome._look(False)
            if (following := welcome._following.get("late")) and following.placed:
                following.part(handover.part(pace, following.next))
            if welcome._ready:
                welcome._admit()
                meetings += 1
        assert meetings == 2
        assert door.told["late"]["refused"].startswith("all met to take it in, 2 times")
        welcome.begin_again()
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["PACELINE_COLLECTIVE", "PACELINE_LINK"])
def test_who_would_add_up_another_way_says_so(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    mine = compare.digests({}, None)
    monkeypatch.setenv(name, {"PACELINE_COLLECTIVE": "ring", "PACELINE_LINK": "nccl"}[name])
    its = compare.digests({}, None)
    assert [key for key in mine if mine[key] != its[key]] == [name]


def test_who_leads_from_now_on_and_has_no_folder_trains_on(tmp_path, capsys):
    (tmp_path / "file").touch()
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        pace.folder = tmp_path / "file" / "run"
        members._lead(pace)
        before = model.weight.detach().clone()
        pace.step((torch.ones(8, 4), torch.ones(8, 2)))
        assert not torch.equal(before, model.weight)
        with pytest.raises(OSError, match=r"file/run"):
            pace.save()
    assert "run cannot be written here (Not a directory): training goes on without a record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "said", "nodes", "why"),
    [
        (True, {}, "1:4", "the script that trains deals its rows itself"),
        (False, {}, "1:1", "1 nodes train, or are about to, and there are to be at most 1 (--nodes)"),
        (False, {"files of paceline": "others"}, "1:4", "it was given different files of paceline; start it with"),
    ],
    ids=["a loop of the user's own", "one too many", "another version of the code"],
)
def test_who_may_not_come_is_told_why(monkeypatch, capsys, own, said, nodes, why):
    monkeypatch.setenv("PACELINE_NODES", nodes)
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door = Doorkeeper(pace)
        door.asked["late"]["said"] = {"files of paceline": "mine"} | said
        monkeypatch.setattr(type(pace.ledger), "porter", door)
        welcome = Welcome(pace, {"files of paceline": "mine"})
        until(lambda: welcome._look(own) or door.told)
        monkeypatch.undo()
    assert door.told["late"]["refused"].startswith(why)
    assert why in capsys.readouterr().err
