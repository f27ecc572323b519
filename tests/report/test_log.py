"""Messages go through the logger `paceline`: which are printed, how often, and by which handler."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import mse_loss

import paceline
from launching import environment
from paceline.environment import log_level
from paceline.launch.ssh import carried
from paceline.report import log as module
from paceline.report.log import configure, log

TALKS = """
import logging
import os
import paceline
from paceline.report.log import log
{}
log.info("a hint")
log.warning("slow")
log.error("broken")
"""


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def logger_is_put_back() -> Iterator[None]:
    before = log.handlers.copy(), log.level, log.propagate, log.disabled, module._screen.level
    yield
    log.handlers[:], log.propagate, log.disabled = before[0], before[2], before[3]
    log.setLevel(before[1])
    module._screen.setLevel(before[4])


def talk(code: str = "", **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TALKS.format(code)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("debug", ["a hint", "slow", "broken"]),
        ("info", ["a hint", "slow", "broken"]),
        ("", ["a hint", "slow", "broken"]),
        ("WARNING", ["slow", "broken"]),
        ("error", ["broken"]),
    ],
)
def test_the_variable_says_from_which_level_on_messages_are_printed(level, lines):
    assert talk(PACELINE_LOG=level) == "".join(f"paceline: {text}\n" for text in lines)


def test_a_script_s_basic_configuration_neither_prints_twice_nor_silences():
    whole = "paceline: a hint\npaceline: slow\npaceline: broken\n"
    assert talk("logging.basicConfig(level=logging.DEBUG)") == whole
    assert talk("logging.getLogger('paceline').propagate = True") == whole


def test_a_script_may_leave_it_to_the_handlers_of_the_root():
    code = "logging.basicConfig(level=logging.DEBUG, format='root: %(message)s')"
    assert talk(f"{code}\nlog.propagate = True") == "root: a hint\nroot: slow\nroot: broken\n"


@pytest.mark.parametrize("first", [True, False], ids=["before the import", "after it"])
def test_a_handler_of_the_user_s_takes_the_place_of_ours(first):
    code = (
        "import logging, sys\n"
        "logging.getLogger('paceline').addHandler(logging.StreamHandler(sys.stdout))\n"
        "print('added', flush=True)"
    )
    lines = [code] if first else ["import paceline", code]
    script = "\n".join([*lines, "from paceline.report.log import configure, log", "configure()", "log.info('a hint')"])
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("added\na hint\n", "")


def test_a_handler_of_the_user_s_receives_what_the_variable_leaves_out(monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_LOG", "error")
    configure()
    kept = Kept()
    log.addHandler(kept)
    log.info("100 % of %s")
    assert [(each.levelname, each.name, each.getMessage()) for each in kept.records] == [
        ("INFO", "paceline", "100 % of %s")
    ]
    assert capsys.readouterr().err == ""


def test_caplog_neither_takes_a_line_from_stderr_nor_doubles_it(caplog, capsys):
    log.addHandler(caplog.handler)  # as pytest does itself since 9.2
    log.warning("slow")
    assert caplog.messages == ["slow"]
    assert capsys.readouterr().err == "paceline: slow\n"


def test_what_join_has_to_say_is_a_record_and_only_an_error_where_that_is_asked_for(monkeypatch, capsys):
    def words() -> str:
        model = torch.nn.DataParallel(torch.nn.Linear(2, 1))
        paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), mse_loss, batch_size=4).close()
        return capsys.readouterr().err

    whole = words()
    assert whole.startswith("paceline: ")
    monkeypatch.setenv("PACELINE_LOG", "error")
    assert words() == ""
    monkeypatch.delenv("PACELINE_LOG")
    assert words() == whole


def test_who_configures_logging_elsewhere_does_not_silence_a_run(capsys):
    log.disabled = True  # as logging.config.dictConfig does with what was there before
    log.handlers.clear()
    configure()
    log.error("broken")
    assert capsys.readouterr().err == "paceline: broken\n"


def test_a_wrong_level_is_an_error_of_join_and_of_every_command(monkeypatch):
    monkeypatch.setenv("PACELINE_LOG", "loud")
    with pytest.raises(ValueError, match=r"PACELINE_LOG='loud' .*debug, info, warning, error, or unset it"):
        log_level()
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="PACELINE_LOG='loud'"):
        paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), mse_loss, batch_size=4)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "list"],
        env=environment(PACELINE_LOG="loud"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("paceline: PACELINE_LOG='loud' is no log level")
    assert done.stderr.count("\n") == 1


def test_the_level_goes_along_to_other_hosts(monkeypatch):
    monkeypatch.setenv("PACELINE_LOG", "warning")
    assert carried()["PACELINE_LOG"] == "warning"


class Counted:
    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)

    def flush(self) -> None:
        pass


class Broken(Counted):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_message_is_one_write_to_the_stderr_of_that_moment(monkeypatch):
    for text in ("one", "two\nlines"):
        counted = Counted()
        monkeypatch.setattr(sys, "stderr", counted)
        log.warning(text)
        assert counted.written == [f"paceline: {text}\n"]


@pytest.mark.parametrize("stream", [None, Broken()], ids=["none", "a full disk"])
def test_where_nothing_can_be_written_training_goes_on(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    log.error("broken")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # which Python 3.12 has for this very danger
def test_a_child_that_is_forked_while_others_log_is_free_to_log(monkeypatch, tmp_path):
    """Regression: one in three children deadlocked if forked while a thread wrote to stderr as a file."""
    stream = (tmp_path / "stderr").open("w")
    monkeypatch.setattr(sys, "stderr", stream)
    log.handlers[:] = [module._screen]  # pytest's own, of a file, has the same fault
    over = threading.Event()

    def talk_on() -> None:
        while not over.is_set():
            log.info("progress")

    threads = [threading.Thread(target=talk_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            if not (child := os.fork()):
                log.info("a child")
                os._exit(0)
            end = time.monotonic() + 60
            while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
                time.sleep(0.01)
            if not found[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert found == (child, 0)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        stream.close()
