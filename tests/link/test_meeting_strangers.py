"""Who does not prove the run's secret gets nothing, changes nothing and delays nobody."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time

import pytest

from paceline.errors import LinkError
from paceline.link.net import store_server
from paceline.link.net.auth import (
    CLIENT,
    HEADER,
    HELLO,
    REFUSED,
    SERVER,
    SIZE,
    AuthError,
    MessageAuthenticator,
    mac,
    pack,
    unpack,
)
from paceline.link.net.store_client import StoreClient
from paceline.link.net.store_server import MAX_NOTES, MAX_STRANGERS, RendezvousStore

SECRET = b"of this run"


@pytest.fixture
def point():
    point = RendezvousStore("127.0.0.1", 0, SECRET)
    yield point
    point.close()


@contextlib.contextmanager
def member(port, rank=1, secret=SECRET):
    meeting = StoreClient("127.0.0.1", port, secret, rank, 2, 5.0)
    try:
        yield meeting
    finally:
        meeting.close()


class Tap:
    """Stands between a guest and the meeting point: keeps what the guest says, and may change what either says."""

    def __init__(self, port):
        self.port, self.said = port, bytearray()
        self.change = {"guest": bytes, "server": bytes}
        self.server = socket.create_server(("127.0.0.1", 0))
        self.lines, self.threads = [], []
        self._start(self._accept)

    def _start(self, work, *arguments):
        self.threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self.threads[-1].start()

    def _accept(self):
        guest, _ = self.server.accept()
        point = socket.create_connection(("127.0.0.1", self.port))
        self.lines += [guest, point]
        self._start(self._pass_on, guest, point, "guest")
        self._start(self._pass_on, point, guest, "server")

    def _pass_on(self, source, sink, who):
        with contextlib.suppress(OSError):
            while words := source.recv(65536):
                if who == "guest":
                    self.said += words
                sink.sendall(self.change[who](words))
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for line in (*self.lines, self.server):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        for thread in self.threads:
            thread.join(5.0)


def hear(line, limit_s=5.0):
    """All that comes until the other side hangs up."""
    line.settimeout(limit_s)
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while words := line.recv(4096):
            heard += words
    return heard


def test_another_secret_is_refused_and_each_side_says_so_in_one_line(point, capsys):
    start = time.monotonic()
    with pytest.raises(
        LinkError, match=r"rank 1 of 2 on .*refused this process: their PACELINE_SECRET differ"
    ) as raised:
        StoreClient("127.0.0.1", point.port, b"of another run", 1, 2, 30.0)
    assert time.monotonic() - start < 5.0
    assert "\n" not in str(raised.value)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: refused 127.0.0.1 at the meeting point ")
    assert "rank 1" in line
    assert "PACELINE_SECRET is not that of this run" in line
    with member(point.port, rank=0) as meeting:
        meeting.point = point
        with pytest.raises(LinkError, match=r"rank 1 did not come .*refused 127.0.0.1"):
            meeting._wait(["came/1"], 0.1)


def test_an_empty_secret_is_not_that_of_a_run_that_has_one(point):
    with pytest.raises(LinkError, match="PACELINE_SECRET differ"), member(point.port, secret=b""):
        pass


def test_a_false_meeting_point_learns_nothing_and_is_refused():
    """It lets the guest speak, and answers with a proof by another secret, then with the guest's own proof."""
    for mirror in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer(server=server, mirror=mirror):
                line, _ = server.accept()
                with line:
                    nonce = bytes(SIZE)
                    line.sendall(HEADER + nonce)
                    _, rank, other, proof = HELLO.unpack(line.recv(HELLO.size, socket.MSG_WAITALL))
                    line.sendall(proof if mirror else mac(b"guessed", SERVER, rank, nonce + other))

            thread = threading.Thread(target=answer)
            thread.start()
            port = server.getsockname()[1]
            with pytest.raises(LinkError, match="did not prove that it belongs to this run"), member(port):
                pass
            thread.join(5.0)


def test_another_version_is_told_on_both_sides(point, capsys):
    newer = HEADER[:-1] + b"\x07"
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = []

        def answer():
            line, _ = server.accept()
            with line:
                line.sendall(newer + bytes(SIZE))
                heard.append(hear(line))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            LinkError, match=r"speaks version 1 of the rendezvous, rank 0 at .* version 7; install the same"
        ):
            StoreClient("127.0.0.1", server.getsockname()[1], SECRET, 1, 2, 5.0)
        thread.join(5.0)
        assert heard == [HEADER]
    with socket.create_connection(("127.0.0.1", point.port)) as line:
        line.sendall(newer)
        hear(line)
    assert "it speaks version 7 of the meeting, this process version 1" in capsys.readouterr().err


def test_a_recorded_handshake_is_refused_another_time(point):
    with Tap(point.port) as tap:
        with member(tap.server.getsockname()[1]) as meeting:
            assert meeting.add("count", 1) == 1
        recorded = bytes(tap.said)
    assert len(recorded) > HELLO.size
    with socket.create_connection(("127.0.0.1", point.port)) as line:
        line.sendall(recorded)
        assert hear(line)[len(HEADER) + SIZE :] == REFUSED
    with member(point.port) as meeting:
        assert meeting.add("count", 0) == 1


