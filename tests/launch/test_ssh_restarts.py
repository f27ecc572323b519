"""Runs over ssh survive failures of all nodes, of a connection, and of a machine that returns; without training."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from test_restarts import HEAD

import launching
from launching import finish
from paceline.launch.detach import Detached
from paceline.launch.signals import RESUME_CODE
from sshd import Sshd, unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "sshd is here")
# as after a power failure of a host: kills the script and the agent there; the agent is stopped first, since it gets
# SIGTERM at the other's end, and would note an exit code
FAIL_POWER = """
def fail_power():
    launcher = os.getppid()
    outlet = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGSTOP)
    for pid in (outlet, launcher, os.getpid()):
        os.kill(pid, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


@pytest.fixture
def start(sshd, tmp_path):
    """Three nodes over ssh, of which two must train; returns the output, and the variables of each node's starts."""

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


def test_a_machine_that_returns_is_reconnected_by_its_name_and_its_node_joins(start):
    errors, lives = start(
        "join()\nif JOINS: sys.exit()\nif NODE == 1: until('joined-0-1', 'joined-2-1'), time.sleep(0.5), fail_power()\n"
        "until('joined-1-2')"
    )
    assert "the connection to two failed; reconnecting" in errors
    assert [len(each) for each in lives] == [1, 2, 1]
    assert lives[1][1]["joins"]
    assert lives[1][1]["PACELINE_SECRET"] == lives[0][0]["PACELINE_SECRET"]


@pytest.mark.dear
def test_a_node_that_lost_only_its_connection_is_found_where_it_trains(start, tmp_path):
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
    assert "the connection to two failed; reconnecting" in errors
    assert [len(each) for each in lives] == [1, 1, 1]


def until(folder, *names):
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
def test_the_same_error_twice_is_not_retried(start):
    errors, lives = start("join()\nfail(IndexError('x'), 12)", "--restarts", 3, nodes=(), code=1)
    assert [len(each) for each in lives] == [2, 2, 2]
    assert "failed twice after 12 steps with the same error (IndexError: x): not started again" in errors


def test_an_error_before_any_process_has_joined_is_not_retried(start):
    errors, lives = start("sys.exit('no such file')", code=1)
    assert max(len(each) for each in lives) == 1
    assert "no such file" in errors


@pytest.fixture
def detached(sshd, tmp_path):
    """Three nodes of a script that follows HEAD, detached, whose launcher is killed once all have joined; gives the
    run's name, and how commands are called and begun."""
    where = {"PACELINE_SSH": sshd.ssh, "XDG_STATE_HOME": str(tmp_path / "state")}

    def begin(*words):
        return launching.begin(*words, own_session=True, **where)

    def call(*words, code=0):
        return finish(begin(*words), code)

    def start(script, *words):
        path = tmp_path / "script.py"
        path.write_text(HEAD + FAIL_POWER + script)
        _, errors = call("run", "-H", "one,two,three", *words, "--detach", "--plan", "sequential", path, tmp_path)
        (name,) = re.findall(r"^(\S+) continues; ", errors, re.MULTILINE)
        until(tmp_path, "joined-0-1", "joined-1-1", "joined-2-1")
        folder = tmp_path / "state" / "paceline" / "detached" / name
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        wait_while(lambda: Detached(folder).running)
        assert "no launcher" in call("attach")[0]
        return name, call, begin

    yield start
    for name in ("hung", "go", "end"):  # the nodes end in any case
        (tmp_path / name).touch()


def wait_while(true):
    end = time.monotonic() + 60
    while true():
        assert time.monotonic() < end
        time.sleep(0.02)


def num_lives(folder):
    return [len(list(folder.glob(f"life-{node}-*"))) for node in range(3)]


@pytest.mark.dear
def test_another_launcher_finds_the_nodes_and_starts_a_failed_one_again(detached, tmp_path):
    name, call, _ = detached(
        "join()\nif JOINS: touch('end')\nif NODE == 1 and not JOINS: until('go'), touch('dies'), fail_power()\n"
        "until('end')",
        *("--nodes", "2:3"),
    )
    (tmp_path / "go").touch()
    until(tmp_path, "dies")
    output, errors = call("attach", name)
    assert f"the launcher of {name} was killed; this one replaces it" in output + errors
    assert num_lives(tmp_path) == [1, 2, 1]
    assert json.loads((tmp_path / "life-1-2").read_text())["joins"]
    assert re.search(rf"^{name}  exit code 0 ", call("attach")[0], re.MULTILINE)


@pytest.mark.dear
def test_another_launcher_receives_the_exit_codes_of_the_nodes(detached, tmp_path):
    """One node ended before it started, when no launcher received the exit code."""
    name, _, begin = detached(
        "join()\nif NODE == 1: until('go'), touch('gone'), sys.exit()\nuntil('end'), sys.exit(3 * NODE)"
    )
    (tmp_path / "go").touch()
    until(tmp_path, "gone")
    follower = begin("attach", name)
    wait_while(lambda: not Detached(tmp_path / "state" / "paceline" / "detached" / name).running)
    (tmp_path / "end").touch()
    output, _ = finish(follower, 6)
    assert "three failed first, with exit code 6" in output
    assert num_lives(tmp_path) == [1, 1, 1]


def test_a_run_without_its_launcher_is_stopped(detached, tmp_path):
    name, call, _ = detached(
        "signal.signal(signal.SIGINT, lambda *_: (touch(f'saved-{NODE}'), sys.exit(130)))\njoin()\nuntil('end')",
        *("--nodes", "2:3"),
    )
    call("attach", "--stop", name, code=130)
    assert all((tmp_path / f"saved-{node}").exists() for node in range(3))
    assert num_lives(tmp_path) == [1, 1, 1]
