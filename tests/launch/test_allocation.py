"""In a Slurm allocation, whose nodes srun reaches: a plan over all of them, a run, and what is told where it cannot."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import slurm
from launching import HERE, environment, launch
from needs import needs
from paceline.launch import allocation
from paceline.launch.hosts import SRUN, Host, Way

JOINED = HERE / "scripts" / "joined.py"
SCRIPT = """
import torch, paceline
from torch.nn.functional import cross_entropy

model = torch.nn.Linear(64, 2)
data = torch.utils.data.TensorDataset(torch.randn(640, 64), torch.zeros(640, dtype=torch.long))
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, batch_size=64) as pace:
    for batch in pace.batches(data, epochs=3):
        pace.step(batch)
"""


@pytest.fixture
def allocated(monkeypatch):
    """A command of Slurm's own that lists three nodes, as at the beginning of a batch script."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    listed = subprocess.CompletedProcess([], 0, "n1\nn2\nn3\n", "")
    monkeypatch.setattr(allocation.subprocess, "run", lambda *_, **__: listed)
    return listed


def test_all_nodes_are_meant_and_reached_by_srun_unless_others_are_named(allocated, monkeypatch):
    assert allocation.reached(None, "ssh") == ("n1,n2,n3", SRUN)
    assert allocation.reached("n1,n3", "ssh") == ("n1,n3", SRUN)
    assert allocation.reached("n1,far", "ssh") == ("n1,far", "ssh")
    assert allocation.reached("n1,n3", "ssh -F mine") == ("n1,n3", "ssh -F mine")
    allocated.stdout = "n1\n"
    assert allocation.reached(None, "ssh") == (None, "ssh"), "one node is planned as any machine"
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    assert allocation.reached(None, "ssh") == (None, "ssh")
    assert allocation.reached("a,b", "ssh") == ("a,b", "ssh")


def test_one_of_several_tasks_and_a_slurm_that_does_not_answer_are_told(allocated, monkeypatch):
    allocated.returncode, allocated.stderr = 1, "no controller"
    with pytest.raises(
        ValueError, match=r"SLURM_JOB_NODELIST=n\[1-3\]\) cannot be listed by scontrol \(no controller\)"
    ):
        allocation.nodes()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    with pytest.raises(ValueError, match="srun has started 3 of this command"):
        allocation.nodes()


def test_srun_is_given_the_host_and_pythons_arguments():
    command = Way("/opt/slurm/bin/srun --account=mine", "/usr/bin/python").command(Host("n1", "me@n1"), "-c", "a b")
    assert command[:2] == ["/opt/slurm/bin/srun", "--account=mine"]
    assert command[-4:] == ["--nodelist=n1", "/usr/bin/python", "-c", "a b"]
    assert "--overlap" in command


@pytest.fixture(scope="module")
def cluster():
    with slurm.Slurm() as started:
        yield started


def command(cluster, *words):
    clean = {name: value for name, value in environment().items() if not name.startswith(("SLURM_", "PACELINE_"))}
    words = [*cluster.inside, "salloc", "-N2", "-Q", sys.executable, "-m", "paceline", *map(str, words)]
    return {"args": words, "env": {**clean, **cluster.environment}, "text": True}


def by(cluster, *words, cwd=None):
    return subprocess.run(**command(cluster, *words), cwd=cwd, capture_output=True, timeout=200, check=False)


@pytest.mark.dear
@needs(slurm=slurm.unavailable())
def test_a_plan_is_over_all_nodes_of_the_allocation(cluster, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = by(cluster, "plan", "--rows", "sequential", "--budget", 20, "--out", "plan.toml", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["n1", "n2"] in [words[:2] for words in lines], done.stdout
    both = next(words for words in lines if words[:3] == ["2", "64", "shared"])
    assert "±" in both, "was not measured on both"
    assert "failed" not in done.stdout
    assert "n2" in (tmp_path / "plan.toml").read_text()


@pytest.mark.dear
@needs(slurm=slurm.unavailable())
def test_two_nodes_train_to_the_bits_of_two_nodes_here(cluster, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    run = ["run", "-H", "n1,n2", "--ssh", "srun", "--plan", "sequential"]
    done = by(cluster, *run, JOINED, tmp_path / "far", cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    launch(JOINED, tmp_path / "near", engine="sequential", num_nodes=2)
    for name in ("0.pt", "1.pt"):
        far, near = (torch.load(tmp_path / where / name, weights_only=True) for where in ("far", "near"))
        assert all(torch.equal(far[key], near[key]) for key in near)


@pytest.mark.dear
@needs(slurm=slurm.unavailable())
def test_a_host_outside_of_the_allocation_and_a_failing_script_are_told(cluster, tmp_path):
    done = by(cluster, "run", "-H", "n1,n7", "--ssh", "srun", JOINED, tmp_path, cwd=HERE)
    assert done.returncode
    assert "n7: srun could not start a task there" in done.stderr
    assert "is it in this allocation, and has that not ended?" in done.stderr
    (tmp_path / "train.py").write_text("raise KeyError('mine')")
    done = by(cluster, "run", "-H", "n1,n2", "--ssh", "srun", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "failed first, with exit code 1: KeyError: 'mine'" in done.stderr


@pytest.mark.dear
@needs(slurm=slurm.unavailable())
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_leaves_nothing_on_any_node(cluster, tmp_path, number):
    script = tmp_path / f"endless{number}.py"
    script.write_text("import time\nprint('runs', flush=True)\ntime.sleep(100)\n")
    run = ["run", "-H", "n1,n2", "--ssh", "srun", script]
    with subprocess.Popen(**command(cluster, *run), cwd=tmp_path, stdout=subprocess.PIPE) as process:
        seen = [process.stdout.readline() for _ in range(2)]
        assert sorted(seen) == ["[n1] runs\n", "[n2] runs\n"]
        launcher = next(pid for pid in holding("paceline", "run", str(script)) if "salloc" not in line(pid))
        os.kill(launcher, number)
        process.communicate(timeout=60)
    end = time.monotonic() + 30
    while left := holding(str(script)):
        assert time.monotonic() < end, list(map(line, left))
        time.sleep(0.2)


def line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def holding(*words):
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if all(word in line(pid) for word in words)]
