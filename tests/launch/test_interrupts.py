"""Ctrl-C and SIGTERM end the step, save and leave no processes; a kill or a full disk costs only unsaved steps.

Real processes and signals. A run that was stopped and resumed is bit-identical to one that was never stopped.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from disks import tmpfs
from launching import HERE, environment, launch
from needs import want
from paceline.checkpoint import checkpoint
from paceline.launch import local
from paceline.launch.signals import Interrupt
from scripts import night
from waiting import OwnTime

pytestmark = pytest.mark.long

NIGHT = str(HERE / "scripts" / "night.py")
PLAIN = [sys.executable, NIGHT]
TWO = [sys.executable, "-m", "paceline", "run", "--engine", "processes:2", NIGHT]
LIMIT_S = 200.0


def begin(command, folder, *arguments):
    return subprocess.Popen(
        [*command, str(folder), *map(str, arguments)],
        env=environment(**({"PACELINE_ENGINE": "sequential"} if command is PLAIN else {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(true, process, what):
    end = time.monotonic() + LIMIT_S
    while not true():
        assert process.poll() is None, f"ended with {process.returncode} before {what}: {process.stderr.read()}"
        assert time.monotonic() < end, f"no {what} within {LIMIT_S:.0f} s"
        time.sleep(0.01)


def steps(folder):
    """(step, loss) of each line that was printed."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / "steps.txt").read_text().splitlines()
        return [(int(step), float(loss)) for step, loss in map(str.split, lines)]
    return []


def pids(folder):
    return [int(path.read_text()) for path in sorted(folder.glob("pid.*"))]


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def stop(command, folder, number, whom, more_steps=4):
    """Starts, waits for some steps, and sends a signal; returns (exit code, stdout, stderr)."""
    done = len(steps(folder))
    process = begin(command, folder)
    try:
        wait_until(lambda: len(steps(folder)) >= done + more_steps, process, "steps")
        os.kill(process.pid if whom == "launcher" else pids(folder)[whom], number)
        output, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert not any(map(alive, pids(folder))), "processes were left behind"
    assert not [path for path in folder.rglob("*") if path.suffix in (".part", ".old")]
    assert f"paceline-{os.getpid()}" not in Path("/proc/net/unix").read_text()
    return process.returncode, output, errors


def small_shm(command):
    """The command with a /dev/shm of its own of 64 kB; unchanged if that cannot be mounted."""
    inside = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
    can = subprocess.run([*inside, "true"], capture_output=True, check=False).returncode == 0
    return [*inside, *command] if can else command


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    process = begin(small_shm(TWO), folder)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return folder, output


def same_end(folder, other):
    weights, want = (torch.load(f / "weights.pt", weights_only=True) for f in (folder, other))
    return steps(folder) == steps(other) and all(torch.equal(weights[name], want[name]) for name in want)


@pytest.mark.dear
def test_two_processes_stopped_twice_end_as_if_never(undisturbed, tmp_path):
    stops = [(signal.SIGTERM, "launcher", 143), (signal.SIGINT, 1, 130)]
    for i, (number, whom, code) in enumerate(stops):
        returned, output, errors = stop(TWO, tmp_path, number, whom)
        assert returned == code
        assert output == ("gone on\n" if i else "begun\n")
        last, _ = steps(tmp_path)[-1]
        assert last == checkpoint.read_newest(tmp_path / "run").step
        messages = [line for line in errors.splitlines() if line.startswith("paceline: stopped by signal")]
        assert len(messages) == 1, errors
        assert f"stopped by signal {number.value} after step {last}; saved {tmp_path / 'run'}" in messages[0]
        assert "Traceback" not in errors
    process = begin(TWO, tmp_path)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert same_end(tmp_path, undisturbed[0])


