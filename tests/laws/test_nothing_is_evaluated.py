"""What comes from a disk, the network or the environment is data: nothing unpickles it, and nothing runs it."""

import ast
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
MODULES = "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "yaml"
CALLS = "eval", "exec", "compile", "__import__"
# a program that is read by whom the user's own ssh has let in: its text is a constant of ours
SENT = {"launch/doctor/preflight.py", "launch/doctor/remote_session.py", "launch/hosts.py"}


def runs(source: str) -> list[str]:
    """Every place that could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [f"{node.lineno}: {name}" for name in names if name.split(".")[0] in MODULES]
        elif isinstance(node, ast.Call):
            called, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in CALLS:
                found.append(f"{node.lineno}: {called}")
            if called.endswith("load") and called.startswith("torch") and words.get("weights_only") != "True":
                found.append(f"{node.lineno}: {called}")
            if called.endswith("load") and called.split(".")[0] in ("np", "numpy") and "True" in words.values():
                found.append(f"{node.lineno}: {called} with allow_pickle")
    return found


# what this process itself has just written for its own children, in a folder that only its user can read
OWN = {ROOT / "launch/function.py"}


@pytest.mark.parametrize("path", sorted({*ROOT.rglob("*.py")} - OWN), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_it_reads(path):
    assert runs(path.read_text()) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "exec(compile(text, 'name', 'exec'))",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_a_planted_one_is_caught(planted):
    assert runs(planted)


def test_programs_that_are_sent_over_ssh_are_made_in_three_places_alone():
    made = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "exec(" in node.value
    }
    assert made == SENT
