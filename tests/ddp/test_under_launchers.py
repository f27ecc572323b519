"""DDP scripts as srun, mpirun and sbatch start them, by `python -m paceline.ddp`."""

import sys
import time

import pytest

import mpirun
import slurm
from launching import from_outside
from needs import needs, want
from paceline.cli import prepare, sbatch
from paceline.launch.batch_script import BatchJob

pytestmark = pytest.mark.long

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 5)).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    (model(torch.full((8, 300), 1.0 + dist.get_rank(), dtype=torch.float64)) ** 2).mean().backward()
    optimizer.step()
weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
size, ours = dist.get_world_size(), type(model).__module__
os.write(1, f"rank {dist.get_rank()} of {size}, {ours}, {weights.norm():.12g}, {sys.argv[1:]}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def ranks(*command, cwd=None, **more):
    return said(from_outside(command, cwd, **more))


def said(output):
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


def under_torchrun(script):
    words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    return ranks(sys.executable, *words, "-m", "paceline.ddp", script, "--lr", 3)


@pytest.mark.dear
def test_of_mpirun(script):
    want(mpi=mpirun.unavailable())
    begin = mpirun.command(2, "-m", "paceline.ddp", script, "--lr", 3)
    found = ranks(*begin)
    assert len(found) == 2
    assert found == under_torchrun(script)


@pytest.mark.dear
@needs(slurm=slurm.unavailable())
def test_of_srun_and_sbatch(script):
    with slurm.Slurm() as cluster:
        there = {**cluster.environment, "MASTER_ADDR": "127.0.0.1"}
        words = "srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "paceline.ddp", script, "--lr", 3
        found = ranks(*words, **there)
        assert len(found) == 2
        assert found == under_torchrun(script)
        write = sys.executable, "-m", "paceline", "sbatch", script.name, "-N", 2, "--lr", 3
        ranks(*write, cwd=script.parent, **there)
        ranks("sbatch", "--wait", "train.sbatch", cwd=script.parent, **there)
        (output,) = (script.parent / "runs" / "train").glob("slurm-*.out")
        end = time.monotonic() + 20
        while len(said(output.read_text())) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        assert said(output.read_text()) == found


@pytest.mark.parametrize(
    ("words", "arguments", "nodes"),
    [
        (["-N", "4"], [], 4),
        (["--lr", "3", "--nodes=4", "x"], ["--lr", "3", "x"], 4),
        (["-N4", "--nod", "2"], ["--nod", "2"], 4),
        (["--", "-N", "4"], ["-N", "4"], None),
        (["--lr", "-1"], ["--lr", "-1"], None),
    ],
)
def test_slurms_options_may_follow_the_script(words, arguments, nodes):
    others, asked = sbatch.behind_script(words)
    assert (others, asked.nodes) == (arguments, nodes)


def test_a_wrong_value_behind_the_script_is_told():
    with pytest.raises(ValueError, match=r"-N/--nodes: invalid int value: 'x'; the script's own options .* follow --"):
        sbatch.behind_script(["-N", "x"])


def test_run_says_whose_an_option_behind_the_script_is(capsys):
    prepare.note_behind_script(["train.py", "--lr", "3", "--out", "here"])
    assert capsys.readouterr().out == ""
    prepare.note_behind_script(["train.py", "--plan=processes:2", "--nodes", "2"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("--plan, --nodes after train.py is an argument of the script; options of paceline go before")


def test_a_batch_script_starts_a_ddp_script_by_its_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = BatchJob(["train.py", "--x"], 2, module="paceline.ddp").text()
    assert f"srun --cpus-per-task=1 {sys.executable} -m paceline.ddp train.py --x\n" in text
