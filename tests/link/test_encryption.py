"""With --encrypt nobody but the ranks of a run reads what they say, comes in among them, or says it once more."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from test_meeting_strangers import Tap

import launching
from paceline import session
from paceline.cli.prepare import require_encryption
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError
from paceline.launch.local import free_port
from paceline.link import tls
from paceline.link.net import auth, tls_mesh
from paceline.link.net.auth import EncryptionKey
from paceline.link.net.keepalive import sockets
from paceline.link.net.route import Member
from paceline.link.net.store_client import StoreClient
from paceline.link.net.store_server import RendezvousStore
from paceline.link.net.tls_mesh import Identity, Mesh
from paceline.link.net.tls_messages import HEAD, Mail, Work

SECRET, WORDS = b"of this run", b"a weight that nobody should see, " * 8
LIMIT_S = 10.0


class Board:
    """What a lane's store is to a mesh."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, LIMIT_S), key
            return self.values[key]


def together(*works):
    """What each gives, or raises, all at once."""
    results = [None] * len(works)

    def one(i):
        try:
            results[i] = works[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT_S)
    return results


class Team:
    """Ranks that know each other's certificates, and a board."""

    def __init__(self, size):
        self.board, self.members = Board(), [Member(r, f"host{r}", "127.0.0.1", 1, b"") for r in range(size)]
        self.identities = [Identity() for _ in range(size)]
        self.certificates = [each.certificate for each in self.identities]

    def mesh(self, rank, limit_s=LIMIT_S, own=None):
        return Mesh(rank, self.members, own or self.identities[rank], self.certificates, self.board, limit_s)


@contextlib.contextmanager
def closed(*meshes):
    try:
        yield meshes
    finally:
        for each in meshes:
            for line in (*each.out.values(), *each.into.values()):
                line.close()


def listening():
    found = []
    for descriptor in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.family == socket.AF_INET and line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(line.getsockname()[1])
    return found


def test_every_two_ranks_have_a_line_each_way_and_then_nothing_listens():
    team, before = Team(3), listening()
    with closed(*together(*(lambda rank=rank: team.mesh(rank) for rank in range(3)))) as meshes:
        for one, other in itertools.permutations(range(3), 2):
            out, into = meshes[one].out[other], meshes[other].into[one]
            assert out.version() == into.version() == "TLSv1.3"
            out.sendall(WORDS)
            assert auth.exactly(into, len(WORDS)) == WORDS
        assert listening() == before


def test_who_is_not_told_of_at_the_meeting_does_not_come_in_and_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(tls_mesh, "HANDSHAKE_S", 1.0)
    team, stranger = Team(2), Identity()
    refused, held = [], contextlib.ExitStack()

    def intrude():
        port = int(team.board.get("gate/0").split()[0])
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(3000), b"\x16\x03\x01\x02\x00\x01"):
            line = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                line.sendall(words)
        for context in (stranger.context(False, team.certificates), ssl._create_unverified_context()):
            line = socket.create_connection(("127.0.0.1", port), timeout=5.0)
            with line, contextlib.suppress(OSError), context.wrap_socket(line) as safe:
                refused.append(safe.recv(1))
        return team.mesh(1)

    with held, closed(*together(lambda: team.mesh(0), intrude)) as meshes:
        assert not any(refused)
        meshes[1].out[0].sendall(WORDS)
        assert auth.exactly(meshes[0].into[1], len(WORDS)) == WORDS


def test_a_rank_is_who_its_certificate_says_and_nobody_takes_anothers_place():
    """Rank 1 has rank 2's place at the board: what rank 0 finds there is a member, and not the right one."""
    team = Team(3)
    found = together(
        lambda: team.mesh(0, 1.0),
        lambda: team.mesh(2, 1.0),
        lambda: team.board.set("gate/1", team.board.get("gate/2").decode()),
    )
    assert all(isinstance(each, LinkError) for each in found[:2]), found
    assert "rank 1 on host1" in str(found[0])


def test_a_connection_that_is_led_to_another_lane_is_noticed():
    """Both ends are the right ones, and what one lane says would come out of the other."""
    team, board = Team(2), Board()
    board.set("gate/0", f"{free_port()} 00")

    def other_lane():
        return Mesh(1, team.members, team.identities[1], team.certificates, board, 1.0)

    def lead():
        team.board.set("gate/1", f"{board.get('gate/1').decode().split()[0]} {bytes(tls_mesh.TOKEN).hex()}")

    found = together(lambda: team.mesh(0, 1.0), other_lane, lead)
    assert "another lane answered" in str(found[0])


