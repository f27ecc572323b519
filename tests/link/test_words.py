"""Messages come whole and in order however the network cuts them; a stopped process differs from a failed machine."""

import socket
import time

import pytest

from paceline.link.net.auth import CLIENT, SERVER, MessageAuthenticator
from paceline.link.net.framing import MAX_BYTES, MessageSocket


def seal(part):
    return MessageAuthenticator(b"of this test", part, 1, bytes(32), MAX_BYTES)


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for line in (one, other):
        line.setblocking(False)
    yield MessageSocket(one, seal(CLIENT)), MessageSocket(other, seal(SERVER))
    one.close()
    other.close()


def hear(words, count):
    found, end = [], time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < end
        some, more = words.receive()
        found += some
        assert more
    return found


def test_words_come_whole_and_in_order(pair):
    said = [(bytes([97 + i % 26]), bytes([i % 251]) * (i * 7919 % 60_000)) for i in range(40)]
    one, other = pair
    found = []
    for kind, body in said:
        one.send(kind, body)
        found += other.receive()[0]
        one.push()
    while len(found) < len(said):
        one.push()
        found += other.receive()[0]
    assert found == said


def test_half_a_word_is_kept_until_the_rest_comes(pair):
    one, other = pair
    whole = seal(CLIENT).wrap([b"h", b"abc"])
    for i in range(len(whole)):
        assert other.receive() == ([], True)
        one.line.send(whole[i : i + 1])
        time.sleep(0.002)
    assert hear(other, 1) == [(b"h", b"abc")]


def test_a_word_that_is_too_long_ends_it_and_so_does_the_end(pair):
    one, other = pair
    one.line.send((MAX_BYTES + 1).to_bytes(4, "little"))
    time.sleep(0.05)
    assert other.receive() == ([], False)
    other.line.close()
    time.sleep(0.05)
    assert one.receive() == ([], False)


def test_a_word_that_is_changed_or_said_again_ends_it(pair):
    one, other = pair
    word = seal(CLIENT).wrap([b"q", b""])
    one.line.send(word + word)
    time.sleep(0.05)
    assert other.receive() == ([(b"q", b"")], False)


def test_a_machine_confirms_what_a_process_that_stands_still_has_not_read(pair):
    one, _ = pair
    one.send(b"h", b"x" * 1000)
    end = time.monotonic() + 20
    while not one.arrived:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not one.stuck
    assert one.way_s > 0
    while one.arrived or not one.stuck:  # until the other side's memory is full
        assert time.monotonic() < end
        one.send(b"h", bytes(500_000))
    assert not one.arrived
