"""A run of tests ends with what was skipped for want of what, and the command that installs it."""

import os
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
