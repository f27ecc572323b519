"""The commands as a user runs them: train, run, verify, list, and the example, in real processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from cluster import Cluster
from launching import python_path
from machines import needs_cluster
from paceline import registry
from paceline.cli import prepare
from paceline.report.record import read
from paceline.train import run
from paceline.train.models import alexnet
from paceline.train.settings import Settings

pytestmark = pytest.mark.long

HERE = Path(__file__).parents[1] / "support"
OWN_LOOP = str(HERE.parents[1] / "examples" / "own_loop.py")


def paceline(*words, code=0, cwd=None, limit_s=100, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *map(str, words)],
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_train_without_arguments_measures_chooses_and_learns(tmp_path):
    # it trains on all cores, of which other tests take some
    said = paceline("train", cwd=tmp_path, limit_s=200)
    assert re.search(r"machine: .* cores", said)
    rows = re.findall(r"^(\S+) .* ([\d.]+)x ", said, re.MULTILINE)
    assert rows[0] == ("sequential", "1.00")  # measured, or where there is no time for it, predicted
    chosen = re.search(r"plan: (\S+) \((.+)\)", said)
    assert chosen[1] in [name for name, _ in rows] or "as predicted" in chosen[2]
    accuracies = [float(value) for value in re.findall(r"test accuracy ([\d.]+)%", said)]
    assert len(accuracies) == 5
    assert accuracies[-1] >= 95
    folder = tmp_path / re.search(r"run: (\S+)", said)[1]
    events = read(folder)
    happened = [event["event"] for event in events if event["event"] not in ("step", "usage", "hint")]
    # a checkpoint is whole some time after the step that it is of
    assert [kind for kind in happened if kind != "checkpoint"] == ["plan", "join", *["epoch"] * 5, "end"]
    assert happened.count("checkpoint") == 5
    assert sum(event["event"] == "step" for event in events) == 5 * -(-6000 // 64)
    assert "0.weight" in load_file(folder / "weights.safetensors")


@pytest.fixture
def photos(tmp_path):
    """Three classes of JPEGs of three sizes; a class has its colour."""
    for label, colour in enumerate(((200, 60, 60), (60, 200, 60), (60, 60, 200))):
        (tmp_path / "photos" / f"class{label}").mkdir(parents=True)
        for i in range(5):
            size = [(300, 260), (256, 400), (500, 375)][i % 3]
            Image.new("RGB", size, colour).save(tmp_path / "photos" / f"class{label}" / f"{i}.jpg")
    return tmp_path / "photos"


@pytest.mark.dear
def test_alexnet_trains_on_a_folder_of_jpegs(photos, tmp_path):
    words = ("--data", photos, "--epochs", 1, "--batch-size", 4, "--engine", "processes:2", "--out", tmp_path / "run")
    said = paceline("train", "--model", "alexnet", *words)
    assert re.search(r"epoch 1/1: loss \d\.\d+, accuracy .*, test accuracy", said)
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == 57_016_131
    assert weights.keys() == alexnet.build(3).state_dict().keys()
    assert sum(event["event"] == "step" for event in read(tmp_path / "run")) == 3


@pytest.mark.dear
def test_a_broken_image_is_one_error_that_names_it(photos, tmp_path):
    for broken in (photos / "class1").iterdir():
        broken.write_bytes(broken.read_bytes()[:100])
    words = ["--model", "alexnet", "--data", photos, "--engine", "sequential", "--out", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(r"paceline: cannot read .*\n- .*class1/\d\.jpg", done.stderr)


@pytest.mark.dear
@pytest.mark.parametrize("start", [(), ("-m", "paceline", "run", "--engine", "processes:2")], ids=["alone", "run"])
def test_the_example_learns_and_prints_once(start):
    done = subprocess.run([sys.executable, *start, OWN_LOOP], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:8] for line in lines] == ["epoch 1:", "epoch 2:", "epoch 3:"]
    assert float(re.search(r"accuracy ([\d.]+)%", lines[-1])[1]) > 97


def test_run_passes_arguments_and_exit_codes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(int(sys.argv[2]))")
    said = paceline("run", "--engine", "sequential", script, "--engine", "7", code=7)
    assert said == "['--engine', '7']\n"


def test_list_gives_every_plug_in_its_description():
    said = paceline("list").splitlines()
    for room in registry.ROOMS:
        for name in registry.names(room):
            assert any(re.match(rf"{room} +{name} +\S+ \S+", line) for line in said)


@pytest.mark.dear
@pytest.mark.parametrize("how", [(), *(("--engine", name) for name in ("processes:2", "processes:2/pipeline:2"))])
def test_verify_says_the_same_of_an_exact_exchange(how):
    said = paceline("verify", "--steps", 6, "--nodes", 2, *how, OWN_LOOP)
    assert re.search(r"6 steps in float64, dropout off: .*\nthe same\n", said)


@pytest.mark.dear
def test_verify_catches_another_mathematics(tmp_path):
    """Weights averaged every other step are not one process on the global batch."""
    script = tmp_path / "local_steps.py"
    script.write_text(Path(OWN_LOOP).read_text().replace("batch_size=256", 'batch_size=256, exchange="local_sgd:2"'))
    assert "NOT the same" in paceline("verify", "--steps", 4, script, code=1)


@pytest.mark.dear
@needs_cluster
def test_verify_on_two_machines():
    with Cluster(2, "1gbit") as cluster:
        command = [sys.executable, "-m", "paceline", "verify", "--steps", "5", OWN_LOOP]
        nodes = [cluster.start(n, command, stdout=subprocess.PIPE, text=True) for n in range(2)]
        said = [node.communicate(timeout=100)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0]
        assert "the same" in said[0]


@pytest.mark.dear
@needs_cluster
def test_bytes_on_the_wire_are_those_declared(tmp_path):
    """Conservation: what the network cards counted is what the exchange's cost says, plus small change."""
    with Cluster(2) as cluster:
        command = [sys.executable, str(HERE / "scripts" / "wire.py"), str(tmp_path)]
        nodes = [
            cluster.start(
                n,
                command,
                {"PYTHONPATH": python_path(HERE.parents[1] / "benchmarks"), "PACELINE_ENGINE": "sequential"},
            )
            for n in range(2)
        ]
        assert [node.wait(100) for node in nodes] == [0, 0]
    for node in range(2):
        said = json.loads((tmp_path / f"{node}.json").read_text())
        assert said["declared"] == pytest.approx(said["counted_by_link"], rel=0.01)
        assert 1.0 <= said["counted_by_card"] / said["declared"] < 1.1
        assert said["declared"] < 0.5 * said["dense"], "factors saved nothing"


