"""Every command on the pages for users of other libraries does what its page says, with the script on that page."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

import mpirun
import slurm
from cluster import unavailable as no_cluster
from launching import from_outside, unedited
from machines import Machines
from needs import want
from paceline.launch.local import free_port
from sshd import unavailable as no_sshd

pytestmark = [pytest.mark.dear, pytest.mark.long]
DOCS = Path(__file__).parents[2] / "docs"
PAGES = "from-lightning.md", "from-trainer.md", "from-accelerate.md"
HOSTS = "hostA,hostB"
TORCHRUN = "-m", "torch.distributed.run", "--master-port"


def blocks(page, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


def commands(page):
    lines = "".join(blocks(page, "")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line]


@contextmanager
def reached(command):
    """With namespaces of this machine for its hosts."""
    if not (hosts := re.search("host[A-Z](,host[A-Z])+", command)):
        yield command
        return
    want(sshd=no_sshd(), namespaces=no_cluster())
    count = hosts[0].count("host")
    with Machines(count) as machines:
        yield command.replace(hosts[0], f"{machines.hosts(count)} --ssh {shlex.quote(machines.ssh)}")


def said(command, folder, script):
    (folder / "train.py").write_text(script)
    name, *words = shlex.split(command)
    start = {"paceline": ("-m", "paceline"), "torchrun": (*TORCHRUN, str(free_port()))}[name]
    return unedited((*start, *words), folder)


def ran(command, folder, **more):
    """What any command prints, in which `python` and `mpirun` are those of the tests."""
    given = dict(each.split("=") for each in command.split() if re.match(r"[A-Z_]+=", each))
    name, *words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
    start = {
        "paceline": [sys.executable, "-m", "paceline"],
        "torchrun": [sys.executable, *TORCHRUN, str(free_port())],
        "mpirun": mpirun.command(2)[: -len(("-n", "2", sys.executable))] if name == "mpirun" else [],
    }.get(name, [name])
    words = [sys.executable if word == "python" else word for word in words]
    return from_outside([*start, *words], folder, **given, **more)


@pytest.mark.parametrize(
    ("page", "command"), [(page, each) for page in PAGES for each in commands(page) if HOSTS not in each]
)
def test_on_this_machine(page, command, tmp_path):
    (script,) = blocks(page, "python")
    text = said(command, tmp_path, script)
    if command.startswith("paceline plan"):
        assert re.search(r"^2 processes, paceline's class: \S+ s per step, global batch 16", text, re.MULTILINE)
        assert re.search(r"^paceline's class: \S+x torch's", text, re.MULTILINE)
    else:
        assert re.search(r"^2 processes", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_on_two_machines(page, tmp_path):
    ((script,), (command,)) = blocks(page, "python"), [each for each in commands(page) if HOSTS in each]
    with reached(command) as there:
        text = said(there, tmp_path, script.replace("devices=2", "devices=1, num_nodes=2"))
    assert re.search(r"^(\[node0\] )?2 processes", text, re.MULTILINE)


DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
print(f"{dist.get_world_size()} processes of {type(model).__module__}", flush=True)
dist.destroy_process_group()
"""


def of_ddp():
    page = (DOCS / "from-ddp.md").read_text()
    starts = ("paceline", "torchrun", "srun", "mpirun", "PACELINE_")
    return [
        *(each for each in commands("from-ddp.md") if each.startswith(starts) and not each.startswith("paceline:")),
        *re.findall(r"`(paceline (?:plan|run)[^`]* ddp\.py)`", page),
    ]


@pytest.mark.parametrize("command", [each for each in of_ddp() if HOSTS not in each])
def test_of_a_ddp_script(command, tmp_path):
    (tmp_path / "ddp.py").write_text(DDP)
    if command.startswith("mpirun"):
        want(mpi=mpirun.unavailable())
    if "sbatch" in command:
        assert "(4 nodes, 1 task each)" in ran(command, tmp_path)
        assert "srun" in (tmp_path / "ddp.sbatch").read_text()
    elif command.startswith("srun"):
        want(slurm=slurm.unavailable())
        with slurm.Slurm() as cluster:
            there = {**cluster.environment, "MASTER_ADDR": "127.0.0.1"}
            assert "2 processes of paceline.ddp" in ran(command.replace("srun", "srun -N2"), tmp_path, **there)
    elif " plan " in command:
        assert re.search(r"^paceline's class: \S+x torch's", ran(command, tmp_path), re.MULTILINE)
    else:
        module = "torch.nn.parallel" if "--ddp-off" in command else "paceline.ddp"
        count = 2 if re.search(r"processes:2|per-node 2|-n 2", command) else 1
        assert f"{count} processes of {module}" in ran(command, tmp_path)


def test_the_pages_commands_are_all_found():
    """Or some of them would be run by no test."""
    first = {each.split()[0] for each in of_ddp()}
    assert first == {"paceline", "torchrun", "srun", "mpirun", "PACELINE_DDP_OPTIMIZER=fused"}
    assert {each.split()[1] for each in of_ddp() if each.startswith("paceline")} == {"run", "plan", "sbatch"}


def test_a_ddp_script_on_two_machines(tmp_path):
    (command,) = (each for each in of_ddp() if HOSTS in each)
    (tmp_path / "ddp.py").write_text(DDP)
    with reached(command) as there:
        text = ran(there, tmp_path)
    assert "2 processes of paceline.ddp" in text


JOINS = "from-horovod.md", "from-keras.md", "do-i-need-paceline.md"


def in_text(page):
    found = re.findall(r"`(paceline (?:run|plan) [^`]+)`", (DOCS / page).read_text())
    return [(page, each) for each in dict.fromkeys(found)]


def test_the_commands_of_loops_are_all_found():
    assert [len(in_text(page)) for page in JOINS] == [2, 1, 5]


@pytest.mark.parametrize(("page", "command"), [each for page in JOINS for each in in_text(page)])
def test_of_a_loop(page, command, tmp_path):
    if "keras" in page and not find_spec("keras"):
        pytest.skip("keras is not installed: it wants Python 3.11")
    (script,) = blocks(page, "python") or blocks("from-horovod.md", "python")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "ddp.py").write_text(DDP)
    with reached(command) as there:
        text = ran(there, tmp_path)
    if command.endswith("ddp.py"):
        assert re.search(r"^paceline's class: \S+x torch's", text, re.MULTILINE)
    elif " plan " in command:
        assert "<- chosen" in text
    else:
        assert len(re.findall(r"^(?:\[\S+\] )?loss \d+\.\d+$", text, re.MULTILINE)) == 1
