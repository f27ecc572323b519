"""Every example runs as it is, alone and on two processes, learns, and speaks once."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launching import launch
from needs import want

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# whether what was printed says that something was learnt
LEARNS = {
    "own_loop": lambda out: percent(out) > 95,
    "images": lambda out: percent(out) > 90,
    "characters": lambda out: losses(out)[-1] < losses(out)[0] - 0.3,
    "tabular": lambda out: losses(out)[-1] < 0.5 * losses(out)[0],
    "finetune": lambda out: percent(out) > 90,
    "residual": lambda out: percent(out) > 60,
}
HERE = [name for name in LEARNS if name != "finetune" or importlib.util.find_spec("transformers")]


def percent(out):
    return float(re.findall(r"accuracy ([\d.]+)%", out)[-1])


def losses(out):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]


def check(name, out):
    assert LEARNS[name](out), out
    assert out.count(out.splitlines()[0]) == 1


@pytest.fixture
def alone(monkeypatch, capsys):
    """Runs one with arguments, in this process; gives what it printed."""
    monkeypatch.setenv("PACELINE_ENGINE", "threads:2")

    def run(name, *arguments):
        if name not in HERE:
            want(transformers="it is not installed")
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return run


@pytest.fixture
def in_eval_mode(monkeypatch):
    """The model of transformers is as from_pretrained() returns it: an example that trains it so is told."""
    if importlib.util.find_spec("transformers"):
        from transformers import BertForSequenceClassification as Kind

        made = Kind.__init__

        def begin(self, config):
            made(self, config)
            self.eval()

        monkeypatch.setattr(Kind, "__init__", begin)


@pytest.fixture(scope="module")
def two_processes():
    done = launch("examples.py", *(EXAMPLES / f"{name}.py" for name in HERE), engine="processes:2", OMP_NUM_THREADS="1")
    assert done.stderr == ""
    parts = re.split(r"^== (\w+)\n", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LEARNS)


@pytest.mark.dear("characters")
@pytest.mark.filterwarnings("ignore")  # those of other libraries are theirs
@pytest.mark.parametrize("name", [name for name in LEARNS if name != "residual"])
def test_alone(name, alone, in_eval_mode):
    check(name, alone(name))


@pytest.mark.dear
@pytest.mark.parametrize("name", LEARNS)
def test_two_processes(name, two_processes):
    if name not in HERE:
        want(transformers="it is not installed")
    check(name, two_processes[name])


@pytest.mark.dear
def test_residual_goes_on_where_it_was(alone, tmp_path):
    first = alone("residual", "--out", tmp_path, "--epochs", "1", "--bf16")
    assert first.startswith("epoch 1")
    second = alone("residual", "--out", tmp_path, "--epochs", "2", "--bf16")
    assert second.startswith("going on after step 19\n")
    assert load_file(tmp_path / "weights.safetensors")["3.body.0.weight"].shape == (8, 8, 3, 3)