def test_who_does_not_come_is_named_in_time():
    team = Team(2)
    team.board.set("gate/1", f"{free_port()} 00")
    with pytest.raises(
        LinkError, match=r"rank 0 on host0 .*could not open a TLS connection to rank 1 on host1"
    ) as raised:
        team.mesh(0, 0.5)
    assert raised.value.peer == 1


# Mail, over any lines.


@pytest.fixture
def post():
    """Two sides of mail, and the line from the first to the second."""
    (one, other), (back, forth) = socket.socketpair(), socket.socketpair()
    sides = Mail({1: one}, {1: forth}, {1: "1.1.1.1"}), Mail({0: back}, {0: other}, {0: "0.0.0.0"})
    yield (*sides, one)
    for line in (one, other, back, forth):
        line.close()


def key(number, part=0):
    return b"m", number, part


def done(work, limit_s=LIMIT_S):
    work.wait(timedelta(seconds=limit_s))


def test_messages_land_where_somebody_waits_in_any_order_and_wait_where_nobody_does(post):
    one, other, _ = post
    sent = Work(6)
    sizes = (0, 1, 7, 20_000, 1 << 20, 3)
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    for number, body in enumerate(bodies[:5]):
        one.send(1, key(number), memoryview(body), sent)
    one.send(1, key(3), memoryview(bodies[5]), sent)  # another of the same number comes after the first
    places = [bytearray(size) for size in sizes]
    for number in (4, 0, 2, 3, 1, 3):
        place = places[5] if number == 3 and places[3].count(4) else places[number]
        landed = Work(1)
        other.receive(0, key(number), memoryview(place), landed)
        done(landed)
    done(sent)
    assert [bytes(place) for place in places] == bodies


def test_a_line_that_breaks_fails_what_needs_it_and_what_has_come_is_kept(post):
    one, other, line = post
    sent, waiting, whole = Work(1), Work(1), Work(2)
    one.send(1, key(1), memoryview(b"early"), sent)
    done(sent)
    other.receive(0, key(2), memoryview(bytearray(9)), Work(1, None, whole))
    other.receive(0, key(3), memoryview(bytearray(9)), waiting)
    line.sendall(HEAD.pack(*key(3), 9)[:5])
    line.shutdown(socket.SHUT_RDWR)
    for work in (waiting, whole):
        with pytest.raises(RuntimeError, match=r"\[0\.0\.0\.0\] it closed the connection"):
            done(work)
    place, landed, late = bytearray(5), Work(1), Work(1)
    other.receive(0, key(1), memoryview(place), landed)
    done(landed)
    assert bytes(place) == b"early"
    other.receive(0, key(4), memoryview(place), late)
    with pytest.raises(RuntimeError, match="it closed the connection"):
        done(late)
    lost = Work(1)
    with pytest.raises(RuntimeError, match="not yet"):
        lost.wait(timedelta(seconds=0.01))
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and not lost.is_completed():
        lost = Work(1)
        one.send(1, key(5), memoryview(b"x"), lost)
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match=r"\[1\.1\.1\.1\]"):
        done(lost)


@pytest.mark.parametrize("early", [True, False])
def test_a_message_of_another_size_is_an_error_and_no_memory_is_overwritten(post, early):
    one, other, _ = post
    place, landed = bytearray(8), Work(1)
    if early:
        one.send(1, key(1), memoryview(bytes(range(9))), Work(1))
        time.sleep(0.1)
    other.receive(0, key(1), memoryview(place)[:4], landed)
    if not early:
        one.send(1, key(1), memoryview(bytes(range(9))), Work(1))
    with pytest.raises(RuntimeError, match="sent 9 bytes where 4 were expected"):
        done(landed)
    assert place == bytes(8)


@pytest.mark.parametrize("size", range(1, 18))
def test_the_tree_of_a_broadcast_reaches_everyone_once(size):
    reached, todo = [], [0]
    while todo:
        place = todo.pop()
        reached.append(place)
        children = tls._children(place, size)
        assert all(child & (child - 1) == place for child in children)
        todo += children
    assert sorted(reached) == list(range(size))


# The meeting.


def heard(secret):
    """What a listener hears of a member that sets a word and gets it."""
    point = RendezvousStore("127.0.0.1", 0, secret)
    try:
        with Tap(point.port) as tap:
            answers = bytearray()
            tap.change["server"] = lambda words: (answers.extend(words), words)[1]
            meeting = StoreClient("127.0.0.1", tap.server.getsockname()[1], secret, 1, 2, 5.0)
            try:
                for number in range(3):
                    meeting.set(f"key of mine {number}", WORDS)
                assert meeting.get("key of mine 2") == WORDS
            finally:
                meeting.close()
            return bytes(tap.said + answers)
    finally:
        point.close()


