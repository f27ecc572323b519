"""A run of tests ends with what was skipped for want of what, and the command that installs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import needs

HERE = Path(__file__).parents[1] / "support"
SOME = """
import pytest
from needs import module, needs, want

@needs(sshd="there is no sshd on this machine")
@pytest.mark.parametrize("number", [1, 2])
def test_over_ssh(number): pass

def test_both(): want(git="", chromium="no browser is here")

def test_import(): module("mlflow")

@pytest.mark.skip("no reason of ours")
def test_skipped(): pass

def test_here(): want(git="", chromium="")
"""


@pytest.mark.dear("options1")
@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_the_line_stands_between_the_reasons_and_the_last_line(tmp_path, options):
    (tmp_path / "test_some.py").write_text(SOME)
    (tmp_path / "mlflow.py").write_text("raise ModuleNotFoundError('mlflow')")
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "conftest", "-p", "no:cacheprovider", *options, "."]
    path = os.pathsep.join(map(str, (tmp_path, HERE, HERE.parent)))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    reason, said, last = done.stdout.splitlines()[-3:]
    assert reason.startswith("SKIPPED"), done.stdout
    assert said == (
        "5 tests skipped: 2 need sshd, 1 needs chromium, 1 needs mlflow, 1 for other reasons; "
        "install: apt-get install openssh-server openssh-client chromium && pip install -e '.[dev]'"
    )
    assert "1 passed, 5 skipped" in last


def test_nothing_is_said_where_nothing_was_skipped():
    assert needs.summary([]) == ""
    assert needs.summary(["Skipped: root may write everywhere"]) == "1 test skipped: 1 for other reasons"


def test_as_a_program_it_names_the_packages_that_the_line_does():
    done = subprocess.run([sys.executable, needs.__file__], capture_output=True, text=True, timeout=60, check=True)
    (line,) = needs.summary(f"needs {name}: it" for name in needs.APT).splitlines()
    assert line.partition("apt-get install ")[2].split() == done.stdout.split()


# where the tests run by themselves, nothing is skipped for want of a package: each is installed before


def from_clean(folder, user, broken=""):
    """The commands that `.ci/run` calls as this user, in order, where all but the shell's own are stand-ins; the
    installation of one package fails."""
    log, tools = folder / "log", folder / "tools"
    for path in (".ci/run", "tests/support/needs.py"):
        (folder / path).parent.mkdir(parents=True)
        shutil.copy(HERE.parents[1] / path, folder / path)
    tools.mkdir()
    called = f'#!/bin/sh\necho "$(basename "$0") $*" >> {log}\n'
    for name, more in (("apt-get", f'test "$5" != "{broken or "-"}"'), ("make", ""), ("id", f"echo {user}")):
        (tools / name).write_text(called + more + "\n")
        (tools / name).chmod(0o755)
    where = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(folder / ".ci" / "run")]
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=60, check=True)
    return [line for line in log.read_text().splitlines() if not line.startswith("id ")], done.stdout


TESTS = ["make check", "make test", "make test-dear"]


def test_a_clean_checkout_has_what_skipped_tests_need_before_they_run(tmp_path):
    calls, _ = from_clean(tmp_path, 0)
    first, *installs = calls[: -len(TESTS)]
    packages = [package for some in needs.APT.values() for package in some]
    assert first == "apt-get update --quiet"
    assert installs == [f"apt-get install --yes --quiet --no-install-recommends {package}" for package in packages]
    assert calls[-len(TESTS) :] == TESTS


def test_a_package_that_cannot_be_installed_is_named_and_the_others_are(tmp_path):
    calls, said = from_clean(tmp_path, 0, broken="chromium")
    assert len(calls) == 1 + sum(map(len, needs.APT.values())) + len(TESTS)
    assert calls[-len(TESTS) :] == TESTS
    assert said == "chromium could not be installed: the tests that need it are skipped\n"


def test_who_may_install_nothing_runs_the_tests_alone(tmp_path):
    assert from_clean(tmp_path, 1000) == (TESTS, "")
