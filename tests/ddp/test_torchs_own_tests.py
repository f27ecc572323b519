"""Torch's own tests of DistributedDataParallel pass on our class, those that need no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "torchs_own_ddp_tests.py"


@pytest.mark.dear
def test_torchs_own_tests_pass(tmp_path):
    given = {**os.environ, "TEMP_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline.ddp", str(SCRIPT)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    count = len(re.findall(r'^    "test_\w+",$', SCRIPT.read_text(), re.MULTILINE))
    assert f"Ran {count} tests" in done.stdout
    *_, verdict, home = filter(None, done.stdout.splitlines())
    assert (verdict, home) == ("OK", "paceline.ddp.module")
