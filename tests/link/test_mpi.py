"""Training under a real mpirun; when its link is chosen, what it refuses, and how a death is told."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_faults import wait_for, wait_until_gone
from torch import nn

import mpirun
from cluster import Cluster
from launching import JOINED, assert_as_four_here, environment
from machines import needs_cluster
from needs import needs
from nodes import MODELS, OPTIMIZERS, build, gap, reference, rows
from paceline import session
from paceline.environment import LaunchEnvironment
from paceline.link import mpi
from paceline.link.net import mpi_progress

pytestmark = pytest.mark.long

DEADLINE_S = 10.0
WRAP = mpirun.SCRIPTS / "under_mpirun.py"
needs_mpi = needs(mpi=mpirun.unavailable())
run = partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.dear
@needs_mpi
@pytest.mark.parametrize(("size", "way"), [(2, "shared memory"), (3, "sockets")])
def test_a_training_is_bit_equal_on_all_ranks_and_equals_one_process(size, way, tmp_path):
    cases = ["plain,none,equal", "sometimes,none,equal", "plain,half,equal", "plain,none,unlike"]
    script = mpirun.SCRIPTS / "trained_by_mpi.py"
    done = run(mpirun.command(size, "-W", "error", WRAP, script, tmp_path, *cases, way=way), env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    rounded = ["paceline: the all-reduce adds in bf16: with 3 nodes each sum is rounded once per node"]
    assert done.stderr.splitlines() == (rounded if size > 2 else [])
    for case in cases:
        everyone = [load_file(tmp_path / f"{case}.{rank}.safetensors") for rank in range(size)]
        for weights in everyone[1:]:
            assert all(torch.equal(weights[name], everyone[0][name]) for name in weights)
        name, codec, _ = case.split(",")
        model = build(MODELS[name])
        wanted, _ = reference(model, [rows(21, seed) for seed in range(5)], OPTIMIZERS["momentum"])
        assert gap(everyone[0], wanted) < (1e-12 if codec == "none" else 1e-2), case
        assert gap(model.state_dict(), wanted) > 1e-2, "nothing was learned, so nothing is tested"


@pytest.mark.dear
@needs_mpi
@needs_cluster
def test_two_processes_on_each_of_two_nodes_train_to_the_bits_of_such_nodes_here(tmp_path):
    with Cluster(2) as cluster:
        told = ("-x", f"MASTER_ADDR={cluster.address(0)}")
        command = mpirun.over(cluster, tmp_path, 2, JOINED, tmp_path, options=told)
        started = cluster.start(0, command, environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said, errors = started.communicate(timeout=100)
    assert started.returncode == 0, said + errors
    places = [f"process {rank} of 2 of node {node} of 2 is done" for rank in range(2) for node in range(2)]
    assert sorted(said.splitlines()) == places
    assert_as_four_here(tmp_path)


def endless(folder, size, way="shared memory", options=()):
    """mpirun of ranks that train until they are killed, and their pids."""
    script = mpirun.SCRIPTS / "endless.py"
    started = subprocess.Popen(
        mpirun.command(size, WRAP, script, folder, way=way, options=options),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return started, wait_for([folder / f"{rank}.0" for rank in range(size)], started)


@pytest.mark.dear
@needs_mpi
@pytest.mark.parametrize(("victim", "way"), [(1, "shared memory"), (0, "sockets")])
def test_every_survivor_ends_within_ten_seconds_and_names_the_dead_where_mpirun_lets_it(victim, way, tmp_path):
    started, pids = endless(tmp_path, 3, way, ("--with-ft", "ulfm"))
    os.kill(pids[victim], signal.SIGKILL)
    _, errors = started.communicate(timeout=DEADLINE_S)
    wait_until_gone(pids)
    assert started.returncode
    said = sorted(line for line in errors.splitlines() if line.startswith("paceline: "))
    assert len(said) == 2, errors
    for rank, line in zip([rank for rank in range(3) if rank != victim], said, strict=True):
        assert line.startswith(f"paceline: rank {rank} of 3 on node{rank} at step "), errors
        assert f"lost rank {victim} on node{victim} during " in line
    assert "Traceback" not in errors


@pytest.mark.dear
@needs_mpi
@needs_cluster
@pytest.mark.parametrize("options", [(), ("--with-ft", "ulfm")], ids=["plain", "ulfm"])
def test_a_pulled_cable_ends_every_survivor_within_ten_seconds_by_one_line_that_names_who_is_lost(options, tmp_path):
    """mpirun is on node 0. It waits for the node that it does not reach, so it is not waited for. Nobody says where
    rank 0 runs, as nobody need who has one process per node and mpi4py."""
    log = tmp_path / "said"
    with Cluster(3) as cluster, log.open("w") as said:
        command = mpirun.over(cluster, tmp_path, 1, mpirun.SCRIPTS / "endless.py", tmp_path, options=options)
        wanted = environment(PACELINE_ENGINE="sequential", PACELINE_LINK="mpi")
        started = cluster.start(0, command, wanted, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            pids = wait_for([tmp_path / f"{node}.0" for node in range(3)], started)
            cluster.pull_cable(2)
            wait_until_gone(pids[:2])
        finally:
            mpirun.end(cluster)
    lines = sorted(line for line in log.read_text().splitlines() if "paceline: " in line)
    assert len(lines) == 2, log.read_text()
    for rank, line in enumerate(lines):
        want = rf"paceline: rank {rank} of 3 on node{rank} at step \d+: lost rank 2 on node2 during .*waited"
        assert re.match(want, line), lines


@needs_mpi
def test_plain_mpirun_ends_all_within_ten_seconds_and_names_the_dead(tmp_path):
    started, pids = endless(tmp_path, 2)
    os.kill(pids[1], signal.SIGKILL)
    out, errors = started.communicate(timeout=DEADLINE_S)
    wait_until_gone(pids)
    assert started.returncode == 128 + signal.SIGKILL
    assert "process rank 1 with PID" in out + errors


@pytest.mark.dear
@needs_mpi
def test_a_rank_that_left_early_is_named_to_those_who_wait_for_it():
    done = run(mpirun.command(2, WRAP, mpirun.SCRIPTS / "left_early.py"), env=environment())
    assert done.returncode == 3, done.stderr
    said = [line for line in done.stdout.splitlines() if line]
    assert said == ["waited for sum, but rank 1 on node1 has left: its script ended earlier than this one"]


@pytest.mark.dear
@needs_mpi
@needs_cluster
def test_declared_bytes_are_those_on_the_wire():
    command = mpirun.command(4, WRAP, mpirun.SCRIPTS / "sent_by_mpi.py", way="sockets")
    inside = ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command]
    done = run(inside, env=environment())
    assert done.returncode == 0, done.stderr
    for name, (declared, counted) in json.loads(done.stdout).items():
        assert 0.99 < counted / (4 * declared) < 1.06, (name, counted / (4 * declared))


@pytest.mark.dear
@needs_mpi
def test_verify_under_mpirun_compares_with_one_process_of_no_launchers(tmp_path):
    """Story: the one process read in mpirun's variables that it was one of several, and waited for the others."""
    own_loop = Path(__file__).parents[2] / "examples" / "own_loop.py"
    command = mpirun.command(2, "-m", "paceline", "verify", "--steps", "3", own_loop)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same" in done.stdout


