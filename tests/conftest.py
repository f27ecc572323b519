"""Plans and checks that tests leave behind are theirs: the user's cache is neither read nor written."""

from __future__ import annotations

import os
import tempfile

_cache = tempfile.TemporaryDirectory(prefix="paceline-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_unconfigure() -> None:
    _cache.cleanup()
