"""Nodes started over ssh train as nodes started here do; they end together, and their output has the host's name."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_ipv6 import missing as no_ipv6

import launching
from launching import finish, launch
from needs import needs
from sshd import Sshd, unavailable

pytestmark = [needs(sshd=unavailable()), pytest.mark.long]
JOINED = str(Path(__file__).parents[1] / "support" / "scripts" / "joined.py")
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


def begin(sshd, *words, hosts="one,two", cwd=None, **environment):
    return launching.begin("run", "-H", hosts, *words, cwd=cwd, **{"PACELINE_SSH": sshd.ssh, **environment})


@pytest.fixture
def script(tmp_path):
    """Writes a script that needs no torch; its first lines define FOLDER and NODE."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(
            "import contextlib, os, signal, sys, time\nfrom pathlib import Path\n"
            "sys.modules['dask'] = None\n"  # as if the processes had joined by a library of their own
            f"FOLDER, NODE = Path({str(tmp_path)!r}), os.environ['GROUP_RANK']\n"
            "(FOLDER / f'pid.{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\n" + text
        )
        return path

    return write


def wait_for_pids(folder, count, process):
    end = time.monotonic() + DEADLINE_S
    while True:
        texts = [path.read_text() for path in folder.glob("pid.*")]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "not started"
        time.sleep(0.02)


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pids, limit_s=5.0):
    end = time.monotonic() + limit_s
    while any(map(alive, pids)):
        assert time.monotonic() < end, "processes were left behind"
        time.sleep(0.02)


def test_two_nodes_over_ssh_train_to_the_bits_of_two_nodes_here(sshd, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    output, _ = finish(begin(sshd, "--engine", "sequential", JOINED, tmp_path / "far"))
    assert sorted(output.splitlines()) == ["[one] node 0 of 2 is done", "[two] node 1 of 2 is done"]
    launch(JOINED, tmp_path / "near", engine="sequential", num_nodes=2)
    for name in ("0.pt", "1.pt"):
        far, near = (torch.load(tmp_path / where / name, weights_only=True) for where in ("far", "near"))
        assert all(torch.equal(far[key], near[key]) for key in near)


@pytest.mark.parametrize(("hosts", "engine"), [("one,two", "sequential"), ("one", "processes:2")])
def test_nodes_that_each_train_alone_are_a_failure(sshd, tmp_path, hosts, engine):
    path = tmp_path / "script.py"
    path.write_text("print('trained')")
    output, errors = finish(begin(sshd, "--engine", engine, path, hosts=hosts), code=1)
    assert output.count("trained") == len(hosts.split(","))  # the output of a node's first process is passed on
    assert errors.count("2 processes ran the script, and none joined the others") == 1
    assert "started again" not in errors


@pytest.mark.dear
@needs(ipv6=no_ipv6())
def test_hosts_may_be_ipv6_addresses(sshd, script):
    path = script("print(os.environ['MASTER_ADDR'], os.environ['PACELINE_HOST'])")
    client = f"{sshd.ssh} -o HostName=::1"
    output, _ = finish(begin(sshd, path, hosts="::1,[fd00::2]:2", PACELINE_SSH=client))
    assert sorted(output.splitlines()) == ["[::1] ::1 ::1", "[fd00::2] ::1 fd00::2"]


@pytest.mark.dear
def test_a_node_that_fails_is_named_with_its_error_and_exit_code_and_the_others_end(sshd, tmp_path):
    _, errors = finish(begin(sshd, "--engine", "sequential", JOINED, tmp_path, 1), code=1)
    assert "did not end within" not in errors
    lines = errors.splitlines()
    assert lines[-1] == "paceline: two failed first, with exit code 1: ValueError: the data of this node ran out"
    assert any(re.match(r"\[one\] paceline: rank 0 of 2 on one at step \d+: .*rank 1 on two", line) for line in lines)
    assert not list(tmp_path.glob("*.pt"))


def test_the_exit_code_of_the_first_to_fail_is_passed_on(sshd, script, tmp_path):
    left = str(tmp_path / "left")
    path = script(
        f"while NODE == '0' and not os.path.exists({left!r}):\n    time.sleep(0.1)\n"
        f"time.sleep(1.5 * (NODE == '0'))\nopen({left!r}, 'w')\nprint('oh', file=sys.stderr)\nsys.exit(7 + int(NODE))"
    )
    _, errors = finish(begin(sshd, path), code=8)
    assert sorted(errors.splitlines()) == [
        "[one] oh",
        "[two] oh",
        "paceline: two failed first, with exit code 8: oh",
    ]


@pytest.mark.dear
def test_a_script_with_the_exit_code_of_ssh_is_named_as_a_possible_cause(sshd, script):
    _, errors = finish(begin(sshd, script("print('oh', file=sys.stderr)\nsys.exit(-1)"), hosts="one"), code=255)
    assert errors == "[one] oh\npaceline: the connection to one failed, or its script ended with exit code 255: oh\n"


def test_ctrl_c_reaches_every_process_once_and_nothing_is_left(sshd, script, tmp_path):
    path = script(
        "def heard(*_):\n    print('heard', flush=True)\n    time.sleep(0.2)\n    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, heard)\ntime.sleep(60)"
    )
    process = begin(sshd, path, hosts="one:2,two:2")
    pids = wait_for_pids(tmp_path, 4, process)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = finish(process, code=130)
    assert sorted(output.splitlines()) == ["[one] heard", "[two] heard"]
    assert not any(map(alive, pids))


@pytest.mark.dear
def test_a_second_ctrl_c_reaches_them_too(sshd, script, tmp_path):
    path = script("signal.signal(signal.SIGINT, lambda *_: signal.signal(2, signal.SIG_DFL))\n" + "time.sleep(9)\n" * 9)
    process = begin(sshd, path)
    pids = wait_for_pids(tmp_path, 2, process)
    time.sleep(0.2)
    for _ in range(2):
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    finish(process, code=130)
    assert not any(map(alive, pids))


def test_a_launcher_that_is_killed_takes_every_process_with_it(sshd, script, tmp_path):
    process = begin(sshd, script("time.sleep(60)"), hosts="one:2,two:2")
    pids = wait_for_pids(tmp_path, 4, process)
    process.kill()
    finish(process, code=-signal.SIGKILL)
    wait_until_gone(pids)


def test_a_laptop_that_is_closed_keeps_no_node_waiting(sshd, script, tmp_path):
    """It reads nothing, and its connections stay open: output beyond ssh's buffers is kept until it is opened again."""
    text = "for i in range(5000):\n    print(f'{i:01000}', flush=True)\n(FOLDER / f'over.{NODE}').touch()"
    process = begin(sshd, script(f"while not (FOLDER / 'go').exists():\n    time.sleep(0.02)\n{text}"))
    wait_for_pids(tmp_path, 2, process)
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    end = time.monotonic() + DEADLINE_S
    while len([*tmp_path.glob("over.*")]) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGCONT)
    output, _ = finish(process)
    for name in ("one", "two"):
        lines = [line for line in output.splitlines() if line.startswith(f"[{name}] ")]
        assert [int(line.split()[1]) for line in lines] == list(range(5000))


