"""Bulk channel: messages arrive bit for bit, authenticated or encrypted; strangers receive nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import torch

from paceline.elastic import bulk_channel, state_transfer
from paceline.elastic.bulk_channel import MAX_STRANGERS, BulkServer, connect_bulk
from paceline.errors import LinkError
from paceline.link.net.auth import EncryptionKey
from waiting import until

SECRET = b"of this run"


def test_a_message_arrives_bit_by_bit_on_a_line_of_its_own():
    server = BulkServer("127.0.0.1", SECRET)
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
        line = connect_bulk(server.address, server.port, SECRET, "2-name")
        until(lambda: server.channels)
        message = state_transfer.Message(said)
        server.channels["2-name"].send(message.parts(), message.num_bytes)
        got = line.receive()
        assert len(got) == message.num_bytes
        found = state_transfer.read(got)
        assert found["text"] == said["text"]
        assert found["shares"] is None
        for name in ("odd", "step", "flags"):
            assert torch.equal(found[name], said[name])
        for name, value in said["weights"].items():
            assert torch.equal(found["weights"][name], value)
            assert found["weights"][name].dtype == value.dtype
        line.close()
    finally:
        server.close()


def ends(ours, theirs, secret):
    nonces = bytes(64)
    return (
        bulk_channel.BulkChannel(ours, secret, 1, nonces, (bulk_channel.DOWN, bulk_channel.UP)),
        bulk_channel.BulkChannel(theirs, secret, 1, nonces, (bulk_channel.UP, bulk_channel.DOWN)),
    )


@pytest.mark.parametrize("secret", [SECRET, EncryptionKey(SECRET)], ids=["plain", "hidden"])
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

        sends._connection = Wire()
        for message in (sent, b"", sent):
            sends.send([memoryview(message)], len(message))
        assert (b"nobody should see" in caught) == (not isinstance(secret, EncryptionKey))
        writer = threading.Thread(target=_write, args=(ours, caught), daemon=True)
        writer.start()
        assert [bytes(receives.receive()) for _ in range(3)] == [sent, b"", sent]
        writer.join(10.0)


@pytest.mark.parametrize("secret", [SECRET, EncryptionKey(SECRET)], ids=["plain", "hidden"])
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

        sends._connection = Wire()
        sends.send([sent], len(sent))
        caught[at if at >= 0 else len(caught) + at] ^= 1
        writer = threading.Thread(target=_write, args=(ours, caught), daemon=True)
        writer.start()
        with pytest.raises(LinkError, match=r"wrong MAC|were expected"):
            receives.receive()
        theirs.close()
        writer.join(10.0)


@pytest.mark.dear("False")
@pytest.mark.parametrize("set_deadline_mode", [False, True])
def test_a_slow_wire_is_not_a_broken_one_but_while_all_others_wait(monkeypatch, set_deadline_mode):
    """Story: below 4 Mbit/s no node with a state of more than a few megabytes could join."""
    monkeypatch.setattr(bulk_channel, "STALL_S", 0.5)
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
        if set_deadline_mode:
            threading.Timer(1.0, sends.set_deadline_mode).start()  # in the middle of a message
            with pytest.raises(LinkError, match="too slowly"):
                sends.send([sent], len(sent))
        else:
            sends.send([sent], len(sent))
            assert time.monotonic() - begin > 2 * bulk_channel.STALL_S
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
    server = BulkServer("127.0.0.1", SECRET)
    try:
        with pytest.raises(LinkError, match="did not prove"):
            connect_bulk(server.address, server.port, b"another", "2-name")
        with socket.create_connection((server.address, server.port), timeout=5.0) as line:
            line.sendall(b"GET / HTTP/1.1\r\n" * 10)
            heard = b""
            while words := line.recv(4096):
                heard += words
        assert len(heard) <= 41 + 32
        assert not server.channels
    except ConnectionResetError:
        pass
    finally:
        server.close()


def test_strangers_who_say_nothing_keep_nobody_out():
    server, silent = BulkServer("127.0.0.1", SECRET), []
    try:
        for _ in range(2 * MAX_STRANGERS):
            silent.append(socket.create_connection((server.address, server.port), timeout=5.0))
        with contextlib.closing(connect_bulk(server.address, server.port, SECRET, "2-name")):
            until(lambda: "2-name" in server.channels)
        assert len(server._strangers) <= MAX_STRANGERS
    finally:
        for line in silent:
            line.close()
        server.close()


def test_who_is_admitted_while_the_hatch_closes_is_hung_up_on():
    server, closed = BulkServer("127.0.0.1", SECRET), threading.Event()
    hear = server._authenticate
    server._authenticate = lambda line: (hear(line), closed.wait(20.0))[0]
    with contextlib.closing(connect_bulk(server.address, server.port, SECRET, "2-name")) as line:
        server.close()
        closed.set()
        with pytest.raises(LinkError, match="has failed"):
            line.receive()
    assert not server.channels


def test_who_comes_by_another_line_has_that_one_alone():
    server = BulkServer("127.0.0.1", SECRET)
    try:
        with contextlib.closing(connect_bulk(server.address, server.port, SECRET, "2-name")) as first:
            until(lambda: "2-name" in server.channels)
            before = server.channels["2-name"]
            with contextlib.closing(connect_bulk(server.address, server.port, SECRET, "2-name")) as second:
                until(lambda: server.channels.get("2-name") not in (None, before))
                with pytest.raises(LinkError, match="has failed"):
                    first.receive()
                server.channels["2-name"].send([b"state"], 5)
                assert second.receive() == b"state"
    finally:
        server.close()
