"""The user's cache is neither read nor written, and Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
import tempfile

_cache = tempfile.TemporaryDirectory(prefix="paceline-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# whoever starts the tests in the background may have them ignore Ctrl-C, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    _cache.cleanup()
