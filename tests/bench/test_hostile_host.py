"""A host that does not belong changes nothing: not a bit of the weights; and reads nothing of what is encrypted."""

import json
import subprocess
import sys

import pytest

import launching
from machines import needs_cluster
from paceline_bench.cluster.security import NODES, faults

MESSAGES = 300


@pytest.mark.dear
@needs_cluster
def test_a_stranger_says_everything_to_every_open_port_and_a_listener_hears_all():
    """10,000 messages in a minute: python -m paceline_bench.cluster.security."""
    asked = ["--messages", str(MESSAGES), "--seconds", "3", "--pause", "0.25", "--json"]
    command = [sys.executable, "-m", "paceline_bench.cluster.security", *asked]
    done = subprocess.run(
        command, env=launching.environment(), capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    got = json.loads(done.stdout)
    assert faults(got, MESSAGES, most_s=60.0) == []
    # of each training the meeting point, and where each node can be met after a loss: gloo's ports and TLS's are closed
    assert len(got["doors"]) == 2 * (1 + NODES), got["doors"]
