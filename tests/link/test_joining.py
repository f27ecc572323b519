"""However a run is started, its ranks find each other, train alike, and nobody else takes part."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import launching
from cluster import Cluster
from machines import needs_cluster
from paceline.launch.local import free_port
from paceline.link.net.auth import HEADER
from paceline.link.net.store_client import AT_ONCE

pytestmark = pytest.mark.long

SCRIPT = str(launching.HERE / "scripts" / "meeting.py")
IN_COMMON = "held-by-both-of-them"  # on no command line of the machine
NUM_FRAMES = 2000


@contextlib.contextmanager
def two(folder, *arguments, port=None, secrets=("", ""), **more):
    """The script's two ranks, started by hand."""
    port = port or free_port()
    started = []
    for rank, secret in enumerate(secrets):
        said = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        said |= {"PACELINE_SECRET": secret} if secret else {}
        command = [sys.executable, "-W", "error", SCRIPT, str(folder), *arguments]
        environment = launching.environment(**said, **more)
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def end_well(processes, limit_s=100.0):
    errors = [process.communicate(timeout=limit_s)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return errors


def results(folder):
    """The weights that both ranks have, and the secret."""
    (weights, secret), *others = [(folder / str(rank)).read_text().split() for rank in range(2)]
    assert others == [[weights, secret]]
    return weights, secret


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """By the local launcher, with nobody else about."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "enough").touch()
    launching.launch(SCRIPT, folder, engine="sequential", num_nodes=2)
    return results(folder)


@pytest.mark.dear
def test_the_local_launcher_gives_each_run_a_secret_in_the_environment_alone(quiet):
    """The script looks into every command line of the machine."""
    assert re.fullmatch("[0-9a-f]{64}", quiet[1])


def frame(dice):
    kind = dice.randrange(4)
    noise = dice.randbytes(int(10 ** dice.uniform(0, 3.5)))
    return (b"", HEADER, HEADER + dice.randbytes(66), b"\xff\xff\xff\xff")[kind] + noise


@pytest.mark.dear
def test_two_thousand_random_frames_at_the_port_while_a_run_joins_and_trains(tmp_path, quiet):
    port, sent, over = free_port(), [0, 0, 0, 0], threading.Event()

    def disturb(seat):
        dice = random.Random(seat)
        held = []
        while sent[seat] < NUM_FRAMES // len(sent) and not over.is_set():
            with contextlib.suppress(OSError):
                line = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                if line.getsockname() == line.getpeername():  # joined to itself, as TCP does where nobody listens
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                    line.close()
                    continue
                held.append(line)
                line.sendall(frame(dice))
                sent[seat] += 1
            if not held:
                time.sleep(0.01)
            elif len(held) > 20 or dice.random() < 0.5:
                held.pop(dice.randrange(len(held))).close()
        for line in held:
            line.close()

    noise = [threading.Thread(target=disturb, args=(seat,)) for seat in range(len(sent))]
    for thread in noise:
        thread.start()
    try:
        with two(tmp_path, port=port, secrets=(IN_COMMON, IN_COMMON)) as run:
            while any(thread.is_alive() for thread in noise) and run[0].poll() is None:
                time.sleep(0.05)
            (tmp_path / "enough").touch()
            errors = end_well(run)
    finally:
        over.set()
    assert sum(sent) == NUM_FRAMES
    assert results(tmp_path) == (quiet[0], IN_COMMON)
    assert len(errors[0].splitlines()) <= 8
    assert not errors[1]


@pytest.mark.dear
def test_a_wrong_secret_ends_the_guest_and_is_told_on_both_sides(tmp_path):
    with two(tmp_path, secrets=("open sesame", "sesame")) as (serving, refused):
        _, errors = refused.communicate(timeout=60.0)
        assert refused.returncode == 1
        lines = [line for line in errors.splitlines() if line.startswith("paceline: ")]
        assert len(lines) == 1
        assert "refused this process: their PACELINE_SECRET differ" in lines[0]
        line = serving.stderr.readline()
        assert "paceline: refused 127.0.0.1 at the meeting point" in line
        assert serving.poll() is None, "a stranger has ended the run"
    assert "sesame" not in line + errors


@pytest.mark.dear
@pytest.mark.parametrize(("engine", "num_nodes", "size"), [("sequential", 2, 2), ("processes:2", 2, 4)])
def test_what_does_not_train_is_rank_0s_in_every_process(engine, num_nodes, size, tmp_path):
    """Story: a frozen layer that was drawn anew on each node stayed each one's own."""
    launching.launch("frozen.py", tmp_path, engine=engine, num_nodes=num_nodes)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    wanted = found[0][0]
    for rank, (first, now) in enumerate(found):
        assert all(torch.equal(now[name], wanted[name]) for name in wanted)
        assert torch.equal(first["1.weight"], wanted["1.weight"]) == (rank == 0)


@pytest.mark.dear
def test_a_script_that_has_a_default_group_joins_too(tmp_path, quiet):
    """Its store listens at MASTER_PORT, so the meeting point is elsewhere."""
    (tmp_path / "enough").touch()
    with two(tmp_path, "group") as run:
        end_well(run)
    assert results(tmp_path)[0] == quiet[0]


def torchrun(script, folder, processes, **more):
    """Two nodes of so many processes each, until their end."""
    port = str(free_port())
    words = ["--nnodes", "2", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1", "--master-port", port]
    start = [sys.executable, "-m", "torch.distributed.run", *words]
    agents = [
        subprocess.Popen(
            [*start, "--node-rank", str(node), script, str(folder)],
            env=launching.environment(**more),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        end_well(agents)
    finally:
        for agent in agents:
            agent.terminate()
            agent.communicate()


@pytest.mark.dear
def test_torchrun_starts_it_with_its_agents_store_on_the_port(tmp_path, quiet):
    (tmp_path / "enough").touch()
    torchrun(SCRIPT, tmp_path, 1)
    assert results(tmp_path) == (quiet[0], "-")


@pytest.mark.dear
def test_torchrun_with_two_processes_per_node_trains_to_the_bits_of_such_nodes_here(tmp_path):
    torchrun(launching.JOINED, tmp_path, 2)
    launching.assert_as_four_here(tmp_path)


def said_in_a_cluster(cluster, folder, environments):
    command = [sys.executable, SCRIPT, str(folder)]
    where = {"PYTHONPATH": launching.python_path()}
    nodes = [
        cluster.start(node, command, environment={**where, **more}, stderr=subprocess.PIPE, text=True)
        for node, more in enumerate(environments)
    ]
    errors = [node.communicate(timeout=60)[1] for node in nodes]
    assert all(node.returncode == 1 for node in nodes), errors
    lines = [re.findall(r"^paceline: (.*)$", text, re.MULTILINE) for text in errors]
    assert [len(of_node) for of_node in lines] == [1] * len(nodes), errors
    return [of_node[0] for of_node in lines]


@pytest.mark.dear
@needs_cluster
def test_a_firewall_that_lets_the_meeting_through_and_no_more_is_told_to_all(tmp_path):
    """Node 1 sends nothing but to MASTER_PORT."""
    with Cluster(2) as cluster:
        rule = ["ip", "-n", cluster.name(1), "rule", "add", "to", cluster.address(0), "ipproto", "tcp", "prio"]
        subprocess.run([*rule, "100", "dport", "29500", "lookup", "main"], check=True)
        subprocess.run([*rule, "101", "blackhole"], check=True)
        lines = said_in_a_cluster(cluster, tmp_path, ({"PACELINE_SECRET": "of this test"},) * 2)
    want = (
        r"rank 0 on node0 \(10\.77\.0\.1\) does not reach rank 1 on node1 \(10\.77\.0\.2\) at port \d+: no answer "
        r"within 5 s; a firewall"
    )
    assert all(re.match(want, line) for line in lines), lines
