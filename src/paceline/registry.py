"""Plug-in registry: finds objects by name, as in find("codec", "topk", keep=0.01); lists names; suggests corrections.

A plug-in is one module in a subpackage ("room") with one class named as the room's interface (Engine, Link, Codec,
Exchange). No plug-in of ours is registered: the folder is the table. A package adds its own by an entry point of the
group ``paceline.codec`` (or engine, exchange, link) that names such a module. "package.module:Class:options" is a class
that nobody has named. Names of defaults are only in this module; a plug-in's traits are in its class (`says`).
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
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
CORRECTION = "feedback"  # the codec around one whose sums are biased
SIXTEEN_BITS = "half"  # the codec that sends values of 16 bits as they are
MODEL, MODEL_OF_SAMPLE = "alexnet", "small"
EXAMPLES = {"engine": f"{THREADS}:2", "exchange": EXCHANGE, "codec": CODEC}

OWN = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Z]\w*)(?::(.+))?")  # package.module:Class:options
_PARSING = threading.Lock()  # ast.parse may fail in two threads at once (Python 3.11)


@cache
def _ours(room: str) -> dict[str, str]:
    """The source of each plug-in of ours, which is not imported: listing must not import torch."""
    package = importlib.util.find_spec(f"paceline.{PLACES.get(room, room)}")
    folders = package.submodule_search_locations if package else None
    pattern = re.compile(rf"^(class|def) {ROOMS[room]}\b", re.MULTILINE)
    paths = (path for folder in folders or () for path in Path(folder).glob("*.py"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in texts.items() if pattern.search(text)}


@cache
def _installed(room: str) -> dict[str, tuple[str, str]]:
    """(module, source) of each plug-in of other packages."""
    from importlib.metadata import entry_points  # memory and time that most processes do without

    found = {}
    for each in entry_points(group=f"paceline.{room}") if room not in PLACES else ():
        with contextlib.suppress(ImportError, ValueError, OSError):  # of a package that is broken
            spec = importlib.util.find_spec(each.module)
            if spec and spec.origin and each.name.isidentifier():
                found[each.name] = each.module, Path(spec.origin).read_text(encoding="utf-8")
    return found


def _source(room: str, name: str) -> str | None:
    """None for an unknown name."""
    return _ours(room).get(name) or (_installed(room).get(name, ("", None))[1] if name else None)


def _own(room: str, text: str) -> re.Match[str] | None:
    """Whether ``text`` is "package.module:Class", and not a plug-in's name with an option."""
    match = OWN.fullmatch(text.strip()) if room in ROOMS else None
    if match is None or match[1] in FORMER_NAMES.get(room, {}) or _source(room, match[1]):
        return None
    return match


def names(room: str) -> tuple[str, ...]:
    """All plug-ins of a room, sorted."""
    return tuple(sorted(_ours(room).keys() | _installed(room).keys()))


def current(room: str, text: str) -> str:
    """``text`` with a former method name replaced by the present one: "virtual:8+bf16" -> "reproducible:8+bf16"."""
    if _own(room, text.partition("+")[0]):
        return text
    name = re.split(r"\W", text, maxsplit=1)[0]
    return FORMER_NAMES.get(room, {}).get(name, name) + text[len(name) :]


def describe(room: str, name: str) -> str:
    """The first line of the plug-in's module docstring."""
    with _PARSING:
        text = ast.parse(_source(room, name) or "")
    return (ast.get_docstring(text) or "").partition("\n")[0].rstrip(".")


def head(text: str) -> tuple[str, str]:
    """(name, argument) of a plug-in, or of a configuration: "processes:2+bf16" is ("processes", "2")."""
    outer = text.partition("+")[0].partition("/")[0].strip()
    if own := next((match for room in ROOMS if (match := _own(room, outer))), None):
        return f"{own[1]}:{own[2]}", own[3] or ""
    name, _, argument = outer.partition(":")
    return name, argument


def heads(text: str) -> list[tuple[str, str]]:
    """(name, argument) of a method, then of the one inside: of "processes:2/pipeline:4+bf16" those of both."""
    return [head(part) for part in text.partition("+")[0].split("/")]


def says(room: str, name: str, trait: str) -> Any:
    """The literal value of the plug-in's class attribute, else of its base class, else of the interface.

    The source is read, not imported, as in `names`; only "package.module:Class" is imported. For an unknown name: the
    interface's value.
    """
    if own := _own(room, name):
        return getattr(_imported(room, own[1], own[2]), trait)
    name = current(room, name)
    source = _source(room, name)
    values, base = _literal_attributes(_interfaces() if source is None else source, ROOMS[room])
    return values[trait] if trait in values or source is None else says(room, base, trait)


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
    """The plug-in's module. Raises ValueError as `refuse_unknown`."""
    name = current(room, name)
    refuse_unknown(room, name)
    ours = f"paceline.{PLACES.get(room, room)}.{name}"
    return importlib.import_module(ours if name in _ours(room) else _installed(room)[name][0])


