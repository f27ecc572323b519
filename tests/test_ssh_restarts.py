"""Runs over ssh outlive the loss of every node, of a line, of a machine that comes back; stand-ins for scripts."""

import json
import os
import signal
from pathlib import Path

import pytest

import launching
from launching import finish
from paceline.interrupt import RESUME_CODE
from sshd import Sshd, unavailable
from test_restarts import HEAD

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "sshd is here")
# as when the power of a host fails: its script, and what the launcher has there
FAIL_POWER = """
def fail_power():
    launcher = os.getppid()
    outlet = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (outlet, launcher, os.getpid()):
        os.kill(pid, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


@pytest.fixture
def start(sshd, tmp_path):
    """Three nodes over ssh, of which two must train; gives what was said, and each node's lives."""

    def call(script, *words, code=0, nodes=("--nodes", "2:3"), before=lambda process: None):
        path = tmp_path / "script.py"
        path.write_text(HEAD + FAIL_POWER + script)
        given = "run", "-H", "one,two,three", *nodes, "--plan", "sequential", *words, path, tmp_path
        process = launching.begin(*given, PACELINE_SSH=sshd.ssh)
        before(process)
        _, errors = finish(process, code)
        lives = [
            [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"life-{node}-*"))] for node in range(3)
        ]
        return errors, lives

    return call


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_all_are_killed_and_all_start_again_to_resume(start):
    errors, lives = start(
        "if JOINS: time.sleep(60)\njoin()\n"
        "if not RESUMES: until('joined-0-1', 'joined-1-1', 'joined-2-1'), fail_power()\n"
    )
    assert "(restart 1 of 3)" in errors
    assert all(each[-1]["resumes"] and not each[-1]["joins"] for each in lives)
    assert len({each["PACELINE_SECRET"] for life in lives for each in life}) == 2


def test_a_machine_that_comes_back_is_reached_by_its_name_and_its_node_joins(start):
    errors, lives = start(
        "join()\nif JOINS: sys.exit()\nif NODE == 1: until('joined-0-1', 'joined-2-1'), time.sleep(0.5), fail_power()\n"
        "until('joined-1-2')"
    )
    assert "lost the line to two; trying to reach it again" in errors
    assert [len(each) for each in lives] == [1, 2, 1]
    assert lives[1][1]["joins"]
    assert lives[1][1]["PACELINE_SECRET"] == lives[0][0]["PACELINE_SECRET"]


@pytest.mark.dear
def test_a_node_that_lost_its_line_alone_is_found_where_it_trains(start, tmp_path):
    def cut(process):
        until(tmp_path, "joined-0-1", "joined-1-1", "joined-2-1")
        (victim,) = [
            pid for pid in children(process.pid) if b"two" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
        os.kill(victim, signal.SIGKILL)
        until(tmp_path, "found")

    errors, lives = start(
        "signal.signal(signal.SIGHUP, lambda *_: touch('hung'))\njoin()\n"
        "if NODE == 1: until('hung'), time.sleep(2), touch('found')\nuntil('found')",
        before=cut,
    )
    assert "lost the line to two; trying to reach it again" in errors
    assert [len(each) for each in lives] == [1, 1, 1]


def until(folder, *names):
    import time

    end = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end, names
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("script", "code", "lives"),
    [
        (f"join()\nuntil(*(f'joined-{{n}}-{{LIFE}}' for n in range(3))), sys.exit({RESUME_CODE})", RESUME_CODE, 1),
    ],
)
def test_without_restarts_the_exit_code_asks_for_a_resume(start, script, code, lives):
    _, found = start(script, "--restarts", 0, code=code)
    assert found[0][0]["resumes"] is False


@pytest.mark.dear
def test_the_same_error_twice_is_the_scripts(start):
    errors, lives = start("join()\nfail(IndexError('x'), 12)", "--restarts", 3, nodes=(), code=1)
    assert [len(each) for each in lives] == [2, 2, 2]
    assert "failed twice after 12 steps with the same error (IndexError: x): not started again" in errors


def test_what_fails_before_anybody_has_joined_is_told_at_once(start):
    errors, lives = start("sys.exit('no such file')", code=1)
    assert max(len(each) for each in lives) == 1
    assert "no such file" in errors
