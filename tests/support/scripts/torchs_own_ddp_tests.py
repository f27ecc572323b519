"""Twelve of torch's own tests of DistributedDataParallel, on 2 ranks over gloo, on whatever class is in place.

    python -m paceline.ddp torchs_own_ddp_tests.py

They need no GPU, and are in torch's wheel. The last line says which class it was.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest

TESTS = (
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
for name, value in {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": tempfile.mkdtemp()}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402 - after the variables that torch's module reads
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from paceline.ddp import exchange  # noqa: E402
from paceline.engine.compute import gradient_hooks  # noqa: E402

# its models are small: every layer is tried as factors, in every step
gradient_hooks.LINEAR_BYTES = 1
exchange.Trial.next = lambda self: True


class OnGloo(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()


if __name__ == "__main__":
    torch.set_num_threads(1)
    suite = unittest.TestSuite([OnGloo(name) for name in TESTS])
    done = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    print(torch.nn.parallel.DistributedDataParallel.__module__, flush=True)
    sys.exit(not done.wasSuccessful())
