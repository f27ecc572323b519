"""Torch's own tests of DistributedDataParallel, from its wheel, on 2 ranks over gloo, on whatever class is in place.

    python -m paceline.ddp torchs_own_ddp_tests.py

The last line is a JSON object: which class it was, which tests passed, and torch's reason to skip each of the others.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
import unittest

for name, value in {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": tempfile.mkdtemp()}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402 - after the variables that torch's module reads
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from paceline.ddp.sums import bucket_sums  # noqa: E402
from paceline.engine.compute import gradient_hooks  # noqa: E402

# its models are small: every layer is tried as factors, in every step
gradient_hooks.LINEAR_BYTES = 1
bucket_sums.Trial.next = lambda self: True


Everything = distributed_test.DistributedTest._DistTestBase


class OnGloo(distributed_test.TestDistBackend, Everything):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)  # a spawned one imports all again


def of_the_class():
    """All whose name or source speaks of it."""
    for name, test in inspect.getmembers(Everything):
        words = name + inspect.getsource(inspect.unwrap(test)) if name.startswith("test") else ""
        if re.search("ddp|DistributedDataParallel|no_sync", words, re.IGNORECASE):
            yield name


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = list(of_the_class())
    done = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(unittest.TestSuite(map(OnGloo, names)))
    skipped = {test.id().split(".")[-1]: reason for test, reason in done.skipped}
    said = {"class": torch.nn.parallel.DistributedDataParallel.__module__, "skipped": skipped}
    print(json.dumps(said | {"passed": [name for name in names if name not in skipped]}), flush=True)
    sys.exit(not done.wasSuccessful())
