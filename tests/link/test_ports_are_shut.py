"""A port that a library leaves open is closed when all have come; one that a server will open is kept for it."""

import contextlib
import os
import select
import socket
import struct
import threading
import time

import pytest

from paceline.launch import local
from paceline.launch.local import free_port
from paceline.link.net.keepalive import shut_after, sockets
from paceline.registry import find

IP_LOCAL_PORT_RANGE = 51  # of Linux 6.3: the ports that the kernel may choose from, low and high, for this socket


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
    link = find("link", "gloo", 0, 1, "127.0.0.1", port)
    link.lane("another")
    assert set(listening().values()) - before == {port}  # the meeting point
    link.close()


def test_a_free_port_is_given_to_nobody_but_who_names_it():
    """Story: the launcher closed the port that it had found, and rank 0 opened it three seconds later, when torch was
    imported. Now and then another program had been given it in between, and the run ended before it began."""
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, given in (("bind", ("", 0)), ("bind", ("127.0.0.1", 0)), ("connect", server.getsockname())):
            with socket.socket() as line, contextlib.suppress(OSError):  # an older kernel does not know the option
                line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                line.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
                with pytest.raises(OSError, match=r"in use|Cannot assign"):
                    getattr(line, name)(given)
    for address in ("127.0.0.1", ""):
        with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_ports_are_kept_for_the_last_that_asked():
    before = set(sockets())
    ports = [free_port() for _ in range(2 * local.MAX_RESERVED)]
    assert len(set(ports[-local.MAX_RESERVED :])) == local.MAX_RESERVED
    assert len(set(sockets()) - before) <= local.MAX_RESERVED
