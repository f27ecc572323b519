"""A broken cable is seen on any connection of this process, and a peer that stands still or reads slowly is none."""

import os
import signal
import subprocess
import sys

import pytest

from cluster import Cluster
from machines import needs_cluster
from paceline.link.net.keepalive import SILENT_S

SERVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    line, _ = server.accept()
    print("met", flush=True)
    time.sleep(100)
"""
SEND = """
import socket, sys, time
from paceline.link.net.keepalive import unanswered
line = socket.create_connection((sys.argv[1], 5000), timeout=20)
line.setblocking(False)
for _ in range(int(sys.argv[2])):
    try:
        line.send(bytes(1000))
    except BlockingIOError:
        pass
    if found := unanswered(sys.argv[3:]):
        print(found, flush=True)
        break
    time.sleep(0.1)
else:
    print("nothing", flush=True)
"""


@pytest.mark.dear
@needs_cluster
@pytest.mark.parametrize("how", ["cable", "stopped", "a stranger's cable"])
def test_who_does_not_confirm_is_named_and_who_stands_still_is_not(how):
    with Cluster(2) as cluster:
        server = cluster.start(1, [sys.executable, "-c", SERVE, cluster.address(1)], stdout=subprocess.PIPE, text=True)
        turns = 200 if how == "cable" else int(10 * (SILENT_S + 2))
        members = [] if "stranger" in how else [cluster.address(1)]
        words = [sys.executable, "-c", SEND, cluster.address(1), str(turns), *members]
        sender = cluster.start(0, words, stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "met\n"
        if "cable" in how:
            cluster.pull_cable(1)
        else:
            os.kill(server.pid, signal.SIGSTOP)
        said, _ = sender.communicate(timeout=60)
        os.kill(server.pid, signal.SIGKILL)
        server.communicate(timeout=20)
    assert said == (f"{cluster.address(1)}\n" if how == "cable" else "nothing\n")
