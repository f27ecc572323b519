"""What the zoo's runner says is so: it compares with a plain loop, and calls wrong what differs without a word."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from zoo.case import FAMILIES, Case
from zoo.judge import Outcome, judge
from zoo.plain import Plain
from zoo.ranks import Trained

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "benchmarks" / "zoo"
PACKAGES = Path(sys.prefix) / "zoo"
HINT = "paceline: layer 'norm' normalizes over a batch"
CASE = Case("a", "b", torch.optim.SGD, differs="over a batch")


def trained(error: str = "", said: str = "", off: float = 0.0, buffer: float = 1.0, loss: float = 1.0) -> Trained:
    return Trained({"w": torch.ones(3) + off}, {"mean": torch.tensor(buffer)}, [loss], error, said)


FIRST = Trained({"w": torch.zeros(3)}, {"mean": torch.tensor(0.0)}, [])
NEUTRAL = "paceline: threads:2, not measured; `paceline run SCRIPT` measures and may be faster"


@pytest.mark.parametrize(
    ("ranks", "control", "outcome"),
    [
        ([trained(), trained()], 0.0, Outcome.EXACT),
        ([trained(off=1e-12), trained(off=1e-12)], 0.0, Outcome.EXACT),
        ([trained(off=1e-7), trained(off=1e-7)], 1e-7, Outcome.ROUNDED),
        ([trained(off=1e-7), trained(off=1e-7)], 1e-9, Outcome.WRONG),
        ([trained(off=0.1), trained(off=0.1)], 0.1, Outcome.WRONG),  # what differs in parts too is no rounding
        ([trained(), trained(off=1e-3)], 0.0, Outcome.WRONG),  # processes that are not alike
        ([trained(buffer=2.0), trained()], 0.0, Outcome.WRONG),
        ([trained(loss=2.0), trained(loss=2.0)], 0.0, Outcome.WRONG),
        ([trained(off=0.1), trained(off=0.1, said=HINT)], 0.1, Outcome.REPORTED),
        ([trained(), trained(said=HINT)], 0.0, Outcome.ALARM),
        ([trained(), trained(said=NEUTRAL)], 0.0, Outcome.EXACT),
        ([trained(off=0.1, said="a warning"), trained(off=0.1, said="paceline: saved")], 0.1, Outcome.WRONG),
        ([trained(off=0.1, said=NEUTRAL), trained(off=0.1)], 0.1, Outcome.WRONG),
        ([trained("ValueError: join: no"), trained("LinkError: rank 0 was lost")], 0.0, Outcome.REFUSED),
        ([trained(), trained("ValueError: join: no")], 0.0, Outcome.REFUSED),
        ([trained("KeyError: 'x'"), trained("LinkError: rank 0 was lost")], 0.0, Outcome.FAILED),
        ([trained("died: it said nothing"), trained()], 0.0, Outcome.FAILED),
    ],
)
def test_what_became_of_a_case(ranks, control, outcome):
    verdict = judge(CASE, ranks, trained(), FIRST, lambda: (control,))
    assert verdict.outcome is outcome, verdict
    assert verdict.outcome.bad == (outcome in (Outcome.WRONG, Outcome.ALARM, Outcome.FAILED))


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("weighed", [False, True])
def test_the_control_in_parts_is_the_plain_loop(parts, weighed):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(11, 4, dtype=torch.float64), torch.randint(0, 3, (11,)))

    def loss(output, target):
        total = F.cross_entropy(output, target, reduction="sum")
        return (total, len(target)) if weighed else total / len(target)

    results = []
    for each in (1, parts):
        torch.manual_seed(1)
        model = nn.Linear(4, 3).double()
        pace = Plain(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, batch_size=4, clip=0.1, parts=each)
        results.append(([pace.step(batch) for batch in pace.batches(data, 2)], model.weight.detach()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=0)


def names(module: str) -> list[str]:
    """Of its cases: functions below a decorator that `family` made."""
    tree = ast.parse((ZOO / f"{module}.py").read_text())
    return [each.name for each in tree.body if isinstance(each, ast.FunctionDef) and each.decorator_list]


def test_every_case_is_in_the_docs():
    page = (ROOT / "docs" / "zoo.md").read_text()
    cases = [name for module in FAMILIES for name in names(module)]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == cases, "make zoo"
    assert len(cases) >= 60
    assert "0 WRONG" in page


def zoo(*arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT / "benchmarks", ROOT / "src", PACKAGES)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zoo", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.mark.dear
@pytest.mark.timeout(300)
def test_one_is_trained():
    done = zoo("lora", "--only", "layers", limit_s=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exact") == 3
    assert "zoo: 1 models, 3 of 3 results" in done.stdout


@pytest.mark.dear
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not (PACKAGES / "timm").is_dir(), reason="make zoo installs what it needs")
def test_all_are_trained(tmp_path):
    done = zoo("--page", str(tmp_path / "zoo.md"), limit_s=2900)
    assert done.returncode == 0, done.stdout + done.stderr
