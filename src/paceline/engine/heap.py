"""Memory that a step frees stays with the process, for the next step.

glibc gives it back and asks for it again, page by page: of a small convolutional net's step, that was a third.
Only the heap is kept, and no more than KEPT_BYTES that nobody uses; larger blocks come and go as before.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 128 << 20
LARGE_BYTES = 32 << 20  # the largest that glibc takes


def keep() -> bool:
    """Whether it could be asked for: on glibc, and where the user has not said otherwise."""
    said = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if any(name in os.environ for name in said) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
