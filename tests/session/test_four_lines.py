"""A plain loop of torch is joined by four lines, and trains to the same weights, on any number of processes."""

import difflib
import os
import subprocess
import sys

import pytest
import torch

from launching import HERE

PLAIN, JOINED = HERE / "scripts" / "plain", HERE / "scripts" / "four_lines"
NAMES = sorted(path.name for path in PLAIN.glob("*.py"))
MOST = 4
EXACT = 1e-9  # of 64 bits, in another order of sums


def new(name: str) -> list[str]:
    """The lines that are not in the plain script: added, or in the place of others."""
    plain, joined = ((folder / name).read_text().splitlines() for folder in (PLAIN, JOINED))
    found = [line[1:] for line in difflib.unified_diff(plain, joined, n=0, lineterm="") if line.startswith("+")]
    return [line for line in found[1:] if line.strip()]  # the first names the file


def test_there_are_six():
    assert len(NAMES) >= 6
    assert sorted(path.name for path in JOINED.glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_four_lines_are_new(name):
    assert 0 < len(new(name)) <= MOST, "\n".join(new(name))


def trained(folder, *command):
    """The weights of every process."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command), str(folder / "weights")]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights.*"))]


@pytest.mark.dear
@pytest.mark.parametrize("name", NAMES)
def test_the_same_weights(tmp_path, name):
    (plain,) = trained(tmp_path / "plain", PLAIN / name)
    run = ["-m", "paceline", "run", "--plan"]
    (alone,) = trained(tmp_path / "alone", *run, "sequential", JOINED / name)
    both = trained(tmp_path / "both", *run, "processes:2", JOINED / name)
    assert len(both) == 2
    assert all(torch.equal(both[0][key], both[1][key]) for key in plain)
    for found in (alone, both[0]):
        for key, weight in plain.items():
            torch.testing.assert_close(found[key], weight, rtol=EXACT, atol=EXACT)
