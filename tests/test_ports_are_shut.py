"""A port that a library leaves open is closed when all have come, and the library does not notice."""

import contextlib
import os
import select
import socket
import threading
import time

import pytest

from paceline.find import find
from paceline.launch.local import free_port
from paceline.link.cable import sockets
from paceline.link.ports import shut_after


def listening():
    """The ports, by descriptor, at which this process can be reached."""
    found = {}
    for descriptor in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.family == socket.AF_INET and line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[descriptor] = line.getsockname()[1]
    return found


def test_what_was_opened_within_is_closed_and_who_accepts_there_finds_nobody():
    before, eyes = listening(), select.epoll()
    with shut_after("127.0.0.1", lambda: [socket.create_server((f"127.0.0.{n}", 0)) for n in (1, 2)]) as (
        server,
        other,
    ):
        eyes.register(server.fileno(), select.EPOLLIN)
        server.setblocking(False)
        later, port = socket.create_server(("127.0.0.1", 0)), server.getsockname()[1]
        assert set(listening()) - set(before) == {server.fileno(), other.fileno(), later.fileno()}
        socket.create_connection(("127.0.0.1", port)).close()
        assert eyes.poll(5.0)
    with server, other, later:
        assert set(listening()) - set(before) == {other.fileno(), later.fileno()}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert not eyes.poll(0), "the library is woken"
        with pytest.raises(BlockingIOError):
            server.accept()
    eyes.close()


def test_threads_that_open_at_the_same_moment_close_their_own():
    """Story: ranks that were threads took each other's ports for theirs, and closed them before all had come."""
    servers, met = {}, threading.Barrier(2)

    def begin():
        server = socket.create_server(("127.0.0.1", 0))
        time.sleep(0.2)  # the other one opens its own meanwhile, unless it waits for its turn
        return server

    def one(first):
        with shut_after("127.0.0.1", begin) as servers[first]:
            met.wait(30)
            if not first:
                met.wait(30)
                socket.create_connection(servers[first].getsockname()).close()  # the other one has closed, its own
        if first:
            met.wait(30)

    threads = [threading.Thread(target=one, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not {server.fileno() for server in servers.values()} & set(listening())
    for server in servers.values():
        server.close()


def test_gloo_leaves_no_port_open():
    before, port = set(listening().values()), free_port()
    link = find("link", "torch", 0, 1, "127.0.0.1", port)
    link.lane("another")
    assert set(listening().values()) - before == {port}  # the meeting point
    link.close()
