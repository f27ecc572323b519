"""Nodes that a firewall separates are named in an error within seconds: before training, and for a later lane."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

import launching
from cluster import Cluster
from machines import needs_cluster, refuse_calls

pytestmark = [needs_cluster, pytest.mark.long]
LIMIT_S = 10.0
PORT = 29500


def begin(cluster, script, *arguments):
    environment = {"PYTHONPATH": launching.python_path()}
    command = [sys.executable, str(launching.HERE / "scripts" / script), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [cluster.start(node, command, environment=environment, port=PORT, **pipes) for node in range(2)]


@pytest.mark.dear
def test_calls_in_one_direction_alone_are_told_to_both_before_training(tmp_path):
    """Rank 1 reaches the meeting point, and rank 0 reaches rank 1; rank 1 reaches nothing else of rank 0."""
    with Cluster(2) as cluster, refuse_calls(cluster, 0, caller=1, but=PORT):
        nodes = begin(cluster, "meeting.py", tmp_path)
        errors = [node.communicate(timeout=100)[1] for node in nodes]
    want = (
        r"^paceline: rank 1 on node1 \(10\.77\.0\.2\) does not reach rank 0 on node0 \(10\.77\.0\.1\) at port \d+: no "
        r"answer within 5 s; a firewall that lets only one direction through\?"
    )
    for text in errors:
        assert len(re.findall(want, text, re.MULTILINE)) == 1, text


@pytest.mark.dear
def test_a_lane_that_cannot_be_connected_any_more_is_told_within_ten_seconds(tmp_path):
    """Heartbeats continue; only new connections are refused."""
    with Cluster(2) as cluster:
        nodes = begin(cluster, "lane.py", tmp_path)
        end = time.monotonic() + 90
        while not all((tmp_path / f"up{node}").exists() for node in range(2)):
            assert time.monotonic() < end
            assert all(node.poll() is None for node in nodes)
            time.sleep(0.05)
        with refuse_calls(cluster, 0, caller=1), refuse_calls(cluster, 1, caller=0):
            (tmp_path / "go").touch()
            said = [node.communicate(timeout=40)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    for text in said:
        took_s, words = text.split(" ", 1)
        assert re.search(r"rank [01] on node[01] .* met rank [01] on node[01] .*, but on lane 'late' ", words), text
        assert float(took_s) < LIMIT_S + 2
