"""A heartbeat that never began leaves no connection behind, and a malformed stack ends no process."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.elastic.failure_detector import Heartbeat
from paceline.errors import LinkError
from paceline.report.activity import Activity


class Told(dict):
    set = dict.__setitem__

    def get(self, key):
        return self[key].encode()


def test_where_waiting_has_become_pointless_all_that_came_are_hung_up_on():
    told = Told()

    with contextlib.ExitStack() as held:
        lines = []

        def alert():
            if lines:
                raise LinkError("rank 1 is gone", 1)
            address, port, _ = told["pulse"].split()
            lines.append(held.enter_context(socket.create_connection((address, int(port)), timeout=20.0)))
            lines[0].sendall(b"?")

        with pytest.raises(LinkError, match="rank 1 is gone"):
            Heartbeat(0, 2, told, "127.0.0.1", alert=alert)
        assert lines[0].recv(9) == b""


def test_a_stack_that_is_no_utf_8_is_told_and_ends_nobody():
    """As the stack of a script in a folder with such a name."""
    told, odd = Told(), Activity()
    odd.siblings = lambda: "\udcff"
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(Heartbeat, 0, 2, told, "127.0.0.1", b"", odd)
        while "pulse" not in told:
            time.sleep(0.01)
        pulses = [Heartbeat(1, 2, told, "127.0.0.1", b"", odd), coming.result(20)]
    try:
        for heartbeat in pulses:
            assert [heartbeat.peer_stack(rank)[-1:] for rank in (0, 1)] == ["?", "?"]
            assert not heartbeat.dead
    finally:
        for heartbeat in pulses:
            heartbeat.close()