def test_the_words_of_the_meeting_are_read_by_members_alone():
    plain, hidden = heard(SECRET), heard(EncryptionKey(SECRET))
    assert plain.count(WORDS) == 4, "a listener hears nothing at all"
    assert plain.count(b"key of mine") == 4
    assert b"weight" not in hidden
    assert b"key of mine" not in hidden
    assert SECRET not in plain + hidden


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, EncryptionKey(SECRET)), (EncryptionKey(SECRET), SECRET)])
def test_one_that_encrypts_and_one_that_does_not_are_told_on_both_sides(ours, theirs, capsys):
    point = RendezvousStore("127.0.0.1", 0, ours)
    try:
        with pytest.raises(LinkError, match=r"PACELINE_SECRET differ; .*all or none with --encrypt"):
            StoreClient("127.0.0.1", point.port, theirs, 1, 2, 5.0)
    finally:
        point.close()
    how = ("with", "without") if isinstance(theirs, EncryptionKey) else ("without", "with")
    assert f"it was started {how[0]} --encrypt (PACELINE_ENCRYPT), and this run {how[1]}" in capsys.readouterr().err


# How it is asked for.


@pytest.fixture
def no_secret(monkeypatch):
    monkeypatch.setattr(auth, "_taken", [])
    monkeypatch.delenv("PACELINE_SECRET", raising=False)


def test_without_a_secret_nothing_is_encrypted_and_that_is_said(no_secret):
    with pytest.raises(ValueError, match=r"PACELINE_SECRET is not set; .*openssl rand"):
        tls.Link(0, 2, "127.0.0.1", free_port())


def test_without_the_library_that_is_said_before_anything_starts(no_secret, monkeypatch):
    monkeypatch.setattr(tls_mesh, "NEEDS", "no_such_library")
    monkeypatch.delenv("PACELINE_ENCRYPT", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'paceline\[encrypt\]' on every node"):
        require_encryption(True)
    assert "PACELINE_ENCRYPT" not in os.environ


def test_the_secret_is_taken_out_of_the_environment(no_secret, monkeypatch):
    monkeypatch.setenv("PACELINE_SECRET", "of this test")
    assert auth.secret_of_environment() == b"of this test"
    assert "PACELINE_SECRET" not in os.environ
    assert auth.secret_of_environment() == b"of this test"
    assert b"of this test" not in subprocess.run(["env"], capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("variable", "asked", "hidden"),
    [
        ("", None, False),
        ("0", None, False),
        ("1", None, True),
        ("1", False, False),
        ("", True, True),
        ("0", True, True),
    ],
)
def test_it_is_asked_for_by_the_option_or_by_the_script(monkeypatch, variable, asked, hidden):
    monkeypatch.setenv("PACELINE_ENCRYPT", variable)
    monkeypatch.delenv("PACELINE_LINK", raising=False)
    assert session._encrypted(asked) is hidden
    link = session._link(LaunchEnvironment(), torch.nn.Linear(1, 1), hidden)
    assert (link == "tls") is hidden


def test_what_cannot_be_meant_is_told(monkeypatch):
    monkeypatch.setenv("PACELINE_ENCRYPT", "yes")
    with pytest.raises(ValueError, match="PACELINE_ENCRYPT='yes' is neither 1 nor 0"):
        session._encrypted(None)
    monkeypatch.setenv("PACELINE_LINK", "mpi")
    with pytest.raises(ValueError, match="PACELINE_LINK='mpi' does not encrypt"):
        session._link(LaunchEnvironment(), torch.nn.Linear(1, 1), True)


def test_the_option_reaches_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nassert os.environ['PACELINE_ENCRYPT'] == '1' and len(os.environ['PACELINE_SECRET']) == 64\n"
    )
    command = [sys.executable, "-m", "paceline", "run", "--plan", "threads:1", "--encrypt", str(script)]
    ended = subprocess.run(
        command, env=launching.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.dear
def test_a_node_dies_and_the_others_go_on_encrypted(tmp_path):
    from test_outlived import check, launch

    ended = launch(tmp_path, "0:3:backward", PACELINE_ENCRYPT="1")
    check(tmp_path, ended, ["1-0", "2-0"], num_losses=1)
