"""A node that loses its launcher trains on with the others; when no node has its launcher, all save and end."""

import json
import signal
import subprocess
import sys
import time

import pytest

from launching import HERE, environment
from paceline.checkpoint.checkpoint import read_newest
from paceline.launch.local import free_port

# nohup, under which tests may run, leaves a hang-up ignored
NODE = (
    "import signal, sys; signal.signal(1, signal.SIG_DFL); "
    "from paceline.launch import node_agent; sys.exit(node_agent.main())"
)


@pytest.fixture
def nodes(tmp_path):
    """Two, as ssh starts them; stdin is the connection to the launcher."""
    started, port = [], free_port()
    for node in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", NODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        started.append(process)
        orders = {
            **{"node": node, "sizes": [1, 1], "host": "127.0.0.1", "engine": "sequential", "folder": str(tmp_path)},
            **{
                "stays": False,
                "returns": 3,
                "environment": {"PACELINE_NODES": "1:2", "PACELINE_SECRET": "of this run"},
            },
            "port": port,
            "command": [sys.executable, str(HERE / "scripts" / "hung_up.py"), str(tmp_path)],
        }
        process.stdin.write(json.dumps(orders).encode() + b"\n")
        process.stdin.flush()
    yield started
    for process in started:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def until_step(folder, count):
    end = time.monotonic() + 200.0
    while True:
        said = [path.read_text() for path in folder.glob("steps.*")]
        if len(said) == 2 and all(text and int(text) >= count for text in said):
            return
        assert time.monotonic() < end, said
        time.sleep(0.02)


@pytest.mark.dear
@pytest.mark.parametrize("cut", [(1,), (0,), (0, 1)], ids=["one", "the one that leads", "both"])
def test_one_trains_on_and_all_of_them_save_and_end(nodes, tmp_path, cut):
    until_step(tmp_path, 5)
    for node in cut:
        nodes[node].stdin.close()
    codes = [process.wait(60) for process in nodes]
    said = [process.stdout.read().decode() for process in nodes]
    steps = [int((tmp_path / f"steps.{node}").read_text()) for node in range(2)]
    if len(cut) == 2:
        assert codes == [128 + signal.SIGHUP] * 2, said
        kept = read_newest(tmp_path / "run")
        assert 5 <= kept.step < 200
        assert "saved" in said[0]
    else:
        assert codes == [0, 0], said
        assert steps == [200, 200]
        assert not any("failed at step" in words or "lost" in words for words in said), said
    assert not any("Traceback" in words for words in said), said