def test_a_detached_run_on_hosts_continues_without_its_terminal_and_is_followed(sshd, script, tmp_path):
    path = script("while not (FOLDER / 'go').exists():\n    time.sleep(0.02)\nprint('done', NODE, flush=True)")
    where = {"XDG_STATE_HOME": str(tmp_path)}
    _, errors = finish(begin(sshd, "--detach", path, own_session=True, **where))
    (name,) = re.findall(r"^(\S+) continues; ", errors, re.MULTILINE)
    try:
        follower = launching.begin("attach", name, **where)
        pids = wait_for_pids(tmp_path, 2, follower)
        assert all(map(alive, pids))
    finally:
        (tmp_path / "go").touch()  # it ends in any case
    output, _ = finish(follower)
    assert {"[one] done 0", "[two] done 1"} <= set(output.splitlines())
    wait_until_gone(pids)


def test_only_variables_of_training_and_named_ones_are_sent_and_no_command_line_shows_them(sshd, script):
    path = script(
        "lines = []\n"
        "for path in Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    with contextlib.suppress(ProcessLookupError, FileNotFoundError):\n"  # it has ended meanwhile
        "        lines.append(path.read_bytes())\n"
        "assert len(lines) > 5\n"
        "if NODE == '0':\n"
        "    for name in sorted(os.environ):\n        print(name, os.environ[name] if 'ECRET' in name else '')\n"
        "    print('shown', sum(b'tell nobody' in line for line in lines))"
    )
    given = {"SECRET": "tell nobody 1", "PACELINE_SECRET": "tell nobody 2", "ONLY_HERE": "3", "GLOO_X": "4"}
    output, _ = finish(begin(sshd, "--env", "SECRET", path, cwd=path.parent, **given, PACELINE_HOST="laptop"))
    sent = dict(line.removeprefix("[one] ").split(" ", 1) for line in output.splitlines())
    assert (sent["SECRET"], sent["PACELINE_SECRET"], sent["shown"]) == ("tell nobody 1", "tell nobody 2", "0")
    assert "GLOO_X" in sent
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    far = subprocess.run([*sshd.ssh.split(), "one", "env"], capture_output=True, text=True, check=True, timeout=20)
    login = {line.partition("=")[0] for line in far.stdout.splitlines()}
    carried = {name for name in os.environ if re.match("PACELINE_|GLOO_|NCCL_|OMP_NUM_THREADS", name)}
    set_there = {"PACELINE_HOST", "PACELINE_NOTES", "PYTHONPATH", "PYTHONUNBUFFERED"}
    set_there.add("LC_CTYPE")  # Python itself sets it in a C locale
    assert sent.keys() - login - carried - ours - set_there == {"SECRET", "PACELINE_SECRET", "GLOO_X", "shown"}


