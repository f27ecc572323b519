"""In a container's memory the plan refuses what does not fit, says how much is missing, and chooses what does."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dear, pytest.mark.timeout(300)]

LIMIT = 1500 << 20
SCRIPT = """
import torch
import paceline
torch.manual_seed(0)
ROWS = 32768
layers = [layer for _ in range(48) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 3))
data = torch.utils.data.TensorDataset(torch.randn(ROWS, 256), torch.randint(0, 3, (ROWS,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=ROWS) as pace:
    for batch in pace.batches(data, epochs=2):
        pace.step(batch)
print("trained")
"""


@pytest.fixture
def limited(tmp_path):
    """Runs paceline in a cgroup of so much memory."""
    root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not root.is_dir():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = root / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no cgroup with a limit can be made here: {error}")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*words):
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-m", "paceline", *words, str(script)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)

    yield run
    deadline = time.monotonic() + 20
    while pids := (group / "cgroup.procs").read_text().split():
        assert time.monotonic() < deadline
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        time.sleep(0.1)
    group.rmdir()


def test_a_plan_refuses_what_needs_more_and_its_choice_trains(limited):
    """Its activations are two thirds of the memory, and those of a few micro-batches a fourth."""
    found = limited("plan", "--budget", "20")
    assert found.returncode == 0, found.stderr
    rows = {line.split()[0]: line for line in found.stdout.splitlines() if line.strip()}
    for row in ("sequential", "threads:2", "replicas:2", "processes:2"):
        needed, usable = map(
            int, re.search(r"out of memory: needs (\d+) MiB, (\d+) MiB can be used", rows[row]).groups()
        )
        assert needed > usable == 1350
    assert "pipeline:2" in found.stdout.splitlines()[-1]
    assert "trained" in limited("run", "--engine", "pipeline:2").stdout
    killed = limited("run", "--engine", "replicas:2")
    assert (killed.returncode, killed.stdout) == (137, ""), killed.stderr
