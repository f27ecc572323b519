"""Imports go down only, and a plug-in is one module with one class and a sentence that says what it is."""

from __future__ import annotations

import ast
import fnmatch
import importlib
from pathlib import Path

import pytest

import paceline
from paceline import contract, find

ROOT = Path(paceline.__file__).parent

# Who may import whom, lowest first: the first row that matches a module counts.
RULES = {
    "values": (),
    "contract": ("values",),
    "find": (),
    "job": (),
    "norms": (),
    "balance": (),
    "schedule": (),
    "sums": (),
    "packing": (),
    "lars": (),
    "scaler": (),
    "settings": ("balance",),
    "network": ("find",),
    "interrupt": (),
    "status": (),
    "unasked": ("engine.randomness",),
    "whereabouts": (),
    "live": (),
    "signs": ("whereabouts",),
    "stragglers": ("report.record",),
    "world": (),
    "report.record": (),
    "probe.clock": (),
    "quota": (),
    "patience": (),
    "probe.survey": ("quota",),
    "models*": ("models.*",),
    "engine*": ("contract", "norms", "quota", "patience", "sums", "packing", "whereabouts", "engine.*"),
    "link*": ("contract", "patience", "whereabouts", "link.*"),
    "exchange*": ("contract", "sums", "packing", "exchange.*"),
    "codec*": ("contract", "codec.*"),
    "data*": ("contract", "data.*"),
    "report*": ("contract", "report.*"),
    "probe*": ("contract", "find", "job", "norms", "probe.*"),
    "own": ("contract", "data.feed", "engine.batch", "engine.graph"),
    "once": ("elastic.claim",),
    "compare": ("contract", "job", "engine.numerics", "engine.options", "data.pictures"),
    "elastic*": ("contract", "elastic.*"),
    "memories": ("contract", "elastic.*", "engine.batch"),
    "resume": ("buffers", "memories", "engine.randomness", "elastic.*"),
    "members": ("contract", "seating", "waiting", "elastic.claim", "report.usage"),
    "handover": ("members", "resume", "seating", "data.order", "engine.*", "elastic.*"),
    "following": ("contract", "handover", "engine.batch"),
    "waiting": ("contract", "interrupt", "link.quorum"),
    "welcome": ("contract", "compare", "handover", "following", "patience", "waiting"),
    "wrapped": (),
    "modes": (),
    "unstepped": (),
    "asked": ("contract", "find", "balance", "overlap", "world", "wrapped", "engine.numerics"),
    "frozen": ("contract",),
    "moved": ("contract", "engine.moving", "report.record"),
    "buffers": ("contract", "frozen", "engine.buffers"),
    "entry": ("handover", "following", "interrupt"),
    "saving": ("buffers", "once", "resume", "elastic.*"),
    "drift": ("contract", "engine.parts", "engine.shares", "report.record"),
    "loop": ("contract", "scaler", "balance", "drift", "moved", "stragglers", "whereabouts", "report.record"),
    "tracing": ("contract", "loop", "world", "link.ledger", "report.chrome"),
    "overlap": ("contract", "job", "engine.shares"),
    "plan": ("contract", "find", "job", "probe.*", "report.record"),
    "evaluate": ("contract", "data.*", "engine.batch"),
    "seating": ("contract", "job", "norms", "world", "balance", "data.order"),
    "examined": ("norms", "data.*", "engine.*", "probe.*"),
    "why": ("engine.*", "probe.*"),
    "pace": (
        *("contract", "job", "loop", "engine.*", "link.*", "data.*", "report.*", "probe.*", "elastic.*"),
        *(
            "own",
            "once",
            "wrapped",
            "modes",
            "unstepped",
            "norms",
            "compare",
            "evaluate",
            "saving",
            "interrupt",
            "scaler",
            "world",
            "seating",
            "drift",
            "tracing",
        ),
        *("buffers", "entry", "welcome", "members", "frozen", "moved"),
        *("examined", "live", "signs", "status", "stragglers", "unasked", "whereabouts", "why"),
    ),
    "session": (
        *("contract", "find", "job", "loop", "engine.*", "link.*", "exchange.*", "codec.*"),
        *("report.*", "probe.*", "elastic.*", "plan", "pace", "world", "balance", "overlap", "members"),
        *("asked", "interrupt", "status", "unasked", "wrapped"),
    ),
    "predict": ("network", "data.*", "elastic.*", "models.*"),
    "launch.measure": ("plan", "find", "world", "link.chosen", "probe.*", "launch.*"),
    "launch*": (
        *("plan", "quota", "report.record", "link.proof", "link.waits", "live", "probe.survey", "launch.*"),
        *("interrupt", "patience", "status", "link.ticket"),
    ),
    "together": ("balance", "probe.*"),
    "nodes": ("plan", "together", "link.collective", "probe.*", "launch.*"),
    "verify": ("contract", "find", "job", "probe.*", "launch.*"),
    "train": (
        *("contract", "find", "job", "models.*", "data.*", "report.*", "session", "pace"),
        *("schedule", "lars", "network", "settings", "elastic.claim"),
    ),
    "": ("contract", "session", "pace", "interrupt"),  # the package itself: the public names
    "bench.simulated*": (
        *("contract", "loop", "engine.*", "exchange.*", "codec.*", "link.*", "data.*", "report.record"),
        *("elastic.*", "seating", "balance", "drift", "probe.survey", "waiting", "bench.simulated.*"),
    ),
    "bench.chaos*": ("contract", "data.order", "elastic.*", "launch.*", "probe.survey", "bench.*", ""),
    "bench*": (
        "contract",
        "engine.*",
        "network",
        "plan",
        "data.*",
        "link.*",
        "launch.*",
        "probe.*",
        "report.record",
        "bench.*",
        "",
    ),
    "cli*": ("*",),
    "__main__": ("cli",),
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
PLUGINS = [(room, name) for room in find.ROOMS for name in find.names(room)]


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
            names = [ast.unparse(node.args[0]).strip("'\"")] if module != "find" else []
        else:
            continue
        for name in names:
            if name.split(".")[0].strip("f'\"") == "paceline":
                yield node.lineno, name.removeprefix("paceline").lstrip(".")


def climbs(module, source, is_package=False):
    """Every import that a module may not make, as "line: what"."""
    (row,) = [pattern for pattern in RULES if fnmatch.fnmatchcase(module, pattern)][:1] or [None]
    if row is None:
        return [f"no rule says what paceline.{module} may import; add one to RULES"]
    found = []
    for line, name in imported(module, source, is_package):
        if name != module and not any(fnmatch.fnmatchcase(name, allowed) for allowed in RULES[row]):
            found.append(f"{line}: {f'paceline.{name}'.rstrip('.')}")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "paceline")
