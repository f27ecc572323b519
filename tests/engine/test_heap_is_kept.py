"""A step finds the memory that the one before has left."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from paceline.engine.node import affinity

print(affinity.keep())
if sys.argv[1:] == ["plain"]:
    sys.exit()

def step():
    parts = [torch.zeros(2 << 20) for _ in range(8)]  # 8 MiB each
    return parts

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


def said(*arguments, **environment):
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment, timeout=60
    ).stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_a_step_frees_is_there_in_the_next():
    """64 MiB are 16,384 pages: were they given back, five steps would ask for them all five times.

    Where the first steps leave the heap too narrow by a block, it grows by its 2,048 pages once.
    """
    kept, faults = said()
    assert kept == "True"
    assert int(faults) < 2 * 2048


@pytest.mark.dear
def test_the_users_own_word_counts():
    assert said("plain", MALLOC_TRIM_THRESHOLD_="0") == ["False"]
    assert said("plain", GLIBC_TUNABLES="glibc.malloc.trim_threshold=0") == ["False"]