@pytest.mark.parametrize("how", ["again", "changed", "cut", "one inside another's"])
def test_a_frame_that_is_said_again_or_changed_ends_the_conversation(point, how):
    def spoil(words):
        if how == "again":
            return words + words
        if how == "changed":
            return words[:10] + bytes([words[10] ^ 1]) + words[11:]
        if how == "cut":
            return struct.pack("<I", 3) + words[4:]
        return MessageAuthenticator(b"guessed", CLIENT, 1, bytes(2 * SIZE)).wrap([b"set", b"count", b"9"]) + words

    with Tap(point.port) as tap, member(tap.server.getsockname()[1]) as meeting:
        assert meeting.add("count", 1) == 1
        tap.change["guest"] = spoil
        if how == "again":
            assert meeting.add("count", 1) == 2
            tap.change["guest"] = bytes
        with pytest.raises(LinkError, match="lost the meeting point"):
            meeting.add("count", 1)
    with member(point.port) as meeting:
        assert meeting.add("count", 0) == (2 if how == "again" else 1)


def test_an_answer_that_is_changed_is_not_believed(point):
    with Tap(point.port) as tap, member(tap.server.getsockname()[1]) as meeting:
        meeting.set("key", "value")
        tap.change["server"] = lambda words: words[:-40] + bytes([words[-40] ^ 1]) + words[-39:]
        with pytest.raises(LinkError, match=r"lost the meeting point .*wrong MAC"):
            meeting.get("key")


def test_a_seal_is_of_one_direction_one_conversation_and_one_place_in_it():
    nonces = bytes(range(64))
    one, other = MessageAuthenticator(SECRET, CLIENT, 1, nonces), MessageAuthenticator(SECRET, SERVER, 1, nonces)
    first, second = one.wrap([b"first"]), one.wrap([b"second"])
    assert other.take(bytearray(first)) == [b"first"]
    for wrong in (first, other.wrap([b"mine"]), MessageAuthenticator(SECRET, CLIENT, 2, nonces).wrap([b"second"])):
        with pytest.raises(AuthError):
            other.take(bytearray(wrong))
    assert other.take(bytearray(second)) == [b"second"]
    for count in range(len(second)):
        assert other.take(bytearray(second[:count])) is None


def test_fields_come_back_as_they_were_or_not_at_all():
    dice = random.Random(1)
    for _ in range(300):
        fields = [dice.randbytes(dice.randrange(20)) for _ in range(dice.randrange(5))]
        assert unpack(pack(fields)) == fields
        with contextlib.suppress(AuthError):
            assert pack(unpack(noise := dice.randbytes(dice.randrange(40)))) == noise


def test_strangers_of_every_kind_keep_nobody_waiting_and_are_few(point, monkeypatch, capsys):
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 0.5)
    with contextlib.ExitStack() as crowd, member(point.port, 0) as early:
        kinds = (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            HEADER[:5],
            HEADER,
            HEADER + bytes(10),
            struct.pack("<I", 2**32 - 1) * 100,
            HEADER + bytes(HELLO.size - len(HEADER)),
            HEADER + bytes(100_000),
        )
        for i in range(25 * len(kinds)):
            line = crowd.enter_context(socket.create_connection(("127.0.0.1", point.port)))
            with contextlib.suppress(OSError):
                line.sendall(kinds[i % len(kinds)])
        start = time.monotonic()
        early.set("key", "value")
        with member(point.port, 1) as late:
            assert late.get("key") == b"value"
        assert time.monotonic() - start < 3.0
        assert len(point._clients) <= MAX_STRANGERS + 2
        time.sleep(1.0)
        early.set("key", "later")
        assert len(point._clients) <= 2, "silence has no deadline"
        assert early.get("key") == b"later"
    assert len(capsys.readouterr().err.splitlines()) <= MAX_NOTES


def test_a_member_that_says_what_no_member_says_loses_its_place_and_nobody_else_does(point):
    questions = (
        [b"get"],
        [b"get", b"soon", b"key"],
        [b"add", b"key", b"x"],
        [b"add"],
        [b"fly"],
        [b"set", b"key"],
        [b""],
    )
    with member(point.port, 0) as good:
        for question in questions:
            with member(point.port) as bad, pytest.raises(LinkError, match="lost the meeting point"):
                bad._request(*question)
        good.set("key", "1")
        assert good.add("key", 1) == 2


def test_a_member_that_does_not_listen_is_let_go(point):
    with member(point.port, 0) as good, member(point.port) as deaf:
        good.set("large", bytes(60_000))
        with contextlib.suppress(OSError):
            for _ in range(2000):
                deaf._line.sendall(deaf._seal.wrap([b"get", b"1", b"large"]))
        good.set("key", "value")
        assert good.get("key") == b"value"
        end = time.monotonic() + 5.0
        while len(point._clients) > 1:
            assert time.monotonic() < end
            time.sleep(0.05)