def refuse_unknown(room: str, name: str) -> None:
    """Raises ValueError with the known names and the most similar one."""
    if _source(room, name) is None and not _own(room, name):
        close = difflib.get_close_matches(name, names(room), n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no {room.removesuffix('s')} named {name!r}; known: {', '.join(names(room))}{hint}")


def find(room: str, name: str, *args: Any, **options: Any) -> Any:
    """The plug-in's object, created with its options. Raises ValueError for an unknown name or option."""
    return _made(room, name, getattr(module(room, name), ROOMS[room]), args, options)


def _made(room: str, name: str, maker: Any, args: Any, options: dict[str, Any]) -> Any:
    if missing := sorted(getattr(maker, "__abstractmethods__", ())):
        raise ValueError(
            f"{room} {name!r} does not define {', '.join(missing)}, which every {room} does: see {ROOMS[room]} in "
            f"paceline/{INTERFACES[room == 'link']}"
        )
    try:
        inspect.signature(maker).bind(*args, **options)
    except TypeError as error:
        parameters = inspect.signature(maker).parameters
        raise ValueError(f"{room} {name!r}: {error}; it accepts: {', '.join(parameters) or 'no options'}") from None
    return maker(*args, **options)


def parse(room: str, text: str) -> Any:
    """``name:argument,option=value/inner``: "processes:2", "topk:keep=0.01", "feedback/topk:keep=0.01"; in place of a
    name "package.module:Class"."""
    outer, _, inner = text.partition("/")
    own = _own(room, outer)
    if not (match := re.fullmatch(r"(\w+)(?::(.+))?", outer.strip())) and not own:
        raise ValueError(
            f"{room} {text!r} is not of the form name[:option,...][/inner], as in 'topk:keep=0.01', nor "
            f"package.module:Class[:option,...][/inner]"
        )
    given = own[3] if own else match[2] if match else ""
    args: list[Any] = []
    options: dict[str, Any] = {}
    for word in given.split(",") if given else ():
        key, equals, value = word.partition("=")
        if equals:
            options[key.strip()] = _value(value)
        else:
            args.append(_value(key))
    if own:
        name, maker = f"{own[1]}:{own[2]}", _imported(room, own[1], own[2])
    else:
        assert match
        name = match[1]
        maker = getattr(module(room, name), ROOMS[room])
    if inner and "inner" in inspect.signature(maker).parameters:
        options["inner"] = parse(room, inner)
    elif inner:
        raise ValueError(
            f"{room} {text!r}: {name!r} contains no other {room}; of ours these do: "
            f"{', '.join(_containers(room)) or 'none'}"
        )
    return _made(room, name, maker, args, options)


def _containers(room: str) -> list[str]:
    makers = {name: getattr(module(room, name), ROOMS[room]) for name in sorted(_ours(room))}
    return [name for name, maker in makers.items() if "inner" in inspect.signature(maker).parameters]


def attribute(path: str, name: str) -> Any:
    """An attribute of a user's module, from the current folder or PYTHONPATH. Raises ImportError, AttributeError."""
    if (cwd := os.getcwd()) not in sys.path:
        sys.path.insert(0, cwd)
    return getattr(importlib.import_module(path), name)


def _imported(room: str, name: str, kind: str) -> Any:
    """A class of the room's interface, from the current folder or PYTHONPATH. Raises ValueError."""
    try:
        made = attribute(name, kind)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot get {room} {name}:{kind}: {error}; accepted: package.module:Class, importable in {os.getcwd()} or "
            f"by PYTHONPATH; or one of {', '.join(names(room))}"
        ) from error
    if not (isinstance(made, type) and issubclass(made, _interface(room))):
        raise ValueError(f"{room} {name}:{kind} is no class of {_interface(room).__module__}.{ROOMS[room]}")
    return made


def _interface(room: str) -> type:
    found: type = getattr(importlib.import_module("paceline.contract"), ROOMS[room])
    return found


def made(room: str, value: Any) -> tuple[str, Any]:
    """(name, object) of what a script gives as a method: a name with options, "package.module:Class", or an object.
    Raises ValueError."""
    if isinstance(value, str):
        return current(room, value), parse(room, value)
    if isinstance(value, _interface(room)):
        return f"{type(value).__module__}:{type(value).__qualname__}", value
    raise ValueError(
        f"{room} is a name such as {EXAMPLES[room]!r}, 'package.module:Class', or an object of "
        f"paceline.contract.{ROOMS[room]}, got {value!r}"
    )


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text.strip()
