"""Failed nodes are restarted while one has all state; if none has, the whole run is, from its newest checkpoint."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from launching import begin, finish
from paceline.launch import local
from paceline.launch.signals import RESUME_CODE
from paceline.launch.supervise import node_restarts, restart_policy
from paceline.launch.supervise.restart_policy import Ending, Restarts, fault

DEADLINE_S = 30.0
# a process of the tests: it writes down its variables; `until` waits for files, `die` ends it as a power failure does
HEAD = """
import json, os, signal, sys, time
from pathlib import Path
from paceline.report import process_status as status
from paceline.link.net.ticket import JoinTicket
FOLDER, NODE = Path(sys.argv[1]), int(os.environ["GROUP_RANK"])
LIFE = len(list(FOLDER.glob(f"life-{NODE}-*"))) + 1
JOINS, RESUMES = "PACELINE_JOIN_TICKET" in os.environ, os.environ.get("PACELINE_RESUME") == "1"
given = {name: os.environ.get(name) for name in ("PACELINE_SECRET", "MASTER_PORT", "PACELINE_WAIT", "PACELINE_NODE")}
(FOLDER / f"life-{NODE}-{LIFE}").write_text(json.dumps({**given, "joins": JOINS, "resumes": RESUMES}))
def until(*names):
    end = time.monotonic() + 60
    while not all((FOLDER / name).exists() for name in names):
        if time.monotonic() > end:
            sys.exit(f"no {names}")
        time.sleep(0.01)
def touch(name): (FOLDER / name).touch()
def die(): os.kill(os.getpid(), signal.SIGKILL)
def join():
    if "PACELINE_TICKET_FILE" in os.environ:
        ticket = JoinTicket(os.environ.get("PACELINE_SECRET", ""), "2:3", ["name address 1 host"])
        ticket.write(Path(os.environ["PACELINE_TICKET_FILE"]))
    if "PACELINE_NOTES" in os.environ:
        Path(os.environ["PACELINE_NOTES"], "met").touch()
    status.report(joined=True)
    touch(f"joined-{NODE}-{LIFE}")
def fail(error, step):
    status.failed(error, step, isinstance(error, ConnectionError))
    sys.exit(1)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts three nodes of a script after HEAD; returns the exit code, and the variables of each node's starts."""
    monkeypatch.setattr(node_restarts, "RETRY_DELAY_S", 0.5)  # longer than the time between failures of one cause
    monkeypatch.setattr(restart_policy, "RETRY_DELAY_S", 0.02)
    for name in ("PACELINE_SECRET", "PACELINE_TICKET_FILE"):
        monkeypatch.delenv(name, raising=False)

    def call(script, least=2, num_nodes=3, **how):
        how = {"returns": 3, "restarts": 3, **how}
        command = [sys.executable, "-c", HEAD + script, str(tmp_path)]
        code = local.start(command, "sequential", num_nodes, min_nodes=least, **how)
        lives = {
            node: [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"life-{node}-*"))]
            for node in range(num_nodes)
        }
        return code, lives

    return call


def test_with_fewer_nodes_than_the_minimum_failed_nodes_are_restarted_and_join_the_one_with_all_state(start, capfd):
    """Story: with 2:3, after two nodes were killed, the launcher ended the last one after 15 s."""
    code, lives = start(
        "if not JOINS:\n    join()\n    if NODE: until('joined-0-1'), die()\n    until('joined-1-2', 'joined-2-2')\n"
        "else:\n    until('life-1-2', 'life-2-2'), join()\n"
    )
    assert code == 0
    assert [len(each) for each in lives.values()] == [1, 2, 2]
    assert all(each[1]["joins"] and not each[1]["resumes"] for node, each in lives.items() if node)
    assert "resumes from" not in capfd.readouterr().err


def test_a_joining_node_that_was_admitted_holds_the_state_as_well(start, capfd):
    code, lives = start(
        "if not JOINS:\n    join()\n    if NODE == 1: die()\n    until('joined-1-2'), die()\n"
        "elif NODE == 1:\n    join(), until('joined-0-2', 'joined-2-2')\nelse:\n    join()\n"
    )
    assert code == 0
    assert [len(each) for each in lives.values()] == [2, 2, 2]
    assert "resumes from" not in capfd.readouterr().err


