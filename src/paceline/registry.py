"""Plug-in registry: finds objects by name, as in find("codec", "topk", keep=0.01); lists names; suggests corrections.

A plug-in is one module in a subpackage ("room") with one class named as the room's interface (Engine, Link, Codec,
Exchange). No plug-in is registered: the folder is the table. Names of defaults are only in this module; a plug-in's
traits are in its class (`says`).
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

ROOMS = {"engine": "Engine", "exchange": "Exchange", "codec": "Codec", "link": "Link", "models": "build"}
INTERFACES = "contract.py", "transport.py"  # the modules of these classes' interfaces
PLACES = {"models": "train.models"}  # of rooms inside other rooms
FORMER_NAMES = {  # former names of methods, which scripts, plans and checkpoints may contain
    "engine": {"virtual": "reproducible", "replay": "emulated"},
    "exchange": {"periodic": "local_sgd", "tree": "ordered"},
    "link": {"torch": "gloo"},
}

# engines: the baseline; one process with many threads; many processes; many replicas in one process
BASELINE, THREADS, PROCESSES, REPLICAS = "sequential", "threads", "processes", "replicas"
ONE_PROCESS = f"{BASELINE} or {THREADS}:k"
# bit-equal results on any number of nodes: an engine with so many virtual shards, and an exchange with fixed order
REPRODUCIBLE, SHARES, FIXED_ORDER = "reproducible", 8, "ordered"
EXCHANGE, CODEC, LINK, ENCRYPTED, ALONE = "allreduce", "none", "gloo", "tls", "memory"
MODEL, MODEL_OF_SAMPLE = "alexnet", "small"

_PARSING = threading.Lock()  # ast.parse may fail in two threads at once (Python 3.11)


@cache
def _texts(room: str) -> dict[str, str]:
    """The source of the room's modules, which are not imported: listing must not import torch."""
    package = importlib.util.find_spec(f"paceline.{PLACES.get(room, room)}")
    folders = package.submodule_search_locations if package else None
    paths = (path for folder in folders or () for path in Path(folder).glob("*.py"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


@cache
def names(room: str) -> tuple[str, ...]:
    """All plug-ins of a room, sorted."""
    pattern = re.compile(rf"^(class|def) {ROOMS[room]}\b", re.MULTILINE)
    return tuple(sorted(name for name, text in _texts(room).items() if pattern.search(text)))


def current(room: str, text: str) -> str:
    """``text`` with a former method name replaced by the present one: "virtual:8+bf16" -> "reproducible:8+bf16"."""
    name = re.split(r"\W", text, maxsplit=1)[0]
    return FORMER_NAMES.get(room, {}).get(name, name) + text[len(name) :]


def describe(room: str, name: str) -> str:
    """The first line of the plug-in's module docstring."""
    with _PARSING:
        text = ast.parse(_texts(room)[name])
    return (ast.get_docstring(text) or "").partition("\n")[0].rstrip(".")


def head(text: str) -> tuple[str, str]:
    """(name, argument) of a plug-in, or of a configuration: "processes:2+bf16" is ("processes", "2")."""
    name, _, argument = text.partition("+")[0].partition("/")[0].strip().partition(":")
    return name, argument


def says(room: str, name: str, trait: str) -> Any:
    """The literal value of the plug-in's class attribute, else of its base class, else of the interface.

    The source is read, not imported, as in `names`. For an unknown name: the interface's value.
    """
    name = current(room, name)
    exists = name in names(room)
    values, base = _literal_attributes(_texts(room)[name] if exists else _interfaces(), ROOMS[room])
    return values[trait] if trait in values or not exists else says(room, base, trait)


@cache
def _interfaces() -> str:
    return "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in INTERFACES)


@cache
def _literal_attributes(text: str, kind: str) -> tuple[dict[str, Any], str]:
    """The literal attributes of a module's class, and the module of its base class, where that is of the same room."""
    with _PARSING:
        body = ast.parse(text).body
    imported = {each.asname: each.name for node in body if isinstance(node, ast.ImportFrom) for each in node.names}
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    bases = [ast.unparse(base) for base in classes[kind].bases]
    values: dict[str, Any] = {}
    for definition in [*(classes[base] for base in bases if base in classes), classes[kind]]:  # interfaces have bases
        values |= _literals(definition)
    base = bases[0].partition(".")[0] if bases else ""
    return values, imported.get(base, base)


def _literals(definition: ast.ClassDef) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for node in definition.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            with contextlib.suppress(ValueError):  # other values need an import
                value = ast.literal_eval(node.value)
                if isinstance(target, ast.Tuple):
                    values |= zip(map(ast.unparse, target.elts), value, strict=True)
                else:
                    values[ast.unparse(target)] = value
    return values


def module(room: str, name: str) -> Any:
    """The plug-in's module. Raises ValueError with the known names and the most similar one."""
    name = current(room, name)
    if name not in names(room):
        close = difflib.get_close_matches(name, names(room), n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no {room.removesuffix('s')} named {name!r}; known: {', '.join(names(room))}{hint}")
    return importlib.import_module(f"paceline.{PLACES.get(room, room)}.{name}")


def find(room: str, name: str, *args: Any, **options: Any) -> Any:
    """The plug-in's object, created with its options. Raises ValueError for an unknown name or option."""
    maker = getattr(module(room, name), ROOMS[room])
    try:
        inspect.signature(maker).bind(*args, **options)
    except TypeError as error:
        accepted = ", ".join(inspect.signature(maker).parameters) or "no options"
        raise ValueError(f"{room} {name!r}: {error}; it accepts: {accepted}") from None
    return maker(*args, **options)


def parse(room: str, text: str) -> Any:
    """``name:argument,option=value/inner``: "processes:2", "topk:keep=0.01", "feedback/topk:keep=0.01"."""
    outer, _, inner = text.partition("/")
    if not (match := re.fullmatch(r"(\w+)(?::(.+))?", outer.strip())):
        raise ValueError(f"{room} {text!r} is not of the form name[:option,...][/inner], as in 'topk:keep=0.01'")
    args: list[Any] = [parse(room, inner)] if inner else []
    options: dict[str, Any] = {}
    for word in (match[2] or "").split(",") if match[2] else ():
        key, equals, value = word.partition("=")
        if equals:
            options[key.strip()] = _value(value)
        else:
            args.append(_value(key))
    return find(room, match[1], *args, **options)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text.strip()
