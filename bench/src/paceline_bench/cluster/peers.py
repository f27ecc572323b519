"""The others in a race: one file each in benchmarks/peers, with ``start(work)`` that gives a step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from paceline_bench.cluster.work import Step, Work


def folder() -> Path:
    """Beside the package's sources, or below the current folder. Raises ValueError."""
    places = [root / "benchmarks" / "peers" for root in (Path(__file__).parents[4], Path.cwd())]
    for place in places:
        if place.is_dir():
            return place
    raise ValueError(
        f"the peers are files of the repository, and there is no {' and no '.join(map(str, places))}; run this in a "
        f"checkout"
    )


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem.replace("_", "-") for path in folder().glob("[!_]*.py")))


def check(name: str) -> str:
    """A peer's name. Raises ValueError."""
    if name not in names():
        raise ValueError(f"no peer named {name!r}; known: {', '.join(names())}; a file in {folder()} is one more")
    return name


def lacking(name: str) -> str:
    """Why it cannot run here, or an empty string."""
    try:
        peer(name)
    except ValueError as error:
        return str(error)
    return ""


def peer(name: str) -> Callable[[Work], Step]:
    """Its ``start``. Raises ValueError where it needs what is not installed."""
    path = folder() / f"{check(name).replace('-', '_')}.py"
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec
    assert spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ValueError(f"peer {name!r} needs what is not installed here: {error}") from error
    start: Callable[[Work], Step] = module.start
    return start
