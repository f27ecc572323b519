"""`paceline verify`, with -H most of all: the run is one process's, or not; nothing is left on the hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import verify as verification
from sshd import Sshd, unavailable

needs_sshd = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "sshd is here")
OWN_LOOP = str(Path(__file__).parent.parent / "examples" / "own_loop.py")


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


def verify(sshd, *words, code=0):
    before = {path.name for path in Path("/tmp").glob("paceline-verify-*")}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "verify", *map(str, words)],
        env={**os.environ, "PACELINE_SSH": sshd.ssh},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    left = {path.name for path in Path("/tmp").glob("paceline-verify-*")} - before
    assert not [name for name in left if re.fullmatch(r"paceline-verify-[0-9a-f]{16}", name)]
    return done.stdout, done.stderr


@needs_sshd
def test_an_exact_run_is_the_same(sshd):
    said, _ = verify(sshd, "--steps", 4, "-H", "one,two", OWN_LOOP)
    assert re.search(r"4 steps in float64, dropout off: .*\nthe same\n$", said)


@needs_sshd
def test_another_mathematics_is_not(sshd, tmp_path):
    script = tmp_path / "local_steps.py"
    script.write_text(Path(OWN_LOOP).read_text().replace("batch_size=256", 'batch_size=256, exchange="periodic:2"'))
    said, _ = verify(sshd, "--steps", 3, "-H", "one,two", script, code=1)
    assert said.endswith("NOT the same\n")


@needs_sshd
def test_a_script_that_ends_early_is_told(sshd, tmp_path):
    script = tmp_path / "short.py"
    script.write_text("print('nothing to do')")
    said, errors = verify(sshd, "--steps", 3, "-H", "one,two", script, code=2)
    assert "[one] nothing to do" in said
    assert re.search(r"the script ended on all nodes \(exit code 0\) before step 3; .*fewer --steps", errors)


@needs_sshd
def test_a_host_that_cannot_take_part_is_told_before_anything_starts(sshd):
    _, errors = verify(sshd, "-H", "one,shut", OWN_LOOP, code=2)
    assert "nothing was started" in errors
    assert "shut: nothing takes ssh connections there" in errors


def test_a_script_that_does_not_end_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(verification, "LIMIT_S", 0.5)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"the script had not ended after 0 s|after 1 s; give fewer --steps"):
        verification.verify([sys.executable, "-c", "import time; time.sleep(60)"], 3, 2, "sequential", "float64")


@pytest.mark.parametrize("code", [130, 143])
def test_who_ends_it_is_not_told_to_mend_it(code):
    with pytest.raises(SystemExit) as ended:
        verification._demand(False, code, 3, "on all nodes")
    assert ended.value.code == code


def test_weights_that_lie_below_tmp_are_their_owners_alone(tmp_path):
    from paceline.probe.witness import Witness

    Witness(tmp_path / "new" / "many", 1, "float64").begin({"weight": torch.zeros(2)})
    assert (tmp_path / "new" / "many" / "first.safetensors").exists()
    assert (tmp_path / "new" / "many").stat().st_mode & 0o777 == 0o700
