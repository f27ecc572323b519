"""The user's cache is neither read nor written, and Ctrl-C is heard."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import needs

# a file of laws may use the cases of another
sys.path += [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]

# so do processes that tests start find the harnesses, installed or not
BENCH = Path(__file__).parents[1] / "bench" / "src"
STARTING = Path(__file__).parent / "support" / "starting"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BENCH), str(STARTING), os.environ.get("PYTHONPATH"))))

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own threads wait in a loop as each process starts

CLEANUP_S = 60.0  # of a test that its timeout has ended
STDERR = pytest.StashKey[int]()  # not what a test's output is captured from

_cache = tempfile.TemporaryDirectory(prefix="paceline-test-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# whoever starts the tests in the background may have them ignore Ctrl-C, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_handler_is_left() -> Iterator[None]:
    """Story: a run that a test had not closed took the Ctrl-C of another test, which waited for its end in vain."""
    yield
    left = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert left == (signal.default_int_handler, signal.SIG_DFL)


class Failures:
    """Says a failure at once: whoever ends the tests before their end sees what there was."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            words = report.longreprtext.strip().splitlines()[-8:]
            self.terminal.write_line("\n".join([f"\n{report.when} of {report.nodeid} failed:", *words]))


@pytest.hookimpl(trylast=True)  # when there is a terminal
def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(Failures(terminal))
    if os.environ.get("PACELINE_TEST_DEVICE", "cpu") != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError(
                f"PACELINE_TEST_DEVICE asks for models on a GPU, and torch {torch.__version__} sees none; unset it"
            )


@pytest.fixture(autouse=True)
def factors_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU as on a CPU: one alone would take dense gradients."""
    if os.environ.get("PACELINE_TEST_DEVICE", "cpu") != "cpu":
        from paceline.engine.compute import optimizer_step

        monkeypatch.setattr(optimizer_step, "takes_gradients", lambda model: False)


@pytest.hookimpl(wrapper=True)
def _within(item: pytest.Item) -> Iterator[Any]:
    """A test that does not heed its timeout, whose alarm nothing hears or is followed by a cleanup that waits, ends its
    process with every thread's stack."""
    mark = item.get_closest_marker("timeout")
    if limit := mark.args[0] if mark else float(item.config.getini("timeout") or 0):  # 0: of another project's tests
        faulthandler.dump_traceback_later(limit + CLEANUP_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _within


MISSED = pytest.StashKey[list[str]]()


@pytest.fixture
def missed(pytestconfig: pytest.Config) -> list[str]:
    """Of what tests are marked as dear for, what no instance of them is called by. Known where all are collected."""
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("not all tests are collected")
    return pytestconfig.stash[MISSED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``dear("2-tls", "3")``: of a test with parameters those alone that have one of these among theirs."""
    asked, met = set[tuple[str, str]](), set[tuple[str, str]]()
    for item in items:
        if not (mark := item.get_closest_marker("dear")) or not mark.args:
            continue
        test, _, name = item.nodeid.partition("[")
        found = {(test, part) for part in mark.args if f"-{part}-" in f"-{name[:-1]}-"}
        asked |= {(test, part) for part in mark.args}
        met |= found
        if not found:
            item.own_markers.remove(mark)
    config.stash[MISSED] = sorted(f"{test}[{part}" for test, part in asked - met)
    # where two processes share the files, neither is left with a long one at the end; stable: a file's own order stays
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Ten thousand tests and torch are not looked through for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, so that its reasons stand above this line
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[Any]:
    result = yield
    skipped = terminalreporter.getreports("skipped")
    if line := needs.summary(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)):
        terminalreporter.write_line(line, yellow=True)
    return result


def pytest_unconfigure() -> None:
    _cache.cleanup()
