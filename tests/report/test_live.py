"""The status server replies to processes of the same user only, and leaves no file behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.launch.doctor import live_status
from paceline.report import status_server
from paceline.report.activity import Activity
from paceline.report.status_server import StatusServer


def ours():
    """The server names of this process only: other tests on the machine start and end servers meanwhile."""
    return {name for name in status_server.names() if name.startswith(f"{status_server.PREFIX}{os.getpid()}-")}


@pytest.fixture
def served():
    """A server that echoes requests."""
    before = ours()
    server = StatusServer(lambda question: {"asked": question})
    (name,) = ours() - before
    yield name
    server.close()


@pytest.fixture
def particular():
    """A server that accepts only JSON objects."""
    before = ours()
    server = StatusServer(lambda question: {"asked": question.get("stacks")})
    (name,) = ours() - before
    yield name
    server.close()


@pytest.mark.parametrize(
    "nonsense", [b"nonsense", b"[]", b"5", b"[" * 4000, b"\xff\xfe"], ids=["words", "list", "number", "deep", "bytes"]
)
def test_it_answers_and_goes_on_after_nonsense(served, particular, nonsense):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(f"\0{particular}")
        line.sendall(nonsense[:4095] + b"\n")
        assert line.makefile("rb").read() == b""
    assert status_server.query(particular, stacks=[1]) == {"asked": [1]}
    for _ in range(3):
        assert status_server.query(served, stacks=[1, 2]) == {"asked": {"stacks": [1, 2]}}


@pytest.mark.parametrize("name", [b"x", b"\xff-1", b"%d-\xff"], ids=["no number", "no UTF-8", "of this process"])
def test_whatever_names_others_choose_stacks_are_found(name):
    """Any user may bind such a name. Regression: a name without a pid ended the querying process."""
    server = StatusServer(lambda question: {"stacks": {"rank 0": "here\n"}})
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(b"\0" + status_server.PREFIX.encode() + name.replace(b"%d", b"%d" % os.getpid()))
        try:
            assert "rank 0:\nhere\n" in status_server.stacks({os.getpid()})  # another test may have left one here
        finally:
            server.close()


def test_what_answers_and_is_no_run_is_none_of_those_that_are_asked_for(served, particular):
    """Regression: `doctor --run` raised a KeyError if another server replied on the machine."""
    with pytest.raises(ValueError, match="no process of run 'mine' answers on this machine"):
        live_status.query("mine")


def test_after_its_end_nothing_is_left():
    before = ours()
    server = StatusServer(lambda question: {})
    (name,) = ours() - before
    server.close()
    end = time.monotonic() + 10
    while name in status_server.names():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert status_server.query(name) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
def test_another_user_is_not_answered(served):
    asks = (
        "import os, socket, sys\nos.setuid(65534)\n"
        "line = socket.socket(socket.AF_UNIX)\nline.settimeout(20)\nline.connect('\\0' + sys.argv[1])\n"
        "try:\n    line.sendall(b'{}\\n')\n    print(line.recv(9))\nexcept OSError:\n    print(b'')"
    )
    done = subprocess.run([sys.executable, "-c", asks, served], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "b''\n"


def test_who_does_not_answer_is_not_waited_for(tmp_path):
    """The kernel accepts a request also for a stopped process."""
    script = (
        "import time\nfrom paceline.report.status_server import StatusServer\nserver = StatusServer(lambda question: "
        "{})\n"
        "print('here', flush=True)\ntime.sleep(100)"
    )
    source = str(Path(status_server.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
    )
    try:
        assert process.stdout.readline() == b"here\n"
        (name,) = (name for name in status_server.names() if name.startswith(f"{status_server.PREFIX}{process.pid}-"))
        assert status_server.query(name) == {}
        os.kill(process.pid, signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        start = time.monotonic()
        assert status_server.query(name, 0.3) is None
        assert time.monotonic() - start < 10
        with pytest.raises(ValueError, match=rf"without an answer: .*pid {process.pid}, stopped: .*python"):
            live_status.query(str(tmp_path))
    finally:
        process.kill()
        process.communicate()


def test_a_run_is_found_by_its_folder_or_its_id_and_unknown_ones_are_told(tmp_path):
    activity = Activity()
    reply = {"run": "1121-1000-ab", "folder": str(tmp_path), "command": ["train.py"], "pid": 7, "node": 0}
    reply |= {"num_nodes": 1, "local_rank": 0, "local_size": 1}
    reply |= {"mine": activity.status(), "everyone": {0: activity.status()}}
    server = StatusServer(
        lambda question: {**reply, **({"stacks": {"rank 0": "  here\n"}} if "stacks" in question else {})}
    )
    try:
        for name in (str(tmp_path), "1121-1"):
            head, state, *stack = live_status.lines(live_status.query(name, stacks=True))
            assert head == "1121-1000-ab: train.py, 1 node"
            text = "at step 0: outside of a step, in the script's own code"
            assert state.startswith(f"rank 0 on {activity.host}, {text}")
            assert stack == ["", "rank 0:", "  here"]
        with pytest.raises(ValueError, match=r"no process of run '0304' answers.*running here: .*1121-1000-ab"):
            live_status.query("0304")
    finally:
        server.close()
