"""Torch's own tests of DistributedDataParallel pass on our class: all that torch does not skip without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "torchs_own_ddp_tests.py"
ON_CPUS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_dump_DDP_relevant_env_vars",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
)
# for a GPU, or because of a defect of torch's own
REASONS = (
    r"CUDA is not available\.|Need at least \d CUDA devices|.*https://github\.com/pytorch/.*|Skipped due to flakiness"
)


@pytest.mark.dear
def test_torchs_own_tests_pass(tmp_path):
    given = {**os.environ, "TEMP_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "paceline.ddp", str(SCRIPT)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["class"] == "paceline.ddp.module"
    assert tuple(said["passed"]) == ON_CPUS
    assert len(said["skipped"]) > 50
    assert all(re.fullmatch(REASONS, reason) for reason in said["skipped"].values()), said["skipped"]
