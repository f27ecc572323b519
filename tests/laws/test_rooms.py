"""Imports go down only, and a plug-in is one module with one class and a sentence that says what it is."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import paceline
from paceline import contract, registry, transport

ROOT = Path(paceline.__file__).parent

# Rooms and files of the root, lowest first: each may import itself and what stands before it.
ROOMS = (
    *("errors", "messages", "transport", "contract", "registry", "environment", "job"),
    *("codec", "data", "report", "exchange", "link", "engine"),
    *("step", "checkpoint", "ddp", "launch", "elastic", "planner"),
    *("training", "pace", "session", "testing", "train", "", "cli", "__main__"),
)
MAX_ROOMS, MAX_IN_ROOT, MAX_ORGANS, MAX_LINES_OF_A_STEP = 15, 11, 16, 120  # `__init__` not counted
MAX_LINES_OF_A_FILE, MAX_LINES_OF_A_FUNCTION = 400, 80
MAX_MEMBERS_OF_A_PROMISE = 16
METHODS = tuple(registry.ROOMS)


def modules(root: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
        for path in sorted(root.rglob("*.py"))
    }


MODULES = modules(ROOT)
PLUGINS = [(room, name) for room in registry.ROOMS for name in sorted(registry._ours(room))]


def place(room: str) -> str:
    return registry.PLACES.get(room, room)


def imported(module, source, is_package=False):
    """(line, module of ours) for every import, wherever it stands; the package itself is ""."""
    here = ["paceline", *module.split(".")] if module else ["paceline"]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = here[: len(here) - node.level + is_package]
                base = ".".join([*up, base]).rstrip(".")
            # `from package import name` is an import of the module of that name, where there is one
            below = {alias.name: f"{base}.{alias.name}" for alias in node.names}
            names = [deep if deep.removeprefix("paceline.") in MODULES else base for deep in below.values()]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [ast.unparse(node.args[0]).strip("'\"")] if module != "registry" else []
        else:
            continue
        for name in names:
            if name.split(".")[0].strip("f'\"") in ("paceline", "paceline_bench"):
                yield node.lineno, name.removeprefix("paceline.") if name != "paceline" else ""


def room_of(module: str) -> str:
    return module.partition(".")[0]


def is_method(module: str) -> bool:
    return any(f"{place(room)}.{name}" == module for room, name in PLUGINS)


def climbs(module, source, is_package=False):
    """Every import that a module may not make, as "line: what"."""
    if (room := room_of(module)) not in ROOMS:
        return [f"no rule says what paceline.{module} may import; add {room} to ROOMS"]
    found = []
    for line, name in imported(module, source, is_package):
        if name == "paceline_bench" or name.startswith("paceline_bench."):
            down = module == "cli.bench"
        else:
            down = room_of(name) in ROOMS[: ROOMS.index(room) + 1]
            if is_method(module) and is_method(name):  # methods of one room never import another room's
                down = down and name.rpartition(".")[0] == module.rpartition(".")[0]
        if not down:
            found.append(f"{line}: {name if name.startswith('paceline_bench') else f'paceline.{name}'.rstrip('.')}")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "paceline")
def test_imports_go_down_only(module):
    path = MODULES[module]
    assert climbs(module, path.read_text(), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "what"),
    [
        ("messages", "from paceline import contract", "contract"),
        ("contract", "from paceline import registry", "registry"),
        ("registry", "from paceline.codec import topk", "codec.topk"),
        ("engine.sequential", "from paceline.step import step", "step.step"),
        ("engine.sequential", "from paceline import contract, session", "session"),
        ("codec.topk", "def late():\n    import paceline.session", "session"),
        ("exchange.allreduce", "if TYPE_CHECKING:\n    from paceline.link.gloo import Link", "link.gloo"),
        ("link.gloo", "from ..exchange import allreduce", "exchange.allreduce"),
        ("link.gloo", "from paceline.codec import half", "codec.half"),
        ("link", "from ..elastic import quorum", "elastic.quorum"),
        ("data.images", "from importlib import import_module\nimport_module('paceline.engine')", "engine"),
        ("data.batches", "import paceline as p", ""),
        ("planner", "from paceline import session", "session"),
        ("session", "from paceline import cli", "cli"),
        ("launch.local", "from paceline import cli", "cli"),
    ],
)
def test_a_planted_climb_is_caught(module, source, what):
    line = source.count("\n") + 1
    assert climbs(module, source, module == "link") == [f"{line}: paceline.{what}".rstrip(".")]


def test_only_its_command_imports_the_benchmarks():
    source = "from paceline_bench import cluster"
    assert climbs("cli.bench", source) == []
    assert climbs("cli.plan", source) == ["1: paceline_bench"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.threads", "import torch\nfrom torch import nn\nfrom paceline.contract import Gradient"),
        ("engine.threads", "from . import sequential\nfrom .sequential import Engine\nfrom paceline import contract"),
        ("elastic.failure_detector", "import paceline.link.net.route"),
        ("planner.choose", "from paceline import job\nfrom paceline.planner.measure.stopwatch import Clock"),
        ("cli", "from paceline import __version__, planner, train"),
    ],
)
def test_what_goes_down_is_let_through(module, source):
    assert climbs(module, source) == []


def test_a_module_without_a_rule_is_told():
    assert "no rule" in climbs("elsewhere.new", "import torch")[0]


def test_all_rooms_were_looked_into():
    assert {place(room) for room in registry.ROOMS} < set(MODULES)
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_the_tree_can_be_seen_at_a_glance():
    rooms = [path for path in ROOT.iterdir() if (path / "__init__.py").exists()]
    assert len(rooms) <= MAX_ROOMS
    assert len([path for path in ROOT.glob("*.py") if path.name != "__init__.py"]) <= MAX_IN_ROOT
    methods = {ROOT / Path(*place(room).split(".")) for room in registry.ROOMS}
    for folder in {path.parent for path in MODULES.values()} - {ROOT} - methods:
        organs = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(organs) <= MAX_ORGANS, folder


def test_the_step_fits_on_a_screen():
    assert len((ROOT / "step" / "step.py").read_text().splitlines()) <= MAX_LINES_OF_A_STEP


def functions_over(limit: int, source: str) -> list[str]:
    """Every function, also one inside of another, with more lines than that, from its ``def`` to its end."""
    return [
        f"{node.name}: {length}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > limit
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "paceline")
def test_a_file_and_its_functions_have_a_size_to_be_read_in(module):
    source = MODULES[module].read_text()
    assert len(source.splitlines()) <= MAX_LINES_OF_A_FILE
    assert functions_over(MAX_LINES_OF_A_FUNCTION, source) == []


def members(made):
    """Of a class, by name, those that it inherits left out."""
    named = [getattr(node, "target", None) or getattr(node, "targets", [node])[0] for node in made.body[1:]]
    return [getattr(each, "name", None) or ast.unparse(each) for each in named]


@pytest.mark.parametrize("module", ["contract", "transport", "report.step_observer"])
def test_a_promise_is_small_enough_to_be_kept(module):
    classes = [node for node in ast.parse(MODULES[module].read_text()).body if isinstance(node, ast.ClassDef)]
    assert classes
    for made in classes:
        assert len(members(made)) <= MAX_MEMBERS_OF_A_PROMISE, made.name


def test_members_of_a_planted_promise_are_counted():
    source = 'class Promise:\n    """Kept."""\n\n    a: int\n    b = 0\n\n    def c(self): ...\n'
    assert members(ast.parse(source).body[0]) == ["a", "b", "c"]


def test_a_planted_long_function_is_caught():
    body = "    pass\n" * 79
    assert functions_over(80, f"def fits():\n{body}") == []
    assert functions_over(80, f"def long():\n{body}    pass\n") == ["long: 81"]
    inner = "".join(f"    {line}\n" for line in f"async def inner():\n{body}    pass".splitlines())
    assert functions_over(80, f"class C:\n{inner}") == ["inner: 81"]


# what parameters are called that are objects of ours
OURS = {
    *("pace", "run", "engine", "exchange", "link", "codec", "job", "record", "world", "assignment", "late", "control"),
    *(
        "join_desk",
        "equivalence",
        "stopwatch",
        "news",
        "outcome",
        "vote",
        "gradient",
        "bucket",
        "observer",
        "admission",
    ),
    *("update", "tally", "detector", "members", "view", "relay", "local_group"),
    *("membership", "saver", "joiner", "activity", "limits", "balance", "cursor", "change"),
}


def test_no_object_of_ours_hides_behind_any():
    found = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.arg in OURS and node.annotation is not None:
                named = {each.id for each in ast.walk(node.annotation) if isinstance(each, ast.Name)}
                found += [f"{module}:{node.lineno} {node.arg}"] if named == {"Any"} else []
    assert found == []


@pytest.mark.parametrize(("room", "name"), PLUGINS)
def test_a_plugin_says_in_one_sentence_what_it_is(room, name):
    doc = ast.get_docstring(ast.parse(MODULES[f"{place(room)}.{name}"].read_text()))
    assert doc, "no docstring"
    first = doc.splitlines()[0]
    assert len(first) < 120
    assert first.endswith("."), "the first line is not a whole sentence"
    assert registry.describe(room, name) == first.rstrip(".")


@pytest.mark.parametrize("room", [room for room in registry.ROOMS if room != "models"])
def test_a_plugin_has_one_class_of_the_rooms_name_and_nothing_else_in_the_room_does(room):
    promise = getattr(transport if room == "link" else contract, registry.ROOMS[room])
    owners = []
    for path in sorted((ROOT / room).glob("*.py")):
        classes = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
        assert classes.count(registry.ROOMS[room]) <= 1, path
        if registry.ROOMS[room] in classes:
            owners.append(path.stem)
    assert list(owners) == sorted(registry._ours(room))
    for name in owners:
        assert issubclass(getattr(registry.module(room, name), registry.ROOMS[room]), promise)


def test_models_have_build():
    for path in sorted((ROOT / "train" / "models").glob("[!_]*.py")):
        functions = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert functions.count("build") == 1, path
        assert path.stem in registry._ours("models")
        assert callable(importlib.import_module(f"paceline.train.models.{path.stem}").build)