def test_lines_are_whole(sshd, script):
    path = script(
        "for _ in range(40):\n    os.write(1, b'begin ' + NODE.encode())\n    os.write(1, b' end\\n')\n"
        "os.write(1, b'last')"
    )
    output, _ = finish(begin(sshd, path))
    lines = output.splitlines()
    for index, name in enumerate(("one", "two")):
        host_lines = [line for line in lines if line.startswith(f"[{name}] ")]
        assert host_lines == [f"[{name}] begin {index} end"] * 40 + [f"[{name}] last"]
    assert len(lines) == 82


def test_a_variable_that_is_not_set_is_reported(sshd, script):
    _, errors = finish(begin(sshd, "--env", "NOT_SET_HERE", script("")), code=2)
    assert (
        errors == "paceline: --env names NOT_SET_HERE, which this environment does not have; set it, or leave it out\n"
    )


@pytest.mark.dear
def test_hosts_with_different_slots_train_as_one_process_does(sshd, tmp_path):
    """Slots set the processes of one host; a plan file gives another configuration for the other host."""
    unlike, (alone, both) = (
        str(Path(__file__).parents[1] / "support" / "scripts" / "unlike.py"),
        (tmp_path / "alone", tmp_path / "both"),
    )
    plan = tmp_path / "plan.toml"
    plan.write_text('chosen = "processes"\nhosts = { two = "sequential" }\n')
    alone.mkdir()
    both.mkdir()
    launch(unlike, alone, engine="sequential")
    started = begin(sshd, "--plan", plan, unlike, both, hosts="one:2,two", PACELINE_SHARES="equal")
    output, _ = finish(started)
    assert sorted(output.splitlines()) == ["[one] processes:2: 2 of 3", "[two] sequential: 1 of 3"]
    wanted, found = (torch.load(folder / "weights.pt", weights_only=True) for folder in (alone, both))
    assert all(torch.allclose(found[key], wanted[key], rtol=1e-9) for key in wanted)


def test_background_processes_of_a_script_do_not_delay_the_end(sshd, script, tmp_path):
    """Story: a background child with the script's stdout kept ssh, and so the run, open until it ended."""
    path = script(
        "import subprocess\nchild = subprocess.Popen(['sleep', '50'], start_new_session=True)\n"
        "(FOLDER / 'left').write_text(str(child.pid))\nprint('x' * 200_000)\nprint('done')"
    )
    start = time.monotonic()
    try:
        output, _ = finish(begin(sshd, path, hosts="one"))
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert output == f"[one] {'x' * 200_000}\n[one] done\n"
    assert time.monotonic() - start < 40


def test_sigterm_while_hosts_are_checked_leaves_no_ssh(sshd, script):
    process = begin(sshd, script(""), hosts="silent")
    tasks = Path(f"/proc/{process.pid}/task")
    end, pids = time.monotonic() + DEADLINE_S, []
    while not pids:
        assert time.monotonic() < end
        pids = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    finish(process, code=143)
    assert time.monotonic() - start < 4, "ssh itself gives up after six seconds"
    wait_until_gone(pids, 1.0)


@pytest.mark.parametrize("end", [">&-", "| head -1"], ids=["closed", "left"])
def test_a_launcher_whose_output_is_closed_ends_without_a_traceback(sshd, script, end):
    path = script("for i in range(20_000):\n    print('line', i, flush=True)")
    line = f"{sys.executable} -m paceline run -H one {path} {end}"
    environment = {**os.environ, "PACELINE_SSH": sshd.ssh}
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.stdout == ("" if end == ">&-" else "[one] line 0\n")


def test_a_result_goes_alone_to_stdout(sshd, script):
    """test_send.py tests `train --json` with real training."""
    text = "import sys\nprint('noise')\nprint('{\"a\": 1}' if NODE == '0' else 'more')"
    start = (
        "import sys\nfrom paceline.launch import ssh\nfrom paceline.launch.hosts import Way, parse\n"
        "hosts, way, out = parse('one,two'), Way(sys.argv[2]), sys.stdout.buffer\n"
        "sys.exit(ssh.start(hosts, ssh.Orders([sys.argv[1]], ['', ''], way, {}), ('127.0.0.1', 9), out))"
    )
    words = [sys.executable, "-c", start, str(script(text)), sshd.ssh]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, '{"a": 1}\n')
    assert sorted(done.stderr.splitlines()) == ["[one] noise", "[two] more", "[two] noise"]
