"""The variables of mpirun and srun give each process its rank; inconsistent ones are refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from launching import HERE, environment
from needs import want
from paceline.environment import FORMER_NAMES, LaunchEnvironment, first_host, translate, variable
from paceline.launch.local import start

pytestmark = pytest.mark.long

ABROAD = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM_", "MASTER_")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@pytest.fixture
def world(monkeypatch):
    """The LaunchEnvironment of an environment that has these variables and no others of a launcher."""

    def of(given):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ABROAD) and name not in RANKS}
        monkeypatch.setattr(os, "environ", {**clean, **given})
        return LaunchEnvironment.of_environment()

    return of


def slurm(proc, local, node, **more):
    """One of four tasks on two nodes, as srun sets it."""
    variables = {"PROCID": proc, "LOCALID": local, "NODEID": node, "JOB_ID": 1234, "STEP_ID": 2, "STEP_NUM_TASKS": 4}
    variables |= {"STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "gpu[07-08]", "NTASKS": 9, **more}
    return {f"SLURM_{name}": str(value) for name, value in variables.items()}


def mpi(rank, size, local_rank, local_size, **more):
    variables = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()}, **more}


def hydra(rank, size, local_rank, local_size, **more):
    """As the mpirun of MPICH and Intel MPI sets it."""
    variables = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
    return {**{name: str(value) for name, value in variables.items()}, **more}


def test_every_task_of_srun_is_placed(world):
    for proc in range(4):
        node, local = divmod(proc, 2)
        want = LaunchEnvironment(local, 2, node, 2, "gpu07", 20_000 + (101 * 1234 + 2) % 12_000)
        assert world(slurm(proc, local, node)) == want
        # with cyclic distribution a node has the same tasks
        assert world(slurm(local * 2 + node, local, node)) == want
    assert translate(slurm(2, 0, 1))["RANK"] == "2"
    assert world({**slurm(0, 0, 0), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}) == LaunchEnvironment(
        0, 2, 0, 2, "10.0.0.1", 5
    )


def test_a_batch_script_may_export_world_size_for_all_tasks(world):
    """Batch scripts usually export WORLD_SIZE, and no RANK. Story: every task took itself for rank 0."""
    variables = {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    for proc in range(4):
        node, local = divmod(proc, 2)
        assert world({**slurm(proc, local, node), **variables}) == LaunchEnvironment(local, 2, node, 2, "a", 5)


def test_two_jobs_and_two_steps_rendezvous_at_different_ports():
    ports = {
        translate(slurm(0, 0, 0, JOB_ID=job, STEP_ID=step))["MASTER_PORT"]
        for job in range(70, 110)
        for step in (0, 1, 2)
    }
    assert len(ports) == 120
    assert all(20_000 <= int(port) < 32_000 for port in ports)


@pytest.mark.parametrize("launcher", [mpi, hydra])
def test_every_rank_of_mpirun_is_placed(launcher, world):
    for rank in range(6):
        given = launcher(rank, 6, rank % 2, 2, MASTER_ADDR="10.0.0.1", PMIX_NAMESPACE="job-1")
        got = world(given)
        assert got == LaunchEnvironment(rank % 2, 2, rank // 2, 3, "10.0.0.1", got.port)
        assert 20_000 <= got.port < 32_000
    assert world(launcher(1, 2, 1, 2, PMIX_NAMESPACE="job-1")) == LaunchEnvironment(1, 2, 0, 1, "127.0.0.1", got.port)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # a batch script itself
        slurm(0, 0, 0, STEP_NUM_TASKS=1),
        mpi(0, 1, 0, 1),
        {**slurm(3, 1, 1), **mpi(3, 4, 1, 2), "RANK": "0", "WORLD_SIZE": "1"},  # the last launcher counts
    ],
    ids=["nothing", "batch", "one task", "one rank", "another launcher"],
)
def test_the_environment_of_a_single_process_changes_nothing(given, world):
    assert translate(given) == {}
    assert world(given) == LaunchEnvironment()


def test_mpirun_inside_a_job_is_mpirun():
    for launcher in (mpi, hydra):
        assert translate({**slurm(0, 0, 0), **launcher(3, 4, 1, 2, MASTER_ADDR="a")})["RANK"] == "3"
    assert translate({**slurm(2, 0, 1), "PMI_RANK": "2", "PMI_SIZE": "4"})["RANK"] == "2", "srun speaks PMI, too"


def test_nodes_with_different_numbers_of_processes_are_placed(world):
    """With the variables of the launcher over ssh, and with those of srun."""
    for rank, (node, local) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0)]):
        here = {
            "RANK": rank,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": (3, 1)[node],
            "GROUP_RANK": node,
        }
        here |= {"MASTER_ADDR": "a", "MASTER_PORT": 5, "PACELINE_LOCAL_SIZES": "3,1"}
        got = world({name: str(value) for name, value in here.items()})
        assert (got.rank, got.world_size, got.sizes, got.node, got.num_nodes) == (rank, 4, (3, 1), node, 2)
        assert got == world(
            slurm(rank, local, node, STEP_TASKS_PER_NODE="3,1") | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}
        )
    assert LaunchEnvironment(1, 2, 1, 3).rank == 3
    wrong = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "PACELINE_LOCAL_SIZES": "3,1"}
    with pytest.raises(ValueError, match="do not fit PACELINE_LOCAL_SIZES=3,1, the processes of each node"):
        world(wrong)
    with pytest.raises(ValueError, match="PACELINE_LOCAL_SIZES='3,x' is no list"):
        world({**wrong, "PACELINE_LOCAL_SIZES": "3,x"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (mpi(1, 4, 0, 2), "mpirun made rank 1 number 0 of the 2 on its node.*--map-by ppr:2:node"),
        (hydra(1, 4, 0, 2), "mpirun made rank 1 number 0 of the 2 on its node.*-ppn 2"),
        (hydra(3, 4, 1, 2), "started 4 processes on several nodes.*add -genv MASTER_ADDR HOST"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "made this process rank 1 of 4 .* MPICH, Intel MPI or Open MPI, or srun"),
        (mpi("x", 4, 1, 2), "OMPI_COMM_WORLD_RANK='x'.*whole number"),
        (mpi(3, 5, 1, 2, MASTER_ADDR="a"), "do not fit together"),
        (slurm(0, 0, 2, STEP_TASKS_PER_NODE="3,1"), "assigned tasks as 3,1 per node, but this is node 2"),
        (slurm(0, 0, 0, STEP_TASKS_PER_NODE="many"), "assigned 4 tasks as many per node"),
        (slurm(0, 0, "b"), "SLURM_NODEID='b'.*whole number"),
        (slurm(0, 0, 5), "GROUP_RANK=5 do not fit together"),
    ],
)
def test_inconsistent_variables_are_reported(given, expected, world):
    with pytest.raises(ValueError, match=expected):
        world(given)


@pytest.mark.parametrize(("local_size", "link"), [(2, None), (1, "gloo")])
def test_the_address_of_rank_0_is_required_without_mpi(local_size, link, world):
    given = mpi(2 * local_size - 1, 2 * local_size, local_size - 1, local_size, PMIX_NAMESPACE="job-1")
    assert world(given | ({"PACELINE_LINK": link} if link else {})).host == ""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"started {2 * local_size} processes.*add -x MASTER_ADDR=HOST to mpirun"):
        paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_size=4)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n[01-04]-ib", "r1n01-ib"),
        ("a.b-c[9-10]", "a.b-c9"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


@pytest.fixture(scope="module")
def mpirun():
    """The command that starts two processes here, where an mpirun runs."""
    path = Path(sys.executable).with_name("mpirun")
    found = str(path) if path.exists() else shutil.which("mpirun")
    want(mpi="" if found else "there is no mpirun on this machine")
    return [found, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]


@pytest.mark.dear
def test_two_processes_of_a_real_mpirun_train_as_two_of_a_node(mpirun, tmp_path):
    clean = {name: value for name, value in environment().items() if not name.startswith(ABROAD)}
    joined = [sys.executable, str(HERE / "scripts" / "joined.py"), str(tmp_path)]
    done = subprocess.run([*mpirun, *joined], env=clean, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"process {rank} of 2 of node 0 of 1 is done" for rank in range(2)]
    assert (tmp_path / "0.pt").exists()


@pytest.mark.parametrize(
    ("row", "own", "expected"),
    [
        ("replicas:2", None, "passive"),
        ("replicas:2+channels_last", None, "passive"),
        ("replicas:2", "active", "active"),
        ("threads:2", None, "-"),
    ],
)
def test_openmp_does_not_spin_beside_replicas_unless_the_user_wants_it(row, own, expected, monkeypatch, capfd):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    assert start([sys.executable, "-c", "import os; print(os.environ.get('OMP_WAIT_POLICY', '-'))"], row) == 0
    assert capfd.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(("name", "former"), FORMER_NAMES.items())
def test_a_variable_is_read_by_its_former_name_too(name, former):
    assert variable(name, {}) == ""
    assert variable(name, {former: "old"}) == variable(name, {name: "old"}) == "old"
    assert variable(name, {former: "old", name: "new"}) == "new"
