"""A method's name stands in its own file, as the file's name, and where a default is said: in the registry, alone."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import launching
import paceline
from paceline import contract, registry

ROOT = Path(paceline.__file__).parent
FOLDERS = {room: registry.PLACES.get(room, room).replace(".", "/") for room in registry.ROOMS}
METHODS = {name: FOLDERS[room] for room in registry.ROOMS for name in sorted(registry._ours(room))}
COLLECTIVES = {path.stem: "link/collectives" for path in sorted((ROOT / "link" / "collectives").glob("[!_]*.py"))}
DEFAULTS = "registry.py"
# Words that are a method's name and mean something else where they stand.
MEANT = {
    # the package
    # a machine's, or what a codec remembers
    "memory": (
        *("checkpoint/codec_state.py", "checkpoint/run_state.py", "elastic/state_transfer.py"),
        *("exchange/allreduce.py", "exchange/diloco.py", "planner/plan_tables.py", "report/page/quantities.py"),
    ),
    # not any
    "none": (
        *(
            "cli/train.py",
            "engine/compute/matmul.py",
            "engine/reproducible.py",
            "engine/compute/unread.py",
            "job.py",
            "launch/detach.py",
        ),
        *(
            "launch/doctor/live_status.py",
            "launch/hosts.py",
            "link/net/route.py",
            "report/page/page.py",
            "step/refused_steps.py",
        ),
        *("train/lr_schedule.py", "train/run.py", "train/settings.py"),
    ),
    # what is emulated, or the same bits everywhere: a fidelity and an argument of `join`
    "emulated": ("report/page/scaling.py", "report/page/summary.py", "session.py"),
    "reproducible": ("engine/checks/join_arguments.py",),
    # a backend of torch's
    "gloo": ("ddp/import_hook.py", "ddp/module.py", "link/nccl.py"),
    "half": ("launch/doctor/host_probe.py",),  # duplex
    "processes": ("report/usage.py",),  # of the machine
}
# What other rooms import still. This list only shrinks.
IMPORTED = {("elastic/joiner.py", "link", "gloo"), ("elastic/membership.py", "link", "gloo")}

TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def strings(tree):
    """(line, text) of every string but docstrings; of an f-string, its parts."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    told = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, kinds) and _documented(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


def _documented(node):
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def named(tree, methods):
    """(line, name) where a string is a method's name, or names one: as a row or spec, quoted, or as a value."""
    words = "|".join(sorted(methods, key=len, reverse=True))
    whole = re.compile(rf"({words})(?:[:+/].*)?", re.DOTALL)
    within = re.compile(rf"(?<![\w./'-])(?:'({words})(?='|[:+]\w)|({words})[:+](?=\w|$)|\w+=({words})\b)")
    for line, text in strings(tree):
        if found := whole.fullmatch(text):
            yield line, found[1]
        else:
            yield from ((line, next(filter(None, found.groups()))) for found in within.finditer(text))


@cache
def elsewhere():
    """(file, name, line) for each that stands outside of its own file, and of the defaults."""
    methods, found = {**METHODS, **COLLECTIVES}, []
    for file, tree in TREES.items():
        for line, name in named(tree, methods):
            if file not in (f"{methods[name]}/{name}.py", DEFAULTS):
                found.append((file, name, line))
    return found


def test_no_string_names_a_method_outside_of_its_file_and_of_the_defaults():
    assert [f"{file}:{line} {name}" for file, name, line in elsewhere() if file not in MEANT.get(name, ())] == []


def test_what_means_something_else_is_met_there():
    met = {(name, file) for file, name, _ in elsewhere()}
    assert {(name, file) for name, files in MEANT.items() for file in files} == met


@pytest.mark.parametrize(
    "source",
    [
        'if engine == "threads": pass',
        'row = f"threads:{cores}"',
        'row.startswith("threads")',
        'raise ValueError("use threads:2")',
        "raise ValueError(\"use 'threads'\")",
        'raise ValueError("set PACELINE_ENGINE=threads")',
        'ENGINES = "threads:2+bf16", "other"',
    ],
)
def test_a_planted_name_is_found(source):
    assert [name for _, name in named(ast.parse(source), METHODS)] == ["threads"]


def test_a_word_is_no_name():
    tree = ast.parse('"""threads"""\nprint("as many threads as cores", "the threads: two", mythreads)')
    assert list(named(tree, METHODS)) == []


