"""What a heartbeat that never began leaves behind: nothing."""

import contextlib
import socket

import pytest

from paceline.contract import LinkError
from paceline.link.pulse import Pulse


class Told(dict):
    set = dict.__setitem__


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
            Pulse(0, 2, told, "127.0.0.1", alert=alert)
        assert lines[0].recv(9) == b""
