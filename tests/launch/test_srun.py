"""Nodes started by a real srun train as nodes started here do."""

import subprocess
import sys

import pytest
import torch

import slurm
from launching import HERE, assert_as_four_here, environment, launch
from needs import needs

pytestmark = needs(slurm=slurm.unavailable())
JOINED = HERE / "scripts" / "joined.py"


@pytest.fixture(scope="module")
def cluster():
    with slurm.Slurm() as started:
        yield started


def srun(cluster, *words, **more):
    clean = {name: value for name, value in environment().items() if not name.startswith(("SLURM_", "OMPI_", "PMIX_"))}
    variables = {**clean, **cluster.environment, "MASTER_ADDR": "127.0.0.1", "PACELINE_SECRET": "of this test", **more}
    done = subprocess.run(["srun", *words], env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.dear
def test_two_nodes_of_srun_train_to_the_bits_of_two_nodes_here(cluster, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    words = ["-N2", "--ntasks-per-node=1", sys.executable, JOINED, tmp_path / "far"]
    output = srun(cluster, *words, PACELINE_ENGINE="sequential")
    assert output == ["node 0 of 2 is done", "node 1 of 2 is done"]
    launch(JOINED, tmp_path / "near", engine="sequential", num_nodes=2)
    for name in ("0.pt", "1.pt"):
        far, near = (torch.load(tmp_path / where / name, weights_only=True) for where in ("far", "near"))
        assert all(torch.equal(far[key], near[key]) for key in near)


@pytest.mark.dear
def test_two_tasks_on_each_of_two_nodes_train_to_the_bits_of_such_nodes_here(cluster, tmp_path):
    output = srun(cluster, "-N2", "--ntasks-per-node=2", "--overcommit", sys.executable, JOINED, tmp_path)
    assert output == [f"process {rank} of 2 of node {node} of 2 is done" for rank in range(2) for node in range(2)]
    assert_as_four_here(tmp_path)


@pytest.mark.dear
def test_unevenly_distributed_tasks_know_their_ranks(cluster):
    """Three tasks on two nodes: Slurm distributes them, or fills the first node."""
    words = (
        "from paceline.environment import LaunchEnvironment; "
        "w = LaunchEnvironment.of_environment(); print(w.rank, w.node, w.local_rank, w.sizes)"
    )
    output = [line.split(" ", 3) for line in srun(cluster, "-N2", "-n3", "--overcommit", sys.executable, "-c", words)]
    assert [int(rank) for rank, *_ in output] == [0, 1, 2]
    assert {sizes for *_, sizes in output} == {"(2, 1)"}
    assert [(int(node), int(local)) for _, node, local, _ in output] == [(0, 0), (0, 1), (1, 0)]
