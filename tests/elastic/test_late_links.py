"""A link with emulated delay: exact delay both ways, no loss, the given rate; it is removed with its process."""

import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from machines import left_behind, needs_cluster, needs_tun
from paceline_bench.cluster.namespaces import Cluster, check_delay

DELAY_S, NUM_BYTES, PORT = 0.005, 3_000_000, 9
# echoes a byte until one that is not x, then takes all that comes and answers with its hash
HEAR = f"""
import hashlib, socket
with socket.create_server(("10.77.0.1", {PORT})) as server:
    line, _ = server.accept()
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while (byte := line.recv(1)) == b"x":
    line.sendall(byte)
taken, left = hashlib.sha256(), {NUM_BYTES}
while left:
    data = line.recv(left)
    taken.update(data)
    left -= len(data)
line.sendall(taken.digest())
"""
CALL = f"""
import hashlib, json, os, socket, time
end = time.monotonic() + 20
while True:
    try:
        line = socket.create_connection(("10.77.0.1", {PORT}), 5)
        break
    except OSError:
        assert time.monotonic() < end
        time.sleep(0.05)
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
line.settimeout(30)
pings = []
for _ in range(15):
    start = time.monotonic()
    line.sendall(b"x")
    line.recv(1)
    pings.append(time.monotonic() - start)
data = os.urandom({NUM_BYTES})
line.sendall(b".")
start = time.monotonic()
line.sendall(data)
whole = line.recv(32) == hashlib.sha256(data).digest()
print(json.dumps([min(pings), whole, time.monotonic() - start]))
"""


@needs_cluster
@needs_tun
def test_a_round_trip_is_twice_as_late_and_bytes_come_whole_at_the_rate():
    with Cluster(2, "100mbit", delay_ms=1e3 * DELAY_S) as cluster:
        hearing = cluster.start(0, [sys.executable, "-I", "-c", HEAR])
        calling = cluster.start(1, [sys.executable, "-I", "-c", CALL], stdout=subprocess.PIPE, text=True)
        output, _ = calling.communicate(timeout=60)
        assert hearing.wait(20) == 0
        assert NUM_BYTES < cluster.sent_bytes(1) < 1.5 * NUM_BYTES
    ping_s, whole, took_s = json.loads(output)
    assert 2 * DELAY_S <= ping_s < 2 * DELAY_S + 0.05
    assert whole
    # at 100 Mbit/s, less what both ends' bursts let through at once
    assert took_s > (NUM_BYTES - 2 * 262_144) * 8 / 100e6
    assert not left_behind()


def _hold(pipe):
    with Cluster(1, "100mbit", 5) as cluster:
        pipe.send(cluster.start(0, ["sleep", "60"]).pid)
        time.sleep(60)


def _runs(pid):
    """A process that has ended, and was not waited for, has no command line."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


@needs_cluster
@needs_tun
def test_late_cables_and_nodes_go_with_a_maker_that_is_killed():
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    maker = fork.Process(target=_hold, args=(there,))
    maker.start()
    try:
        assert here.poll(20)
        node = here.recv()
        assert f"pl{maker.pid}v0" in left_behind(maker.pid)
    finally:
        maker.kill()
        maker.join()
    end = time.monotonic() + 10
    while _runs(node) or any("v" in name for name in left_behind(maker.pid)):
        assert time.monotonic() < end
        time.sleep(0.02)
    with Cluster(1):  # sweeps the rest
        assert not left_behind(maker.pid)
    assert not left_behind()


@pytest.mark.parametrize(
    ("delay_ms", "rate", "said"),
    [
        (-1.0, "100mbit", "a delay of -1 ms is none of a link's; give 0 to 1000 ms one way, such as 5"),
        (float("nan"), "100mbit", "a delay of nan ms is none"),
        (5.0, None, "the link's rate is not limited; give --rate 200mbit or less"),
        (5.0, "1gbit", "the link's rate is 1gbit; give --rate 200mbit or less"),
    ],
)
def test_a_delay_that_nobody_can_make_is_told(delay_ms, rate, said):
    with pytest.raises(ValueError, match=said):
        check_delay(delay_ms, rate)
    assert check_delay(5.0, "200mbit") == 5.0
    assert check_delay(0.0, None) == 0.0
