"""A name becomes an object: find("codec", "topk", keep=0.01); names("codec"); typo hints.

A plug-in is one module in a room with one class named as the room's promise (Engine, Link, Codec,
Exchange). Nothing is registered: the folder is the table. Names of defaults stand here, and nowhere else; a plug-in's
traits stand in its class (`says`).
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
PROMISES = "contract.py", "transport.py"  # where these classes are promised
PLACES = {"models": "train.models"}  # of rooms that lie inside of others
FORMERLY = {  # former names of methods, which scripts, plans and checkpoints may still have
    "engine": {"virtual": "reproducible", "replay": "emulated"},
    "exchange": {"periodic": "local_sgd", "tree": "ordered"},
    "link": {"torch": "gloo"},
}

# engines: what all others are held against; many cores for one process, for many, for many copies in one
BASELINE, THREADS, PROCESSES, REPLICAS = "sequential", "threads", "processes", "replicas"
ONE_PROCESS = f"{BASELINE} or {THREADS}:k"
# what makes the same bits on any number of nodes: an engine with so many shares, and the exchange that adds them up
REPRODUCIBLE, SHARES, FIXED_ORDER = "reproducible", 8, "ordered"
EXCHANGE, CODEC, LINK, ENCRYPTED, ALONE = "allreduce", "none", "gloo", "tls", "memory"
MODEL, MODEL_OF_SAMPLE = "alexnet", "small"

_PARSING = threading.Lock()  # two threads at once may fail in ast.parse (Python 3.11)


@cache
def _texts(room: str) -> dict[str, str]:
    """The room's modules, read and not imported: a list should not cost the import of torch."""
    package = importlib.util.find_spec(f"paceline.{PLACES.get(room, room)}")
    folders = package.submodule_search_locations if package else None
    paths = (path for folder in folders or () for path in Path(folder).glob("*.py"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


@cache
def names(room: str) -> tuple[str, ...]:
    """All plug-ins of a room, sorted."""
    made = re.compile(rf"^(class|def) {ROOMS[room]}\b", re.MULTILINE)
    return tuple(sorted(name for name, text in _texts(room).items() if made.search(text)))


def current(room: str, text: str) -> str:
    """``text``, which begins with a method's name, with today's: "virtual:8+bf16" becomes "reproducible:8+bf16"."""
    name = re.split(r"\W", text, maxsplit=1)[0]
    return FORMERLY.get(room, {}).get(name, name) + text[len(name) :]


def describe(room: str, name: str) -> str:
    """The first line of the plug-in's module docstring."""
    with _PARSING:
        text = ast.parse(_texts(room)[name])
    return (ast.get_docstring(text) or "").partition("\n")[0].rstrip(".")


def head(text: str) -> tuple[str, str]:
    """(name, argument) of a plug-in or a row that starts with one: "processes:2+bf16" is ("processes", "2")."""
    name, _, argument = text.partition("+")[0].partition("/")[0].strip().partition(":")
    return name, argument


def says(room: str, name: str, trait: str) -> Any:
    """The plain value of the plug-in's class attribute, else of the one that it inherits from, else the promise's.

    Read and not imported, as `names`. Of an unknown name, the promise's.
    """
    name = current(room, name)
    known = name in names(room)
    values, base = _said(_texts(room)[name] if known else _promises(), ROOMS[room])
    return values[trait] if trait in values or not known else says(room, base, trait)


@cache
def _promises() -> str:
    return "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in PROMISES)


@cache
def _said(text: str, kind: str) -> tuple[dict[str, Any], str]:
    """The literal attributes of a module's class, and the module that this inherits from, where that is of its room."""
    with _PARSING:
        body = ast.parse(text).body
    known = {each.asname: each.name for node in body if isinstance(node, ast.ImportFrom) for each in node.names}
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    bases = [ast.unparse(base) for base in classes[kind].bases]
    values: dict[str, Any] = {}
    for made in [*(classes[base] for base in bases if base in classes), classes[kind]]:  # a promise is made of several
        values |= _literals(made)
    base = bases[0].partition(".")[0] if bases else ""
    return values, known.get(base, base)


def _literals(made: ast.ClassDef) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for node in made.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            with contextlib.suppress(ValueError):  # what is no literal, only an import can tell
                value = ast.literal_eval(node.value)
                if isinstance(target, ast.Tuple):
                    values |= zip(map(ast.unparse, target.elts), value, strict=True)
                else:
                    values[ast.unparse(target)] = value
    return values


def module(room: str, name: str) -> Any:
    """The plug-in's module. Raises ValueError naming what is known and what was probably meant."""
    name = current(room, name)
    if name not in names(room):
        close = difflib.get_close_matches(name, names(room), n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no {room.removesuffix('s')} named {name!r}; known: {', '.join(names(room))}{hint}")
    return importlib.import_module(f"paceline.{PLACES.get(room, room)}.{name}")


def find(room: str, name: str, *args: Any, **options: Any) -> Any:
    """The plug-in's object, made with its options. Raises ValueError for a wrong name or option."""
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
