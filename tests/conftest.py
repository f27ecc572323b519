"""The user's cache is neither read nor written, and Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest

_cache = tempfile.TemporaryDirectory(prefix="paceline-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# whoever starts the tests in the background may have them ignore Ctrl-C, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


# the longest files first: where two processes share the tests, neither is left with them at the end
LONGEST = (
    *("commands", "mpi", "faults", "interrupts", "shares_over_gloo", "resume", "engines_are_transparent", "ssh_starts"),
    *("joining", "links_add_up", "examples", "plan_explains", "ssh_checks", "collectives", "launchers_say_who"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))  # stable: the order within a file stays


def pytest_unconfigure() -> None:
    _cache.cleanup()