def test_under_mpirun_the_link_is_mpi_where_it_can_be(monkeypatch):
    second = LaunchEnvironment(node=1, num_nodes=2)

    def chosen(world=second, device="cpu"):
        return session._link(world, nn.Linear(1, 1, device=device))

    for name in ("PACELINE_LINK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert chosen() == "gloo"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert chosen() == ("mpi" if importlib.util.find_spec("mpi4py") else "gloo")
    assert chosen(LaunchEnvironment(node=0, num_nodes=2)) == "gloo", "mpirun counts otherwise"
    assert chosen(device="meta") == "gloo", "MPI moves host memory"
    monkeypatch.setenv("PACELINE_LINK", "torch")  # as it was called once
    assert chosen() == "gloo"
    monkeypatch.setenv("PACELINE_LINK", "tcp")
    with pytest.raises(ValueError, match=r"PACELINE_LINK='tcp' .* use gloo, mpi, nccl, tls"):
        chosen()
    monkeypatch.delenv("PACELINE_LINK")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert chosen() == "gloo"


def test_what_is_missing_is_said_before_mpi_begins(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"one process of mpirun per node, but there are 4 for 2 nodes"):
        mpi.Link(0, 2)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match=r"needs mpi4py .* pip install 'paceline\[mpi\]'"):
        mpi_progress.Library()


ALONE = """
import torch
from paceline.registry import find
def refused(work, *words):
    try:
        work()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)
"""
REFUSED = {
    "threads": """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
refused(lambda: find("link", "mpi", 0, 1), "MPI_THREAD_MULTIPLE", "has level 1", "PACELINE_LINK=gloo")
""",
    "ranks and tensors": """
refused(lambda: find("link", "mpi", 1, 2), "rank 1 of 2, but MPI says rank 0 of 1", "mpirun -n 2", "Open MPI")
link = find("link", "mpi", 0, 1)
refused(lambda: link.sum(torch.ones(2, device="meta")), "host memory", "meta", "PACELINE_LINK=gloo")
refused(lambda: link.broadcast(torch.ones(2, 2).t()[:1]), "contiguous", "(1, 2)")
refused(lambda: link.sum(torch.ones(2, dtype=torch.bool)), "bfloat16", "got torch.bool")
assert link.broadcast(torch.ones(2, dtype=torch.bool)).wait(5).all()
link.close()
""",
}


@needs_mpi
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(case):
    done = run([sys.executable, "-W", "error", "-c", ALONE + REFUSED[case]], env=environment())
    assert done.returncode == 0, done.stderr


def test_rank_0_may_have_an_ipv6_address():
    assert mpi._address("fd00::1", ["a", "b"], [[], []]) == "fd00::1"
    assert mpi._address("::1", ["a", "a"], [[], []]) == "::1"
    with pytest.raises(OSError, match="no route from a to ::1"):
        mpi._address("::1", ["a", "::1"], [[], []])
