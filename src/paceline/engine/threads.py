"""One process, k intra-op threads: PyTorch's own parallelism inside each operation."""

from __future__ import annotations

from paceline.engine import sequential


class Engine(sequential.Engine):
    """*Invariants*: equal to sequential up to the order of summation within operations."""

    counts = "thread"

    def __init__(self, num_threads: int = 2):
        super().__init__()
        if not (isinstance(num_threads, int) and num_threads >= 1):
            raise ValueError(f"engine 'threads:k' needs a whole number k >= 1, got {num_threads!r}")
        self.num_threads = num_threads
