"""`output.through` forwards output in order, and does not wait for a reader that has stopped."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

LINES = 30_000
LENGTH = 30
SCRIPT = f"""
import os, sys
from pathlib import Path
from paceline.launch import output
output.MAX_BYTES, output.STOPPED_S, output.LINGER_S = int(sys.argv[2]), 0.2, 0.5
def run():
    for i in range({LINES}):
        os.write(1, b"%0{LENGTH - 1}d\\n" % i)
    os.write(2, b"beside\\n")
    Path(sys.argv[1]).touch()
    return 3
sys.exit(output.through(run))
"""


@pytest.fixture
def begin(tmp_path):
    started = []

    def start(most_bytes):
        words = [sys.executable, "-c", SCRIPT, str(tmp_path / "over"), str(most_bytes)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(path):
    end = time.monotonic() + 30.0
    while not Path(path).exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_late_reader_reads_everything(begin, tmp_path):
    process = begin(2 * LINES * LENGTH)
    until(tmp_path / "over")  # the run ends although no byte was read
    out, errors = process.communicate(timeout=30)
    assert [int(line) for line in out.splitlines()] == list(range(LINES))
    assert errors == b"beside\n"
    assert process.returncode == 3


def test_beyond_the_buffer_the_last_lines_stay_and_the_dropped_bytes_are_counted(begin, tmp_path):
    kept = 100 * LENGTH
    process = begin(kept)
    until(tmp_path / "over")
    out, _ = process.communicate(timeout=30)
    (num_dropped,) = re.findall(rb"paceline: the reader stopped for long; (\d+) bytes are left out\n", out)
    lines = [int(line) for line in re.findall(rb"^\d{29}$", out, re.MULTILINE)]
    assert lines == sorted(set(lines))
    assert lines[0] == 0
    assert lines[-1] == LINES - 1
    assert len(lines) >= kept // LENGTH - 1
    whole = re.sub(rb"\npaceline: [^\n]*\n", b"", out)
    assert len(whole) + int(num_dropped) == LINES * LENGTH


def test_a_reader_that_never_reads_is_not_waited_for(begin, tmp_path):
    process = begin(LINES * LENGTH)
    assert process.wait(timeout=30) == 3
    assert len(process.stdout.read()) < LINES * LENGTH


def test_a_reader_that_has_ended_is_not_waited_for(begin, tmp_path):
    process = begin(LINES * LENGTH)
    process.stdout.close()
    process.stdout = None
    assert process.wait(timeout=30) == 3
    assert (tmp_path / "over").exists()
