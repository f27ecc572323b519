"""A test that does not heed its timeout ends its process, by name and with every thread's stack."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HANGS = """
import time, pytest

@pytest.mark.timeout(1)
def test_that_swallows_its_alarm():
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)

@pytest.fixture
def left():
    yield
    time.sleep(60)

@pytest.mark.timeout(1)
def test_that_fails_and_waits(left):
    assert False
"""


@pytest.mark.parametrize(
    ("test", "where"),
    [("test_that_swallows_its_alarm", "test_that_swallows_its_alarm"), ("test_that_fails_and_waits", "left")],
)
def test_a_hang_is_named(tmp_path, test, where):
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "soon.py").write_text("import conftest; conftest.CLEANUP_S = 1.0")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "soon", "-p", "no:cacheprovider", "-n", "1"]
    path = os.pathsep.join(map(str, (tmp_path, TESTS, TESTS / "support")))
    done = subprocess.run(
        [*command, "--max-worker-restart", "0", "-k", test],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert f"crashed while running 'test_hangs.py::{test}'" in done.stdout
    assert 'test_hangs.py", line' in done.stderr
    assert f"in {where}" in done.stderr
