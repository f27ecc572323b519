"""Each command of the guide's part about Slurm, as it stands there, on a real Slurm of four nodes."""

import re
import sys
from pathlib import Path

import pytest

import slurm
from launching import from_outside
from needs import needs

pytestmark = [pytest.mark.dear, pytest.mark.long, needs(slurm=slurm.unavailable())]
GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
PART = GUIDE[GUIDE.index("Under Slurm, ") : GUIDE.index("Apart from `paceline sbatch`")]
BLOCK = re.search(r"^```\n(.*?)^```$", PART, re.DOTALL | re.MULTILINE)[1].splitlines()
INLINE = re.findall(r"`((?:salloc|srun|paceline \w+) [^`]+)`", PART.replace("\n", " "))
SCRIPT = """
import sys, torch, paceline
from torch.nn.functional import cross_entropy

assert sys.argv[1:] in ([], ["--lr", "0.1"])
model = torch.nn.Linear(64, 2)
data = torch.utils.data.TensorDataset(torch.randn(640, 64), torch.zeros(640, dtype=torch.long))
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, batch_size=64) as pace:
    for batch in pace.batches(data, epochs=3):
        pace.step(batch)
    print("done", pace.world.node, "of", len(pace.world.sizes), flush=True)
"""
NAMES = {"paceline": (sys.executable, "-m", "paceline"), "python": (sys.executable,)}


@pytest.fixture(scope="module")
def cluster():
    with slurm.Slurm(4, cpus=16) as started:
        yield started


@pytest.fixture(autouse=True)
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)


def by(cluster, command, folder, *before, **more):
    words = [each for word in command.split() for each in NAMES.get(word, (word,))]
    return from_outside([*cluster.inside, *before, *words], folder, **cluster.environment, **more)


def ends(text):
    return sorted(re.findall(r"^(?:\[\S+\] )?(done \d of \d)$", text, re.MULTILINE))


def test_the_commands_are_all_found():
    assert [command.split()[:2] for command in BLOCK] == [["paceline", "sbatch"], ["sbatch", "train.sbatch"]]
    assert [command.split()[:2] for command in INLINE] == [
        *(["salloc", "-N"], ["srun", "--ntasks-per-node=1"]),
        *(["paceline", "plan"], ["paceline", "run"]),
    ]


def test_a_batch_script(cluster, tmp_path):
    write, submit = BLOCK
    by(cluster, write, tmp_path)
    by(cluster, submit.replace("sbatch", "sbatch --wait", 1), tmp_path)
    (output,) = tmp_path.rglob("slurm-*.out")
    assert ends(output.read_text()) == [f"done {node} of 4" for node in range(4)]


def test_tasks_of_an_allocation(cluster, tmp_path):
    allocate, start, *_ = INLINE
    text = by(cluster, start, tmp_path, *allocate.split(), "-Q", PACELINE_SECRET="of this test")
    assert ends(text) == [f"done {node} of 4" for node in range(4)]


def test_a_plan_and_a_run_in_an_allocation(cluster, tmp_path):
    allocate, _, plan, run = INLINE
    text = by(cluster, plan, tmp_path, *allocate.split(), "-Q")
    assert "<- chosen" in text
    assert {f"n{i}" for i in range(1, 5)} <= set(text.split())
    assert ends(by(cluster, run, tmp_path, *allocate.split(), "-Q")) == ["done 0 of 2", "done 1 of 2"]
