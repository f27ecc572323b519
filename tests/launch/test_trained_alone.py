"""Several processes that each train alone are a failure: no join, or no step. Other scripts get no message."""

import os
import sys

import pytest

import launching
from paceline.launch import local
from paceline.launch.supervise import trained_alone

SAID = "2 processes ran the script, and none joined the others (paceline.join, torch.distributed or MPI)"
NEVER = "joined, but never stepped: the optimizer made 3 steps of the script's own, and 2 processes each trained alone"
BY_TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
BY_MPI = """
import _ctypes, ctypes, os, shutil
path = os.path.join(os.path.dirname(__file__), f"libmpi-{os.getpid()}.so")  # every binding maps a library of this name
ctypes.CDLL(shutil.copy(_ctypes.__file__, path))
"""
JOINED = """
import torch, paceline
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
pace = paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8)
data = torch.ones(4, 4), torch.ones(4, dtype=int)
"""
OWN_LOOP = """
for _ in range(3):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
"""
EVALUATED = """
pace.evaluate(torch.utils.data.TensorDataset(*data), lambda output, target: (output.argmax(1) == target).sum())
pace.close()
"""
INSIDE = """
import os, subprocess, sys
if len(sys.argv) == 1:
    sys.exit(subprocess.call([sys.executable, __file__, "inside"]))
"""


def run(folder, text, capfd, engine="processes:2", num_nodes=1, **how):
    script = folder / "train.py"
    script.write_text(text)
    code = local.start([sys.executable, str(script)], engine, num_nodes, together=trained_alone.exit_code, **how)
    return code, capfd.readouterr().err


@pytest.mark.parametrize("where", [("processes:2", 1), ("sequential", 2)], ids=["processes", "nodes"])
def test_a_script_that_never_joins(tmp_path, capfd, where):
    """Story: each process trained alone on all the data, and the run ended with 0."""
    code, errors = run(tmp_path, "print(1)", capfd, *where)
    assert code == 1
    assert errors.count(SAID) == 1


@pytest.mark.dear
@pytest.mark.parametrize(
    ("text", "want"),
    [
        (BY_TORCH, 0),
        (BY_TORCH + "dist.destroy_process_group()", 0),
        (INSIDE + BY_TORCH + "dist.destroy_process_group()", 0),
        (BY_MPI, 0),
        (JOINED + "pace.step(data)\npace.close()", 0),
        (JOINED + "pace.close()", 0),
        (JOINED + EVALUATED, 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(0)", 0),
    ],
    ids=["torch", "torch, left", "inside", "mpi", "joined", "no data", "evaluated", "fails", "ends at once"],
)
def test_processes_that_join_or_fail_get_no_message(tmp_path, capfd, text, want):
    code, errors = run(tmp_path, text, capfd)
    assert code == want, errors
    assert "joined" not in errors


def test_one_process_may_train_alone(tmp_path, capfd):
    assert run(tmp_path, "print(1)", capfd, "sequential") == (0, "")


@pytest.mark.dear("left open")
@pytest.mark.parametrize("end", ["pace.close()", ""], ids=["closed", "left open"])
def test_a_loop_that_joins_and_never_steps(tmp_path, capfd, end):
    code, errors = run(tmp_path, JOINED + OWN_LOOP + end, capfd)
    assert code == 1
    assert errors.count(f"paceline: {NEVER}; call pace.step(batch)") == 1, errors
    assert "Traceback" not in errors


def test_one_process_may_use_a_loop_of_its_own(tmp_path, capfd):
    assert run(tmp_path, JOINED + OWN_LOOP + "pace.close()", capfd, "sequential") == (0, "")


def test_the_users_own_sitecustomize_runs_and_the_path_is_theirs(tmp_path, capfd, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys; sys.stderr.write('own ran\\n')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    show = "import sitecustomize, sys; sys.stderr.write(sitecustomize.__file__ + '|' + sys.path[1] + '\\n')"
    code, errors = run(tmp_path, show, capfd)
    assert code == 1
    assert errors.count("own ran") == 2
    assert errors.count(f"{tmp_path / 'own' / 'sitecustomize.py'}|{tmp_path / 'own'}") == 2


def test_the_command_reports_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    command = ["run", "--plan", "processes:2", script]
    _, errors = launching.finish(launching.begin(*command, XDG_CACHE_HOME=str(tmp_path), PATH=os.environ["PATH"]), 1)
    assert errors.count(SAID) == 1