@pytest.mark.dear
def test_one_process_stopped_twice_ends_as_if_never(tmp_path):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        returned, _, errors = stop(PLAIN, tmp_path / "stopped", number, 0)
        assert returned == code
        assert f"stopped by signal {number.value}" in errors
        assert "Traceback" not in errors
    for folder in (tmp_path / "stopped", tmp_path / "whole"):
        night.train(folder, engine="sequential")
    assert same_end(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.dear
def test_what_a_script_prints_is_read_once(undisturbed):
    assert undisturbed[1] == "begun\n"


@pytest.mark.dear
def test_nothing_is_kept_in_dev_shm(undisturbed):
    if small_shm(["true"]) == ["true"]:
        want(mounts="a /dev/shm of its own needs the right to mount")
    assert (undisturbed[0] / "shm.txt").read_text() == ""


@pytest.mark.dear
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process = begin(TWO, tmp_path, 4)
    try:
        wait_until(lambda: len(list(tmp_path.glob("slow.*"))) == 2, process, "slow step")
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None, "the first is a request to end the step"
        cpu_time = OwnTime(process.pid, *pids(tmp_path))
        os.kill(process.pid, signal.SIGINT)
        while process.poll() is None:
            assert cpu_time.passed_s() < 10
            time.sleep(0.01)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert not any(map(alive, pids(tmp_path)))
    finally:
        process.kill()
        process.wait()


def test_a_signal_repeated_at_once_is_ignored(monkeypatch):
    """Story: a service's stop signals each process, the launcher passes it on, and the second prevented saving."""
    noted, others = [], []
    before = signal.signal(signal.SIGTERM, lambda number, _: others.append(number))
    interrupt = Interrupt(noted.append, [signal.SIGTERM])
    meanwhile = SimpleNamespace(sleep=lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr("paceline.launch.signals.time", meanwhile)
    try:
        signal.raise_signal(signal.SIGTERM)
        assert (noted, others) == ([signal.SIGTERM], [])
        signal.raise_signal(signal.SIGTERM)
        assert (noted, others) == ([signal.SIGTERM], [signal.SIGTERM])
    finally:
        interrupt.close()
        signal.signal(signal.SIGTERM, before)


def test_a_launcher_ignores_a_signal_repeated_at_once(tmp_path, monkeypatch):
    """As a launcher below another one that passes on a signal which both have received."""
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    up, saved = tmp_path / "up", tmp_path / "saved"
    script = (
        "import signal, sys, time\nfrom pathlib import Path\n"
        f"def save(*_):\n    time.sleep(0.8)\n    Path({str(saved)!r}).touch()\n    sys.exit()\n"
        f"signal.signal(signal.SIGTERM, save)\nPath({str(up)!r}).touch()\ntime.sleep(60)"
    )

    def stop():
        end = time.monotonic() + LIMIT_S
        while not up.exists() and time.monotonic() < end:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    assert local.start([sys.executable, "-c", script], "") == 143
    stopping.join()
    assert saved.exists()


@pytest.mark.dear
def test_sigkill_at_random_moments_never_costs_more_than_the_steps_since(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "scripts" / "killed_nights.py"), str(tmp_path / "killed"), "1", "10", "6"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["killed"] >= 7, "a run may be over before its moment comes, not most of them"
    assert len(set(result["kept"])) > 2, result
    night.train(tmp_path / "whole", engine="sequential", epochs=6)
    # a step that is repeated after a kill is the same step
    assert dict(steps(tmp_path / "killed")) == dict(steps(tmp_path / "whole"))
    assert len(steps(tmp_path / "killed")) > len(steps(tmp_path / "whole"))
    weights, want = (torch.load(tmp_path / f / "weights.pt", weights_only=True) for f in ("killed", "whole"))
    assert all(torch.equal(weights[name], want[name]) for name in want)


@pytest.mark.dear
def test_a_full_disk_is_one_error_for_all_and_keeps_the_checkpoints(tmp_path):
    """Whether all wait for the save or train meanwhile: the next step, or the end, reports the error to all."""
    with tmpfs(tmp_path / "disk", f"size={3 << 20}") as run:
        done = launch("full.py", run, engine="processes:2", code=1)
        assert done.stdout == "saved\n"
        lines = [line for line in done.stderr.splitlines() if line]
        assert len(lines) == 1, done.stderr
        match = re.search(
            r"^paceline: cannot write the checkpoint of step (\d+) to \S+: No space left on device; it needs [\d,]+ "
            r"bytes, [\d,]+ are free; checkpoint-(\d{8}) is untouched; make room or choose another folder$",
            lines[0],
        )
        assert match, lines[0]
        assert int(match[1]) == int(match[2]) + 1
        found = checkpoint.read_newest(run)
        assert (found.step, found.damaged) == (int(match[2]), ())
        assert not [path for path in run.rglob("*") if path.suffix in (".part", ".old")]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_runs_restore_the_scripts_handlers_whichever_ends_first(order):
    """Story: the run that ended last restored the handler of the first, which took the script's next Ctrl-C."""
    before, received = signal.getsignal(signal.SIGINT), []
    both = [Interrupt(lambda number, i=i: received.append(i)) for i in range(2)]
    for i in order:
        both[i].close()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not received


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["made", "removed"])
def test_a_launcher_that_is_ended_before_its_processes_begin_or_after_they_have_ended_leaves_nothing(
    number, when, tmp_path, monkeypatch
):
    """Story: a signal between the handlers and the first process reached the launcher alone, which then waited for the
    script to end by itself; one after the handlers were restored left the folder behind."""

    class Struck(tempfile.TemporaryDirectory):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            if when == "made":
                signal.raise_signal(number)

        def cleanup(self):
            if when == "removed":
                signal.raise_signal(number)
            super().cleanup()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local.tempfile, "TemporaryDirectory", Struck)
    before = signal.getsignal(number)
    script = f"import time; time.sleep({60 if when == 'made' else 0})"
    begin = time.monotonic()
    code = local.start([sys.executable, "-c", script], "sequential", 1, restarts=1)
    assert code == (128 + number if when == "made" else 0)
    assert time.monotonic() - begin < 30
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before
