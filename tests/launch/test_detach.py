"""A detached run outlives its terminal; it can be followed and stopped, and its exit code is kept."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import begin, finish
from paceline.launch.detach import Detached

pytestmark = pytest.mark.long

DEADLINE_S = 40.0


@pytest.fixture
def paceline(tmp_path, monkeypatch):
    """Starts the command, with a state folder of the test's own; kills the runs that are left at the end."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def call(*words):
        return begin(*words, own_session=True, XDG_STATE_HOME=str(tmp_path))

    yield call
    for pid in tmp_path.glob("paceline/detached/*/pid"):
        if Detached(pid.parent).running:
            os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.fixture
def script(tmp_path):
    """A script whose first output is not flushed by it, but must be readable at once."""
    path = tmp_path / "script.py"
    path.write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        "def heard(*_):\n    print('saving', flush=True)\n    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, heard)\n"
        "print('first', sys.argv[1:])\n"
        f"while not Path({str(tmp_path / 'go')!r}).exists():\n    time.sleep(0.02)\n"
        "print('last', flush=True)\nsys.exit(3)"
    )
    return path


def wait_for(text, path):
    end = time.monotonic() + DEADLINE_S
    while text not in path.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def begun(paceline, script, tmp_path, *more):
    output, errors = finish(paceline("run", "--detach", "--plan", "sequential", script, *more))
    (name,) = re.findall(r"^(\S+) continues; paceline attach \1 follows it, --stop ends it$", errors, re.MULTILINE)
    folder = tmp_path / "paceline" / "detached" / name
    wait_for("first", folder / "output")
    return name, folder, output


def test_it_is_followed_to_its_end_and_exit_code(paceline, script, tmp_path):
    name, folder, _ = begun(paceline, script, tmp_path, "--detach")
    pid = int((folder / "pid").read_text())
    assert os.getsid(pid) not in (os.getsid(0), pid), "in the keeper's session, and no terminal's"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "output").stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(rf"{name}  runs .*: run .*script.py --detach\n", finish(paceline("attach"))[0])
    follower = paceline("attach", name[:8])
    assert follower.stdout.readline() == "first ['--detach']\n"
    follower.send_signal(signal.SIGINT)
    assert "continues" in finish(follower, code=130)[1]
    assert Detached(folder).running
    (tmp_path / "go").touch()
    for _ in range(2):  # at its end, and long after
        assert finish(paceline("attach", name), code=3)[0] == "first ['--detach']\nlast\n"
    assert re.fullmatch(rf"{name}  exit code 3 .*\n", finish(paceline("attach"))[0])


def test_stop_is_ctrl_c(paceline, script, tmp_path):
    name, folder, _ = begun(paceline, script, tmp_path)
    assert finish(paceline("attach", "--stop", name), code=130)[0] == "first []\nsaving\n"
    assert Detached(folder).code == 130


def test_a_killed_launcher_is_reported(paceline, script, tmp_path):
    name, folder, _ = begun(paceline, script, tmp_path)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    finish(paceline("attach", name), code=137)
    (folder / "code").unlink()
    assert f"{name} was killed, or its machine stopped" in finish(paceline("attach", name), code=1)[1]


def test_an_error_before_the_start_is_reported_at_once(paceline, script, tmp_path):
    output, errors = finish(paceline("run", "--detach", "--plan", "none.toml", script), code=2)
    assert "there is no plan file 'none.toml'" in output
    assert "continues" not in errors
    _, errors = finish(paceline("attach", "x"), code=2)
    assert errors.startswith("paceline: there is no detached run 'x'; accepted: ")
    assert finish(paceline("attach", "--stop"), code=2)[1].startswith("paceline: --stop needs the id of a run")


def test_the_process_that_waits_for_the_launcher_exits_even_if_it_cannot_note_the_exit_code(tmp_path):
    """Story: on a full disk the forked process continued with the command, beside the process that had forked it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, shutil, sys\nfrom pathlib import Path\nfrom paceline.launch import detach\n"
        "if (folder := os.environ.get(detach.VARIABLE)):\n    shutil.rmtree(folder)\n    sys.exit()\n"
        "folder = Path(sys.argv[1])\nfolder.mkdir()\nread, write = os.pipe()\n"
        "detach._fork(folder, write, os.open(os.devnull, os.O_RDONLY))\n"
        "print(os.read(read, 1 << 16).decode() or 'nothing')\n"
    )
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing\n", "")


def test_the_last_twenty_are_kept(tmp_path, monkeypatch):
    """By the time of their start: ids have no year, and in January the newest runs were once removed."""
    from paceline.launch import detach

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    names = [f"{(i + 1200) % 1230:04}-120000-abcd" for i in range(60)]
    for i, name in enumerate(names):
        folder = detach.home() / name
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "run.json").write_text("{}")
        os.utime(folder / "run.json", (i, i))
    detach._remove_old()
    assert [run.id for run in detach.all_runs()] == names[-20:]
    assert Path(tmp_path, "paceline", "detached").is_dir()


def test_a_folder_without_lock_or_one_that_is_being_removed_is_ignored(tmp_path, monkeypatch):
    """Story: a full disk left a run without a lock, and after that no run could be listed or started."""
    from paceline.launch import detach

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, files in (("1-full", ["output", "lock", "run.json.part"]), ("2-forgotten", ["run.json"])):
        (detach.home() / name).mkdir(parents=True)
        for file in files:
            (detach.home() / name / file).touch()
    detach._remove_old()
    assert [(run.id, run.running) for run in detach.all_runs()] == [("2-forgotten", False)]
