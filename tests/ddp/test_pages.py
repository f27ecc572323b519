"""Every command on the pages for users of other libraries does what its page says, with the script on that page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launching import unedited
from machines import Machines, needs_machines
from paceline.launch.local import free_port

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


def said(command, folder, script):
    (folder / "train.py").write_text(script)
    name, *words = shlex.split(command)
    start = {"paceline": ("-m", "paceline"), "torchrun": (*TORCHRUN, str(free_port()))}[name]
    return unedited((*start, *words), folder)


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


@needs_machines
@pytest.mark.parametrize("page", PAGES)
def test_on_two_machines(page, tmp_path):
    ((script,), (command,)) = blocks(page, "python"), [each for each in commands(page) if HOSTS in each]
    with Machines(2) as machines:
        there = command.replace(HOSTS, f"{machines.hosts(2)} --ssh {shlex.quote(machines.ssh)}")
        text = said(there, tmp_path, script.replace("devices=2", "devices=1, num_nodes=2"))
    assert re.search(r"^(\[node0\] )?2 processes", text, re.MULTILINE)
