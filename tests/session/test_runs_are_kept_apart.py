"""A run's folder is one run's: begun once, gone on with by the same words and data, and by one process at a time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launching import launch, small
from paceline.checkpoint.checkpoint import CheckpointError
from paceline.checkpoint.run_lock import acquire
from paceline.cli import over_ssh, prepare
from paceline.cli.train import _fresh
from paceline.data import images, sample
from paceline.launch.supervise import takeover
from paceline.planner.planner import Plan
from paceline.train import run as train
from paceline.train.settings import Settings

HOLDS = """
import sys, time
from pathlib import Path
from paceline.checkpoint.run_lock import acquire
held = acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture
def few(tmp_path, monkeypatch):
    """The sample, cut short; how many images, and of which classes, can be said."""

    def sources(settings):
        parts = sample.load()
        for part, count in zip(parts, cut["images"], strict=True):
            part._images, part._labels = part._images[:count], part._labels[:count]
            part.classes = cut["classes"]
        return parts

    cut = {"images": (64, 32), "classes": sample.CLASSES}
    monkeypatch.setattr(train, "sources", sources)
    monkeypatch.setenv("PACELINE_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("PACELINE_ENGINE", "sequential")
    return cut


def test_a_launcher_goes_on_with_its_own_run_and_with_no_other(few):
    assert train.run(Settings(epochs=1, batch_size=32))["epochs"] == 1
    assert train.run(Settings(epochs=2, batch_size=32, save_every=1))["epochs"] == 2
    with pytest.raises(ValueError, match=r"of another run: its options are \{.*'lr': 0\.5.*another --out"):
        train.run(Settings(epochs=3, batch_size=32, lr=0.5))
    run = Path(os.environ["PACELINE_FOLDER"])
    Settings(epochs=2, batch_size=32).write(run)
    Settings(epochs=5, batch_size=32, keep=7).check_same_run(run)
    with pytest.raises(
        ValueError, match=r"with the options \{'batch_size': 32\}, and this run has \{'batch_size': 64\}"
    ):
        Settings(batch_size=64).check_same_run(run)
    few["classes"] = ("Trouser", "Bag", "Dress")
    with pytest.raises(ValueError, match=r"the classes are \['Trouser', 'Bag', 'Dress'\], and were"):
        train.run(Settings(epochs=3, batch_size=32))
    few.update(classes=sample.CLASSES, images=(65, 31))
    with pytest.raises(ValueError, match=r"\[65, 31\] images to train on and to test on, and were \[64, 32\]"):
        train.run(Settings(epochs=3, batch_size=32))


def test_images_that_cannot_be_read_are_one_line(monkeypatch, capsys):
    def closed(settings):
        raise PermissionError(13, "Permission denied", "/photos/cat")

    monkeypatch.setattr(train, "sources", closed)
    monkeypatch.setattr(sys, "argv", ["train", "{}"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "paceline: [Errno 13] Permission denied: '/photos/cat'\n"


def test_a_folder_is_one_processs_until_that_ends(tmp_path):
    """Story: the same --resume in two terminals wrote over each other's checkpoints."""
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"another run writes to .*run \(pid {other.pid} on .*\).*--out"):
            acquire(tmp_path / "run")
        with pytest.raises(CheckpointError):
            joined(tmp_path / "run")
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate(timeout=20)
    joined(tmp_path / "run").close()
    joined(tmp_path / "run").close()
    assert acquire(tmp_path / "run") is not None


def joined(folder):
    import paceline

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"batch_size": 8, "engine": "sequential", "folder": folder}
    return paceline.join(model, optimizer, torch.nn.functional.cross_entropy, **options)


def test_two_runs_of_one_second_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = Path("runs/20261123-120000-small")
    assert [str(_fresh(named)) for _ in range(3)] == [f"{named}{end}" for end in ("", "-2", "-3")]


def test_a_folder_that_cannot_be_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run's folder .*file/run cannot be written: check .*file, or give"):
        prepare.check_writable(tmp_path / "file" / "run")
    prepare.check_writable(tmp_path / "not" / "yet")


def test_what_hosts_were_asked_for_is_gone_on_with(tmp_path, monkeypatch):
    """Story: `--resume -H` left out --plan's row, --reproducible and --encrypt without a word."""
    asked, began, codes = [], [], [0, 0]

    def check(nodes, way, paths=(), address=None, needs=None):
        asked.append(address)
        return "127.0.0.1", 1

    def along(nodes, way, command, data):
        return nodes, Path("sent"), command, data

    def ssh(nodes, orders, *more):
        began.append((orders.engines, orders.environment))
        return codes.pop()

    monkeypatch.setattr(over_ssh, "check", check)
    monkeypatch.setattr(takeover, "check", check)
    monkeypatch.setattr(over_ssh, "send_tree", along)
    monkeypatch.setattr(over_ssh.ssh, "start", ssh)
    settings, run = Settings(encrypt=True), tmp_path / "run"
    words = ["-m", "paceline.train.run", settings.to_json()]
    for plan in ("reproducible:8", str(run / "plan.toml")):
        how = prepare.Start("a,b", python="python", address="10.0.0.1", send=True)
        over_ssh.start(how, words, plan, "exact", run, settings)
    assert Plan.read(run / "plan.toml").chosen == "reproducible:8"
    assert [chosen for chosen, _ in began] == [["reproducible:8"] * 2] * 2
    assert all('chosen = "reproducible:8"' in environment["PACELINE_PLAN"] for _, environment in began)
    assert Settings.read(run).encrypt
    assert asked == ["10.0.0.1"] * 4, "also before anything is sent"
    codes.append(2)
    over_ssh.start(prepare.Start("a,b", python="python"), words, "auto", "exact", run, Settings(lr=0.5))
    assert Settings.read(run).lr is None, "the hosts have refused it"


def test_another_programs_manifest_makes_no_shards(tmp_path):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "photos"}))
    train_part, _ = images.load(tmp_path)
    assert train_part.classes == ("cat", "dog")
    assert os.listdir(tmp_path / "cat")


@pytest.mark.dear
@pytest.mark.parametrize("more", [{}, {"PACELINE_NODES": "1:2"}], ids=["fixed", "elastic"])
def test_a_refused_folder_ends_all_processes(tmp_path, more):
    """Story: with --nodes the others took who was refused for lost, and went on in the other run's folder."""
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        script = small(tmp_path, "raise SystemExit(0)")
        environment = {"PACELINE_FOLDER": str(tmp_path / "run"), **more}
        done = launch(str(script), engine="sequential", num_nodes=2, code=1, **environment)
        assert f"another run writes to {tmp_path / 'run'} (pid {other.pid}" in done.stderr
        assert not (tmp_path / "run" / "record.jsonl").exists()
    finally:
        other.kill()
        other.communicate(timeout=20)


def test_settings_are_not_written_over_while_a_run_has_the_folder(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        Settings(lr=0.1).write(tmp_path / "run")
        with pytest.raises(CheckpointError, match="another run writes"):
            over_ssh._save_settings(Settings(lr=0.5), None, tmp_path / "run")
        with pytest.raises(CheckpointError, match="another run writes"):
            prepare.start([], Plan("sequential"), tmp_path / "run", prepare.Start())
        assert Settings.read(tmp_path / "run").lr == 0.1
    finally:
        other.kill()
        other.communicate(timeout=20)
