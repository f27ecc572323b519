"""Connection watch: a process that has ended is known at once and for certain; an unreachable one has not."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from paceline.elastic import connection_watch
from paceline.elastic.connection_watch import ConnectionWatch
from paceline.errors import LinkError
from paceline.link.net.store_client import StoreClient
from paceline.link.net.store_server import RendezvousStore
from waiting import until

SECRET = b"of this run"
HOST = """
import os, sys, time
from paceline.link.net.store_server import RendezvousStore
point = RendezvousStore("127.0.0.1", 0, b"of this run")
print(point.port, flush=True)
sys.stdin.readline()
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(100)
"""


@pytest.fixture
def host():
    process = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate(timeout=20)


def watching(port):
    watch = ConnectionWatch(lambda name: StoreClient("127.0.0.1", port, SECRET, 1, 2, 5.0))
    watch.watch(["other"])
    return watch


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_has_ended_though_its_child_lives(host, how):
    """Story: a loader's workers live five seconds longer than their parent, and held its connections open."""
    watch = watching(int(host.stdout.readline()))
    print(file=host.stdin, flush=True)
    child = int(host.stdout.readline())
    try:
        assert not watch.ended("other", 0.2)
        os.kill(host.pid, how)
        assert watch.ended("other", 5.0)
        os.kill(child, 0)  # it is alive
        assert watch.ended("other")  # for good
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_that_stands_still_has_not_ended(host):
    watch = watching(int(host.stdout.readline()))
    os.kill(host.pid, signal.SIGSTOP)
    assert not watch.ended("other", 0.5)
    os.kill(host.pid, signal.SIGKILL)
    assert watch.ended("other", 5.0)


def test_a_line_that_breaks_is_no_end_however_often_one_looks_and_is_opened_again(monkeypatch):
    """Story: once a reset was read, the kernel reports the connection like one that was closed with FIN."""
    monkeypatch.setattr(connection_watch, "RETRY_S", 0.2)
    point = RendezvousStore("127.0.0.1", 0, SECRET)
    watch = watching(point.port)
    first = watch._connections["other"]
    (line,) = point._clients
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    point._clients[line].deadline = 0.0  # with a reset, by its own thread, which a knock wakes
    socket.create_connection(("127.0.0.1", point.port)).close()
    until(lambda: line not in point._clients)
    for _ in range(3):
        assert not watch.ended("other", 0.1)
    assert first.broken
    end = time.monotonic() + 10.0
    while watch._connections["other"].broken:
        assert time.monotonic() < end
        time.sleep(0.05)
    point.close()
    assert watch.ended("other", 5.0)


def test_of_whom_there_is_no_line_nothing_is_known():
    def reach(name):
        raise LinkError("it could not be reached")

    watch = ConnectionWatch(reach)
    watch.watch(["other"])
    assert not watch.ended("other")
    assert not watch.ended("a third")


def test_lines_are_handed_on_and_those_of_others_are_closed():
    stores = {name: RendezvousStore("127.0.0.1", 0, SECRET) for name in ("one", "two", "three")}
    opened = []

    def reach(name):
        opened.append(name)
        return StoreClient("127.0.0.1", stores[name].port, SECRET, 1, 2, 5.0)

    first, second = ConnectionWatch(reach), ConnectionWatch(reach)
    first.watch(["one", "two"])
    second.watch(["two", "three"], first)
    assert sorted(opened) == ["one", "three", "two"]
    stores["two"].close()
    stores["one"].close()
    assert second.ended("two", 5.0)
    assert not second.ended("one", 0.2)
    assert not first.ended("two", 0.2)
    stores["three"].close()