def imports(tree):
    """(folder, module) of what is imported of this package, wherever that stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
            below = node.module.removeprefix("paceline.").replace(".", "/")
            yield from ((below, alias.name) for alias in node.names)
            yield tuple(below.rpartition("/")[::2])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.removeprefix("paceline.").replace(".", "/").rpartition("/")[::2])


def test_no_other_room_imports_a_method():
    found = {
        (file, folder, name)
        for file, tree in TREES.items()
        for folder, name in imports(tree)
        if METHODS.get(name) == folder and file.rpartition("/")[0] != folder
    }
    assert found == IMPORTED


def test_what_is_read_of_a_method_is_what_it_is():
    for room in ("engine", "exchange", "codec", "link"):
        kind = registry.ROOMS[room]
        promises, _ = registry._literal_attributes(registry._interfaces(), kind)
        for name in registry._ours(room):
            made = getattr(registry.module(room, name), kind)
            for trait in promises:
                if not isinstance(inspect.getattr_static(made, trait), property):
                    assert registry.says(room, name, trait) == getattr(made, trait), (room, name, trait)


def test_of_an_unknown_name_the_promise_is_read_and_an_unknown_trait_is_a_mistake():
    assert registry.says("engine", "unknown", "counts") == contract.Engine.counts
    for name in ("unknown", registry.THREADS):
        with pytest.raises(KeyError, match="cuonts"):
            registry.says("engine", name, "cuonts")


def test_every_default_is_a_method():
    said = [name for _, name in named(TREES[DEFAULTS], METHODS)]
    assert {registry.BASELINE, registry.EXCHANGE, registry.LINK, registry.MODEL, registry.CODEC} <= set(said)
    assert importlib.import_module(f"paceline.link.{registry.ENCRYPTED}").Link.hides


def renamed(folder):
    """A copy of the package in which every method has another name, and of the other files the defaults' alone differ.

    Methods of a room import each other by these names; so do those of IMPORTED.
    """
    package = folder / "paceline"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__"))
    for place in FOLDERS.values():
        names = "|".join(name for name, its in METHODS.items() if its == place)
        above = f"from paceline.{place.replace('/', '.')}"
        for path in (*(package / place).glob("*.py"), *{package / file for file, room, _ in IMPORTED if room == place}):
            text = re.sub(rf"({above} import )({names})\b( as)?", r"\1\2_new as \2\3", path.read_text())
            text = re.sub(r" as \w+ as ", " as ", text)
            path.write_text(re.sub(rf"({above}\.)({names})( import)", r"\1\2_new\3", text))
        for path in (package / place).glob("*.py"):
            if METHODS.get(path.stem) == place:
                path.rename(path.with_stem(f"{path.stem}_new"))
    path = package / DEFAULTS
    path.write_text(re.sub(rf'"({"|".join(METHODS)})"', r'"\1_new"', path.read_text()))


SCRIPT = """
import sys
import torch
import paceline
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randint(0, 2, (24,)))
loss, optimizer = torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
pace = paceline.join(model, optimizer, loss, batch_size=8, reproducible="steady" in sys.argv)
with pace:
    for batch in pace.batches(data):
        pace.step(batch)
if pace.leader:
    print("trained", paceline.__file__, pace.run.row, sep="|")
"""


@pytest.mark.dear
@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["run", "--plan", "threads_new:1", "script.py"], "threads_new:1"),
        (["run", "--plan", "processes_new:2", "script.py"], "processes_new:2"),
        (["run", "--plan", "threads_new:1", "--nodes", "2", "script.py", "steady"], "reproducible_new:8"),
        (["plan", "--rows", "sequential_new,replicas_new:2", "--budget", "1", "script.py"], "sequential_new"),
        (["train", "--epochs", "1", "--plan", "replicas_new:2"], "small_new"),
    ],
)
def test_a_package_whose_methods_have_other_names_trains_and_plans(tmp_path, words, row):
    (tmp_path / "script.py").write_text(SCRIPT)
    renamed(tmp_path / "new")
    paths = os.pathsep.join(filter(None, [str(tmp_path / "new"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert row in done.stdout + done.stderr
    if words[0] == "run":
        assert f"trained|{tmp_path / 'new' / 'paceline' / '__init__.py'}|{row}" in done.stdout


# Methods that need no line outside of their own files, besides presets, documentation and tests.
ALONE = {
    "codec": {"lowrank": (), "qsgd": ()},
    "exchange": {"diloco": (), "server": ()},
    "engine": {"pipeline": ("stages/__init__", "stages/devices", "stages/micro_batches", "stages/schedule")},
}
IMPORT_ALL = """
import importlib, pkgutil, paceline
from paceline import registry
from paceline.launch.machine import Machine
from paceline.planner.candidates import JobFacts, candidates
for each in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if not each.name.endswith("__main__"):
        try:
            importlib.import_module(each.name)
        except ImportError as error:
            if "paceline" in str(error):
                raise
names = {room: registry.names(room) for room in registry.ROOMS}
rows = candidates("exact", Machine(cores=4, physical_cores=4), JobFacts(rows=64), ("processes", "replicas"))
print(paceline.__file__, names, rows, sep="|")
"""


def test_without_a_methods_own_files_nothing_else_is_missing(tmp_path):
    package = tmp_path / "paceline"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__"))
    for room, methods in ALONE.items():
        for name, more in methods.items():
            for file in (name, *more):
                (package / FOLDERS[room] / f"{file}.py").unlink()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL],
        env={**os.environ, "PYTHONPATH": launching.python_path(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, found, rows = done.stdout.strip().split("|")
    assert Path(file).parent == package
    for room, methods in ALONE.items():
        assert set(registry.names(room)) - set(ast.literal_eval(found)[room]) == set(methods)
    assert "processes:4" in rows
    assert "pipeline" not in rows