@pytest.mark.dear
def test_verify_says_why_batch_norm_differs(tmp_path):
    script = tmp_path / "normed.py"
    script.write_text(Path(OWN_LOOP).read_text().replace("nn.ReLU(), nn.Linear(512, 512)", "nn.BatchNorm1d(512)"))
    said = paceline("verify", "--steps", 3, script, code=1)
    assert "local batch norm" in said
    assert "join(batch_norm='sync')" in said
    assert "NOT the same" in said


def test_commands_begin_without_torch():
    """Story: an error's name was defined beside tensors, and `paceline list` took seconds."""
    words = "import sys, paceline.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("asked", "checked"), [({}, False), ({"data": "photos"}, True), ({"batch_size": 8}, True)])
def test_only_what_was_asked_for_is_checked_before_anything_is_measured(asked, checked, monkeypatch):
    """Story: where nothing was asked for, `paceline train` imported torch for that, once more than it trains."""
    done = []
    monkeypatch.setattr(run, "check", lambda settings: done.append("checked"))
    monkeypatch.setattr(run, "sources", lambda settings: done.append("read"))
    monkeypatch.setattr(prepare.planning, "cached", lambda *_: (None, ""))
    monkeypatch.setattr(prepare.planning, "make", lambda *_, **__: done.append("measured"))
    prepare.find_or_make_plan(["-m", "paceline.train.run"], "auto", "exact", Settings(**asked), quiet=True)
    assert done == ["checked", "read", "measured"][0 if checked else 2 :]
