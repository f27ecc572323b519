"""What a measurement says of a script that ends too soon is its error, not the last line of a warning."""

from __future__ import annotations

import sys

import pytest

from paceline.planner.measure.fresh_process import run_in_process, why

WARNING = """/home/a/train.py:7: FutureWarning: get_rank is old
  print(dist.get_rank(), model)"""
TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    open("data")
FileNotFoundError: no such file: 'data'"""
TORCHS = "[rank0]:[W1002 12:00:01.5 ProcessGroupNCCL.cpp:1496] Warning: WARNING: process group has NOT been destroyed"
WANT = "FileNotFoundError: no such file: 'data'"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("usage: train.py\ntrain.py: error: --data is missing", "train.py: error: --data is missing"),
        (WARNING, ""),
        (f"loading\n{WARNING}", "loading"),
        (f"{TRACE}\n{WARNING}", WANT),
        (f"{WARNING}\n{TRACE}\n\n{TORCHS}", WANT),
        ("\n".join(f"[rank1]: {each}" for each in TRACE.splitlines()), WANT),
        (f"{TRACE}\nand a second line of its text\nINFO: uploading", WANT),
        (f"ValueError: said before\n{TRACE.replace(WANT, 'OSError: first')}\n\nDuring it:\n\n{TRACE}", WANT),
        (f"{TRACE}\npaceline: rank 1 of 2 failed: it said so", "paceline: rank 1 of 2 failed: it said so"),
        ("paceline: engine threads:2\nno data here", "no data here"),
        (
            '  File "train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax',
            "SyntaxError: invalid syntax",
        ),
    ],
)
def test_the_line_that_says_why(text, line):
    assert why(text.splitlines()) == line


def test_a_script_that_warns_and_ends_is_told_by_its_exit_code():
    """Story: it ended before 18 steps (  print(dist.get_rank(), ...)."""
    script = "import warnings\nwarnings.warn('old')"
    assert run_in_process([sys.executable, "-c", script], {}, 60.0).last_line == "exit code 0"
    ended = run_in_process([sys.executable, "-c", f"{script}\nraise OSError('no data')"], {}, 60.0)
    assert (ended.code, ended.last_line) == (1, "OSError: no data")
