"""Network partition: at most one part of a run continues, also where a firewall answers for the other."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import pytest

import launching
from cluster import Cluster
from machines import do, needs_cluster
from paceline.launch.signals import RESUME_CODE

pytestmark = [needs_cluster, pytest.mark.long]
COUNT = 120
TOLD = "the larger part of a run continues"


@contextlib.contextmanager
def refused(cluster, one, other):
    """As with a firewall that rejects: each connection of ``one`` to ``other`` breaks, and each new one is refused. Its
    own kernel answers for the address, where no process listens."""
    do("ip", "-n", cluster.name(one), "addr", "add", f"{cluster.address(other)}/32", "dev", "lo")
    try:
        yield
    finally:
        do("ip", "-n", cluster.name(one), "addr", "del", f"{cluster.address(other)}/32", "dev", "lo")


def begin(cluster, folder, least):
    environment = {
        "PYTHONPATH": launching.python_path(),
        "PACELINE_NODES": f"{least}:{cluster.num_nodes}",
        "PACELINE_WAIT": "3",
    }
    command = [sys.executable, str(launching.HERE / "scripts" / "parted.py"), str(folder), str(COUNT)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [cluster.start(node, command, environment=environment, **pipes) for node in range(cluster.num_nodes)]


def until(what, running, limit_s=200.0):
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end
        assert all(node.poll() is None for node in running), [node.communicate(timeout=60)[1] for node in running]
        time.sleep(0.05)


def steps(folder, node):
    path = folder / f"steps{node}"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.dear
@pytest.mark.parametrize(
    ("how", "sides", "least"),
    [
        ("refused", [[0], [1]], 1),
        ("cable", [[0, 3], [1, 2]], 2),
        ("refused", [[0, 3], [1, 2]], 2),
        ("cable", [[0], [1, 2]], 1),
    ],
)
def test_one_part_goes_on_at_most(tmp_path, how, sides, least):
    nodes = sorted(node for side in sides for node in side)
    on = max(sides, key=lambda side: (len(side), -min(side)))
    with Cluster(len(nodes)) as cluster, contextlib.ExitStack() as walls:
        running = begin(cluster, tmp_path, least)
        until(lambda: all(len(steps(tmp_path, node)) > 3 for node in nodes), running)
        apart = [(one, other) for side in sides for one in side for other in nodes if other not in side]
        if how == "cable":
            for node in set(nodes) - set(on):
                cluster.pull_cable(node)
        else:
            for one, other in apart:
                walls.enter_context(refused(cluster, one, other))
        said = [node.communicate(timeout=100)[1] for node in running]
    assert [node.returncode for node in running] == [0 if node in on else RESUME_CODE for node in nodes], said
    for node in nodes:
        taken = steps(tmp_path, node)
        if node in on:
            assert taken[-1] == (COUNT - 1, len(on))
        else:
            assert TOLD in said[node]
            # no step without the others: alone, or with those who are cut off as well
            assert {world for _, world in taken} == {len(nodes)}
