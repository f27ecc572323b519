"""Where the tests' models lie: on the CPU, or as PACELINE_TEST_DEVICE says (``make test-gpu``)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

CHOICE = "PACELINE_TEST_DEVICE"
DEVICE = torch.device(os.environ.get(CHOICE, "cpu"))
of_cpus = pytest.mark.skipif(DEVICE.type != "cpu", reason="it is about models on the CPU")
# torch runs all backward passes of a GPU in one thread, in which ranks that are threads would wait for each other
waits_in_backward = pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks are threads, and wait in backward")


def on_the_cpu(engine: str) -> dict[str, str]:
    """The environment of an engine whose processes share weights, which those on a GPU cannot."""
    return {CHOICE: "cpu"} if engine.startswith("processes") else {}


@contextmanager
def deterministic() -> Iterator[None]:
    """Some kernels of GPUs add in any order."""
    torch.use_deterministic_algorithms(DEVICE.type != "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
