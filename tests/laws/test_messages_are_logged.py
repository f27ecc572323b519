"""Nothing outside of the command line writes to stderr by itself: messages go through the logger `paceline`."""

from __future__ import annotations

import ast

import pytest
from test_rooms import MODULES

# What is no message, or cannot be one.
EXCEPT = {
    # the logger's own handler
    "report.log": {"sys.stderr", "sys.stderr.write", "sys.stderr.flush"},
    # the traceback of a script's own error, as Python prints it, but in one write
    "session": {"sys.stderr.write"},
    # what processes on other hosts write is passed on as bytes
    "launch.supervise.remote_node": {"sys.stderr", "sys.stderr.buffer"},
    # around a fork; and a bug in a child, as Python prints it
    "launch.output": {"sys.stderr.flush", "traceback.print_exc"},
}
PRINTS = {f"traceback.{name}" for name in ("print_exc", "print_exception", "print_last", "print_stack", "print_tb")}
NAMES = {"sys.stderr", "sys.__stderr__"}


def uses(source: str) -> set[str]:
    """Every way in which a module writes to stderr: "sys.stderr.write", "os.write(2", a name that is imported."""
    found, inner = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if ast.unparse(node.value) in NAMES:
                found.add(name)
                inner.add(node.value)
            elif name in PRINTS or (name in NAMES and node not in inner):
                found.add(name)
        elif isinstance(node, ast.ImportFrom) and node.module in ("sys", "traceback"):
            found |= {name for each in node.names if (name := f"{node.module}.{each.name}") in NAMES | PRINTS}
        elif isinstance(node, ast.Call):
            called, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            if called in ("os.write", "os.fdopen", "open") and first == "2":
                found.add(f"{called}(2")
            if called.endswith("Console") and any(each.arg == "stderr" for each in node.keywords):
                found.add("Console(stderr")
    return found


@pytest.mark.parametrize("module", [each for each in MODULES if each.partition(".")[0] != "cli"])
def test_messages_are_logged(module):
    assert uses(MODULES[module].read_text()) == EXCEPT.get(module, set())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import sys\nprint('x', file=sys.stderr)", "sys.stderr"),
        ("import sys\nsys.stderr.write('x')", "sys.stderr.write"),
        ("import sys\nsys.__stderr__.write('x')", "sys.__stderr__.write"),
        ("from sys import stderr\nstderr.write('x')", "sys.stderr"),
        ("import sys\nout = sys.stderr", "sys.stderr"),
        ("import os\nos.write(2, b'x')", "os.write(2"),
        ("import traceback\ntraceback.print_exc()", "traceback.print_exc"),
        ("from rich.console import Console\nConsole(stderr=True)", "Console(stderr"),
    ],
)
def test_a_planted_write_is_found(source, found):
    assert uses(source) == {found}


def test_other_writes_are_let_through():
    assert (
        uses("import os, sys, subprocess\nprint('x')\nos.write(1, b'x')\nsubprocess.run([], stderr=sys.stdout)")
        == set()
    )


def test_the_loggers_are_one():
    """By the name `paceline`: that of a module that is run by itself would be `__main__`."""
    found = {
        ast.unparse(node)
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
    }
    assert found == {"logging.getLogger('paceline')"}