def test_imports_go_down_only(module):
    path = MODULES[module]
    assert climbs(module, path.read_text(), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "what"),
    [
        ("contract", "from paceline import find", "find"),
        ("job", "import paceline.contract", "contract"),
        ("find", "from paceline.codec import topk", "codec.topk"),
        ("engine.sequential", "from paceline.loop import Loop", "loop"),
        ("engine.sequential", "from paceline import contract, session", "session"),
        ("codec.topk", "def late():\n    import paceline.session", "session"),
        ("exchange.allreduce", "if TYPE_CHECKING:\n    from paceline.link.torch import Link", "link.torch"),
        ("link.torch", "from ..exchange import meeting", "exchange.meeting"),
        ("link", "from ..exchange import meeting", "exchange.meeting"),
        ("models.small", "from paceline import find", "find"),
        ("models.small", "from importlib import import_module\nimport_module('paceline.find')", "find"),
        ("data.feed", "import paceline as p", ""),
        ("loop", "from paceline.engine.sequential import Engine", "engine.sequential"),
        ("plan", "from paceline import session", "session"),
        ("session", "from paceline import cli", "cli"),
        ("launch.local", "from paceline import cli", "cli"),
        ("probe.clock", "from paceline.probe import trial", "probe.trial"),
    ],
)
def test_a_planted_climb_is_caught(module, source, what):
    line = source.count("\n") + 1
    assert climbs(module, source, module == "link") == [f"{line}: paceline.{what}".rstrip(".")]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.threads", "import torch\nfrom torch import nn\nfrom paceline.contract import Piece"),
        ("engine.threads", "from . import sequential\nfrom .sequential import Engine\nfrom paceline import contract"),
        ("link.torch", "import paceline.link.pulse"),
        ("probe.trial", "from paceline import job\nfrom paceline.probe.clock import Clock"),
        ("cli", "from paceline import __version__, plan, train"),
    ],
)
def test_what_goes_down_is_let_through(module, source):
    assert climbs(module, source) == []


def test_a_module_without_a_rule_is_told():
    assert "no rule" in climbs("elsewhere.new", "import torch")[0]


def test_all_rooms_were_looked_into():
    assert set(find.ROOMS) < set(MODULES)
    assert {"contract", "loop", "session", "data.order", "link.memory"} < set(MODULES)


@pytest.mark.parametrize(("room", "name"), PLUGINS)
def test_a_plugin_says_in_one_sentence_what_it_is(room, name):
    doc = ast.get_docstring(ast.parse(MODULES[f"{room}.{name}"].read_text()))
    assert doc, "no docstring"
    first = doc.splitlines()[0]
    assert len(first) < 120
    assert first.endswith("."), "the first line is not a whole sentence"
    assert find.describe(room, name) == first.rstrip(".")


@pytest.mark.parametrize("room", [room for room in find.ROOMS if room != "models"])
def test_a_plugin_has_one_class_of_the_rooms_name_and_nothing_else_in_the_room_does(room):
    promise = getattr(contract, find.ROOMS[room])
    owners = []
    for path in sorted((ROOT / room).glob("*.py")):
        classes = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
        assert classes.count(find.ROOMS[room]) <= 1, path
        if find.ROOMS[room] in classes:
            owners.append(path.stem)
    assert tuple(owners) == find.names(room)
    for name in owners:
        assert issubclass(getattr(find.module(room, name), find.ROOMS[room]), promise)


def test_models_have_build():
    for path in sorted((ROOT / "models").glob("[!_]*.py")):
        functions = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert functions.count("build") == 1, path
        assert path.stem in find.names("models")
        assert callable(importlib.import_module(f"paceline.models.{path.stem}").build)
