"""What `paceline sbatch` writes runs on a real Slurm, and resumes after it was stopped and queued again."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import slurm
from launching import environment
from needs import needs
from paceline.launch.batch_script import BatchJob, write
from paceline.report import record

SCRIPT = """
import os, sys, time, torch, paceline
from torch.nn.functional import cross_entropy

torch.manual_seed(1)
model = torch.nn.Linear(4, 2)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with paceline.join(model, optimizer, cross_entropy, batch_size=8, shares="equal") as pace:
    for batch in pace.batches(data, epochs=6):
        pace.step(batch)
        time.sleep(float(sys.argv[1]))
    if pace.leader:
        torch.save(model.state_dict(), sys.argv[2])
"""


OWN = """
import os, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 2).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
if os.path.exists("own.pt"):
    done, weights = torch.load("own.pt")
    model.load_state_dict(weights)
dist.barrier()
for step in range(done, 40):
    torch.manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 4).double()).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save((step + 1, model.state_dict()), "new.pt")
        os.replace("new.pt", "own.pt")
        print("step", step, type(model).__module__, flush=True)
    time.sleep(0.1)
"""


def test_the_script_is_as_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = BatchJob(["a b.py", "--x", "y z"], 4, "processes:8", 2, "8:00:00", "gpu", Path("my runs"))
    write(job, tmp_path / "job.sbatch")
    text = (tmp_path / "job.sbatch").read_text()
    assert subprocess.run(["bash", "-n", "job.sbatch"], cwd=tmp_path, check=False).returncode == 0
    for line in ("nodes=4", "ntasks-per-node=8", "cpus-per-task=2", "time=8:00:00", "partition=gpu", "signal=TERM@120"):
        assert f"#SBATCH --{line}\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --output='my runs/slurm-%j.out'\n" in text
    assert f"srun --cpus-per-task=2 {sys.executable} 'a b.py' --x 'y z'\n" in text
    write(job, tmp_path / "job.sbatch")
    (tmp_path / "mine").write_text("#!/bin/bash\n")
    with pytest.raises(ValueError, match="mine exists and was not written by `paceline sbatch`"):
        write(job, tmp_path / "mine")
    for wrong, why in (
        ({"nodes": 0}, "nodes is a number from 1"),
        ({"time": "soon"}, "--time is minutes, or HH:MM:SS"),
    ):
        with pytest.raises(ValueError, match=why):
            BatchJob(["train.py"], **wrong)
    assert BatchJob(["train.py"], plan="threads:4").tasks == 1
    for more, most in (({}, 20), ({"restarts": 3}, 3), ({"module": "m"}, 0), ({"module": "m", "restarts": 3}, 3)):
        assert f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ]' in BatchJob(["train.py"], **more).text()


def by(cluster, *words, cwd=None):
    clean = {name: value for name, value in environment().items() if not name.startswith(("SLURM_", "PACELINE_"))}
    variables = {**clean, **cluster.environment, "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(words, env=variables, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until(what, seconds=60):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return found


def trained(cluster, folder, name, pause, stops=False):
    """The weights after a job, which ``stops`` after some steps, and is begun again at once."""
    command = ["-m", "paceline", "sbatch", "-N", "2", "--plan", "sequential", "--out", name, "--time", "10"]
    by(cluster, sys.executable, *command, "train.py", pause, f"{name}.pt", cwd=folder)
    job = by(cluster, "sbatch", "--parsable", "train.sbatch", cwd=folder).strip()
    if stops:
        until(lambda: (folder / name / "record.jsonl").exists() and len(steps(folder / name)) > 5)
        by(cluster, "scancel", "--signal=TERM", job)
        until(lambda: "Restarts=1" in state(cluster, job))
    until(lambda: ended(cluster, job), 120)
    secret = folder / name / "secret"
    assert (secret.stat().st_mode & 0o777, len(secret.read_text().strip())) == (0o600, 64)
    assert secret.read_text().strip() not in next((folder / name).glob("slurm-*.out")).read_text()
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.dear
@needs(slurm=slurm.unavailable())
def test_a_job_that_is_stopped_is_queued_again_and_ends_as_if_it_had_not_been(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with slurm.Slurm() as cluster:
        whole = trained(cluster, tmp_path, "the whole", "0")
        stopped = trained(cluster, tmp_path, "stopped", "0.15", stops=True)
    assert any(event["event"] == "restore" for event in record.read(tmp_path / "stopped"))
    assert [event["step"] for event in steps(tmp_path / "stopped")] == list(range(48))
    assert all(torch.equal(value, stopped[key]) for key, value in whole.items())


@pytest.mark.dear
@needs(slurm=slurm.unavailable())
def test_a_script_that_saves_by_itself_is_queued_again_as_often_as_is_asked_for(tmp_path):
    (tmp_path / "ddp.py").write_text(OWN)
    out = tmp_path / "own"
    with slurm.Slurm() as cluster:
        words = ["sbatch", "-N", "2", "--out", "own", "--time", "10", "--restarts", "1", "ddp.py"]
        by(cluster, sys.executable, "-m", "paceline", *words, cwd=tmp_path)
        job = by(cluster, "sbatch", "--parsable", "ddp.sbatch", cwd=tmp_path).strip()
        until(lambda: out.exists() and len(computed(out)) > 5)
        by(cluster, "scancel", "--signal=TERM", job)
        until(lambda: "Restarts=1" in state(cluster, job))
        until(lambda: ended(cluster, job), 120)
    assert sorted(set(computed(out))) == list(range(40))
    assert len(computed(out)) <= 41  # one may have been computed and not saved
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        optimizer.zero_grad()
        for rank in range(2):
            torch.manual_seed(1000 * step + rank)
            (model(torch.randn(8, 4).double()).square().mean() / 2).backward()
        optimizer.step()
    _, weights = torch.load(tmp_path / "own.pt", weights_only=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[f"module.{name}"], value, rtol=1e-12, atol=0)


def computed(out):
    """The steps of all starts, of our class."""
    lines = [line.split() for path in out.glob("slurm-*.out") for line in path.read_text().splitlines()]
    return [int(words[1]) for words in lines if words[:1] == ["step"] and words[2].startswith("paceline")]


def steps(folder):
    return [event for event in record.read(folder) if event["event"] == "step"]


def ended(cluster, job):
    """Does not wait for the two minutes after which Slurm begins a job again, and sets again whenever a task ends."""
    found = state(cluster, job)
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    # the reason is that of the last time that Slurm looked, which may have been before it set the time
    if "JobState=PENDING" in found and found.partition("EligibleTime=")[2].split()[0] > now:
        time.sleep(2)  # Slurm revokes the credentials of the job up to the second in which it was stopped
        by(cluster, "scontrol", "update", f"JobId={job}", "StartTime=now")
    assert "JobState=FAILED" not in found, found
    return "JobState=COMPLETED" in found


def state(cluster, job):
    return by(cluster, "scontrol", "show", "job", job)