def test_all_are_killed_and_all_start_again_to_resume_by_themselves(start, capfd, monkeypatch):
    """Processes left of the earlier start could not join: port and secret are new."""
    code, lives = start("join()\nif not RESUMES: until('joined-0-1', 'joined-1-1', 'joined-2-1'), die()\n")
    assert code == 0
    first, then = zip(*lives.values(), strict=True)
    assert not any(each["resumes"] for each in first)
    assert all(each["resumes"] and not each["joins"] for each in then)
    for name in ("PACELINE_SECRET", "MASTER_PORT"):
        assert len({each[name] for each in first}) == len({each[name] for each in then}) == 1
        assert first[0][name] != then[0][name]
    errors = capfd.readouterr().err
    assert "failed with exit code 137; it resumes from its newest checkpoint in 0.02 s (restart 1 of 3)" in errors


def test_joining_nodes_have_no_run_to_join_after_the_last_member_failed(start):
    """They would wait for long; instead they are restarted as members."""
    code, lives = start(
        "if RESUMES:\n    sys.exit()\nif JOINS:\n    time.sleep(60)\njoin()\n"
        "if NODE: until('joined-0-1'), die()\nuntil('life-1-2', 'life-2-2'), die()\n"
    )
    assert code == 0
    assert [[each["joins"] for each in lives[node]] for node in range(3)] == [[0, 0], [0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("num_restarts", [0, 2])
def test_nodes_that_cannot_continue_by_themselves_are_resumed_so_often(start, num_restarts, capfd):
    code, lives = start(
        f"join()\nuntil(*(f'joined-{{n}}-{{LIFE}}' for n in range(3))), sys.exit({RESUME_CODE})", restarts=num_restarts
    )
    assert code == RESUME_CODE
    assert [len(each) for each in lives.values()] == [1 + num_restarts] * 3
    assert ("after 2 restarts (--restarts): it ends" in capfd.readouterr().err) == bool(num_restarts)


def test_a_node_that_is_still_saving_is_given_time(start, tmp_path):
    """Story of a draft: the others had ended with RESUME_CODE, and the node that was writing was killed."""
    code, _ = start(
        "join()\nif RESUMES: sys.exit()\nuntil('joined-0-1', 'joined-1-1', 'joined-2-1')\n"
        f"if not NODE: time.sleep(0.5), touch('saved')\nsys.exit({RESUME_CODE})"
    )
    assert code == 0
    assert (tmp_path / "saved").exists()


def test_the_same_error_twice_after_the_same_number_of_steps_is_not_retried(start, capfd):
    code, lives = start(
        "join()\nuntil('joined-0-1', 'joined-1-1', 'joined-2-1')\nfail(IndexError(f'at {os.getpid()}'), 12)"
    )
    assert code == 1
    assert [sum(not each["joins"] for each in life) for life in lives.values()] == [2, 2, 2]
    errors = capfd.readouterr().err
    assert "failed twice after 12 steps with the same error (IndexError: at " in errors
    assert errors.rstrip().endswith("not started again")


def test_an_exit_code_of_the_scripts_own_is_an_error_too(start):
    code, lives = start("join()\nstatus.report(step=4)\nsys.exit(9)", least=0, returns=0, num_nodes=1)
    assert (code, len(lives[0])) == (9, 2)


def test_an_error_before_any_process_has_joined_is_not_retried(start, capfd):
    code, lives = start("raise ImportError('no module named so')")
    assert code == 1
    assert [len(each) for each in lives.values()] == [1, 1, 1]
    assert capfd.readouterr().err.count("paceline: the run failed before training began: not started again") == 1


def test_errors_of_failed_links_are_not_the_scripts(start, capfd):
    """Processes that lose a killed one fail at the same step, with the same text, each time."""
    code, lives = start(
        "join()\nuntil(f'joined-0-{LIFE}', f'joined-1-{LIFE}')\nif LIFE == 3: sys.exit()\nif NODE: die()\n"
        "fail(ConnectionError('lost rank 1'), 5)",
        least=0,
        returns=0,
        num_nodes=2,
    )
    assert (code, len(lives[0])) == (0, 3)


@pytest.mark.dear
def test_a_node_that_fails_too_often_makes_the_others_save_and_end(start, tmp_path):
    code, lives = start(
        "if JOINS: sys.exit(7)\njoin()\nif RESUMES: sys.exit()\n"
        "signal.signal(signal.SIGTERM, lambda *_: (touch('saved'), sys.exit(143)))\n"
        "until('joined-0-1', 'joined-1-1')\nif NODE: die()\ntime.sleep(60)",
        num_nodes=2,
    )
    assert code == 0
    assert [len(lives[0]), len(lives[1])] == [2, 5]
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(("num_restarts", "code"), [(0, 137), (1, 0)])
def test_a_run_that_tolerates_no_failure_ends_with_the_first_or_is_restarted_as_a_whole(start, num_restarts, code):
    script = (
        "signal.signal(15, signal.SIG_DFL)\njoin()\nuntil(f'joined-0-{LIFE}', f'joined-1-{LIFE}')\n"
        "if RESUMES: sys.exit()\nif NODE: die()\nuntil('joined-1-1'), time.sleep(0.5), sys.exit(5)"
    )
    found, lives = start(script, least=0, returns=0, restarts=num_restarts, num_nodes=2)
    assert (found, len(lives[0]), len(lives[1])) == (code, 1 + num_restarts, 1 + num_restarts)


@pytest.mark.parametrize("returns", [0, 3])
def test_nodes_that_fail_after_another_has_finished_are_resumed(start, returns):
    """Story: the last node that had not finished was killed while its process ended, and the run failed."""
    code, lives = start(
        "if RESUMES: sys.exit()\nif JOINS: time.sleep(0.5), fail(ConnectionError('none of them answers'), 0)\njoin()\n"
        "until('joined-0-1', 'joined-1-1', 'joined-2-1')\nif NODE: time.sleep(0.3), die()\n"
        + "until('life-1-2', 'life-2-2')"
        * bool(returns),
        returns=returns,
    )
    assert any(each["joins"] for each in lives[1]) == bool(returns)
    assert code == 0
    assert all(each[-1]["resumes"] for each in lives.values())


def test_an_error_of_the_script_after_another_node_has_finished_is_not_retried(start):
    code, lives = start(
        "join()\nuntil('joined-0-1', 'joined-1-1')\nif NODE: time.sleep(0.3), fail('A', 3)", num_nodes=2, returns=0
    )
    assert (code, len(lives[0])) == (1, 1)


def test_ctrl_c_between_two_starts_ends_it_at_once(start, monkeypatch, tmp_path):
    monkeypatch.setattr(restart_policy, "RETRY_DELAY_S", 60.0)

    def stop():
        end = time.monotonic() + DEADLINE_S
        while not (tmp_path / "joined-0-1").exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)  # by then the process has ended, and the launcher waits
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    begin_s = time.monotonic()
    code, lives = start("join()\ndie()", num_nodes=1, least=0, returns=0)
    stopping.join()
    assert (code, len(lives[0])) == (130, 1)
    assert time.monotonic() - begin_s < DEADLINE_S


def test_how_errors_are_compared():
    assert fault(1, {"error": "KeyError: 'x'", "step": 3}) == ("KeyError: 'x'", 3)
    assert fault(1, {"error": "LinkError: lost rank 1", "step": 3, "link": True}) is None
    assert fault(RESUME_CODE, {"step": 3}) is None
    assert fault(3, {}) == ("exit code 3", None)


@pytest.mark.parametrize(
    ("endings", "pauses"),
    [
        ([Ending(0)], [None]),
        ([Ending(1, begun=True)] * 4, [1.0, 2.0, 4.0, None]),
        ([Ending(1)], [None]),
        ([Ending(137, killed=True)] * 2, [1.0, 2.0]),
        ([Ending(1, frozenset({("A: 1", 3)}), True), Ending(1, frozenset({("A: 2", 4)}), True)], [1.0, 2.0]),
        ([Ending(1, frozenset({("A: 1", 3)}), True), Ending(1, frozenset({("A: 2", 3)}), True)], [1.0, None]),
        (
            [Ending(1, frozenset({("A", 3)}), True), Ending(137, killed=True), Ending(1, frozenset({("A", 3)}))],
            [1.0, 2.0, 4.0],
        ),
        ([Ending(137, begun=True, killed=True), Ending(1, frozenset({("B", None)}))], [1.0, 2.0]),
        ([Ending(137, begun=True, done=True)] * 4, [1.0, 2.0, 4.0, None]),
        ([Ending(1, frozenset({("A", 3)}), begun=True, done=True)], [None]),
    ],
)
def test_pauses_between_starts(endings, pauses):
    policy = Restarts(3)
    assert [policy.after(each) for each in endings] == pauses


def test_a_start_that_ran_for_long_resets_the_number_of_restarts(monkeypatch):
    monkeypatch.setattr(restart_policy, "STABLE_AFTER_S", -1.0)
    policy = Restarts(1)
    assert [policy.after(Ending(1, begun=True)) for _ in range(4)] == [1.0] * 4


def test_the_options_reach_the_nodes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEAD + "join()\nif not RESUMES: die()\n")
    words = "run", "--plan", "sequential", "--nodes", "1:2", "--wait", "5.5", "--restarts", "1", script, tmp_path
    _, errors = finish(begin(*words))
    assert "(restart 1 of 1)" in errors
    assert all(json.loads(path.read_text())["PACELINE_WAIT"] == "5.5" for path in tmp_path.glob("life-*"))
    _, errors = finish(begin("run", "--wait", "-1", script), code=2)
    assert "--wait" in errors
