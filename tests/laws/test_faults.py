"""A death is told within seconds, by every survivor, in one line that names who lost whom; nothing is left behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import Cluster
from launching import environment, python_path
from machines import needs_cluster
from paceline.elastic.failure_detector import LIMIT_S
from waiting import OwnTime

pytestmark = pytest.mark.long

HERE = Path(__file__).parents[1] / "support"
ENDLESS = str(HERE / "scripts" / "endless.py")
DEADLINE_S = 10.0


def wait_for(files, process, limit_s=200.0):
    """The pids that the processes wrote once they were training."""
    end = time.monotonic() + limit_s
    while not all(file.exists() for file in files):
        assert process.poll() is None, f"ended early with {process.returncode}"
        assert time.monotonic() < end, f"not training after {limit_s:.0f} s"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pids, clock=None):
    clock = clock or OwnTime(*pids)
    end = clock.passed_s() + DEADLINE_S
    while any(alive(pid) for pid in pids):
        assert clock.passed_s() < end, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def traces(pids):
    """What these processes could leave on this machine: shared memory and sockets with a name."""
    found, sockets = set(), set()
    for pid in pids:
        found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets |= set(re.findall(r"^socket:\[(\d+)\]", os.readlink(descriptor)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        *_, number, name = line.split(maxsplit=7) if "@" in line else ("", "")
        if number in sockets and name.startswith("@paceline-") and not name.startswith("@paceline-live-"):
            found.add(name)
    return found


def left(found):
    """Of those."""
    names = Path("/proc/net/unix").read_text().split()
    return {name for name in found if name in names or Path(name).exists()}


def until_ended(processes, clocks, limit_s):
    """Each within so many seconds by its clock. What they say must be little."""
    while running := [clock for process, clock in zip(processes, clocks, strict=True) if process.poll() is None]:
        assert all(clock.passed_s() < limit_s for clock in running)
        time.sleep(0.02)


@pytest.mark.dear
@pytest.mark.parametrize("victim", ["local rank 0", "local rank 1", "local rank 2", "launcher"])
def test_sigkill_of_any_process_ends_the_node_and_leaves_nothing(victim, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    start = "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[1:], 'processes:3'))"
    launcher = subprocess.Popen(
        [sys.executable, "-c", start, sys.executable, ENDLESS, str(tmp_path)],
        env={**environment(), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = wait_for([tmp_path / f"0.{rank}" for rank in range(3)], launcher)
    shared = traces(pids)
    assert shared, "nothing was shared, so nothing is tested"
    clock = OwnTime(launcher.pid, *pids)
    os.kill(launcher.pid if victim == "launcher" else pids[int(victim[-1])], signal.SIGKILL)
    until_ended([launcher], [clock], DEADLINE_S)
    _, errors = launcher.communicate(timeout=DEADLINE_S)
    wait_until_gone(pids, clock)
    assert not left(shared)
    assert not list(temporary.glob("*paceline*"))
    if victim != "launcher":
        assert launcher.returncode == 128 + signal.SIGKILL
        lines = [line for line in errors.splitlines() if line.startswith("paceline: rank 0 of 1 on ")]
        assert len(lines) == 2, errors
        for line in lines:
            assert re.search(rf"at step \d+: .*lost {victim} of this node", line)
        assert "Traceback" not in errors


@pytest.mark.dear
@pytest.mark.parametrize("victim", ["0.1", "1.0"])
def test_a_death_inside_a_node_reaches_every_process_of_every_node(victim, tmp_path):
    """Two nodes of two processes: the node that loses one gives up, and the other node loses that node."""
    start = "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[1:], 'processes:2', 2))"
    command = [sys.executable, "-c", start, sys.executable, ENDLESS, str(tmp_path)]
    launcher = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    seats = ["0.0", "0.1", "1.0", "1.1"]
    pids = dict(zip(seats, wait_for([tmp_path / assignment for assignment in seats], launcher), strict=True))
    clock = OwnTime(launcher.pid, *pids.values())
    os.kill(pids[victim], signal.SIGKILL)
    until_ended([launcher], [clock], DEADLINE_S)
    _, errors = launcher.communicate(timeout=DEADLINE_S)
    wait_until_gone(pids.values(), clock)
    lines = [line for line in errors.splitlines() if line]
    for assignment in set(seats) - {victim}:
        who = f"paceline: rank {assignment[0]} of 2 on .*, local rank {assignment[2]} at step"
        lost = (
            f"lost local rank {victim[2]} of this node" if assignment[0] == victim[0] else f"lost rank {victim[0]} on"
        )
        assert sum(bool(re.search(f"{who}.*{lost}", line)) for line in lines) == 1, errors
    assert len(lines) == 3


@pytest.mark.dear
@needs_cluster
def test_an_exchange_may_take_longer_than_any_heartbeat(tmp_path):
    """4 MB over 2 Mbit/s fill the link for some twelve seconds; nobody is taken for dead."""
    with Cluster(2, "2mbit") as cluster:
        command = [sys.executable, str(HERE / "scripts" / "slow.py")]
        nodes = [cluster.start(n, command, stdout=subprocess.PIPE, text=True) for n in range(2)]
        said = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert all(float(words) > LIMIT_S for words in said)


@pytest.mark.dear("tls", "cable of rank 0", "cable of rank 1", "SIGKILL of rank 1")
@needs_cluster
@pytest.mark.parametrize(
    ("how", "link"),
    [
        ("SIGKILL of rank 1", "gloo"),
        ("SIGKILL of rank 0", "gloo"),
        ("cable of rank 1", "gloo"),
        ("cable of rank 0", "gloo"),
        ("cable of rank 1", "tls"),
        ("cable of rank 0", "tls"),
    ],
)
def test_every_surviving_node_ends_within_ten_seconds_and_says_whom_it_lost(how, link, tmp_path):
    victim = int(how[-1])
    with Cluster(3) as cluster:
        command = [sys.executable, ENDLESS, str(tmp_path)]
        said = {"PYTHONPATH": python_path(), "PACELINE_ENGINE": "sequential"}
        said |= {"PACELINE_LINK": link, "PACELINE_SECRET": "of this test"}
        nodes = [cluster.start(n, command, said, stderr=subprocess.PIPE, text=True) for n in range(3)]
        pids = wait_for([tmp_path / f"{n}.0" for n in range(3)], nodes[0])
        survivors = [n for n in range(3) if n != victim]
        clocks = [OwnTime(pid) for pid in pids]
        if how.startswith("cable"):
            cluster.pull_cable(victim)
        else:
            os.kill(pids[victim], signal.SIGKILL)
        until_ended([nodes[n] for n in survivors], [clocks[n] for n in survivors], DEADLINE_S)
        for n in survivors:
            _, errors = nodes[n].communicate(timeout=DEADLINE_S)
            assert nodes[n].returncode == 1
            said = [line for line in errors.splitlines() if line.startswith("paceline: ")]
            assert len(said) == 1, errors
            want = (
                rf"paceline: rank {n} of 3 on node{n} at step \d+: lost rank {victim} on node{victim} during .*waited"
            )
            assert re.match(want, said[0])


@pytest.mark.dear
@needs_cluster
def test_two_that_do_not_reach_each_other_any_more_are_told_though_rank_0_hears_both(tmp_path):
    """What they send goes to a card that nobody has; heartbeats go on."""
    with Cluster(3) as cluster:
        command = [sys.executable, ENDLESS, str(tmp_path)]
        where = {"PYTHONPATH": python_path(), "PACELINE_ENGINE": "sequential", "PACELINE_SECRET": "of this test"}
        nodes = [cluster.start(n, command, where, stderr=subprocess.PIPE, text=True) for n in range(3)]
        pids = wait_for([tmp_path / f"{n}.0" for n in range(3)], nodes[0])
        clocks = [OwnTime(pid) for pid in pids]
        for one, other in ((1, 2), (2, 1)):
            nobody = ["neigh", "replace", cluster.address(other), "lladdr", "02:00:00:00:00:01", "dev", "e0"]
            subprocess.run(["ip", "-n", cluster.name(one), *nobody, "nud", "permanent"], check=True, timeout=20)
        until_ended(nodes, clocks, DEADLINE_S + 1)  # one after the other, within a beat
        said = []
        for node in nodes:
            _, errors = node.communicate(timeout=DEADLINE_S)
            assert node.returncode == 1
            said += [line for line in errors.splitlines() if line.startswith("paceline: ")]
    assert len(said) == 3
    assert all(re.search(r"rank \d of 3 on node\d at step \d+: lost rank [12] on node[12]", line) for line in said), (
        said
    )
    assert any("no answer from there for 5 s" in line for line in said), said


@pytest.mark.dear
@pytest.mark.parametrize(
    ("ending", "want"),
    [
        ("pass", "has left"),
        ("raise KeyError('mine')", "died"),
        # Python clears this last, when threads no longer run. Story: "its process has not answered for 4 s"
        (
            "sys.last = type('', (), {'__del__': lambda self, wait=time.sleep: wait(9)})(); raise KeyError('mine')",
            "died",
        ),
    ],
)
def test_a_script_that_ends_without_closing_has_left_and_one_that_fails_has_died(tmp_path, ending, want):
    """Rank 0 ends after 5 steps, rank 1 wants 8: by a plain end, and by an error of its own, also a slow one."""
    script = tmp_path / "short.py"
    lines = Path(ENDLESS).read_text().replace("1_000_000", "5 if world.node == 0 else 8").splitlines()
    script.write_text("\n".join([*lines, "import sys, time", "if world.node == 0:", f"    {ending}", ""]))
    start = "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[1:], 'sequential', 2))"
    command = [sys.executable, "-c", start, sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("paceline: rank 1 of 2")]
    assert want in said
    assert "rank 0 on" in said
