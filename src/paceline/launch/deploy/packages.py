"""Checks that every host has the packages that a command needs, before anything starts there."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.launch.doctor.host_facts import PACKAGES
from paceline.registry import ENCRYPTED, names, says

TRAIN = "paceline.train.run"


def needed(command: Sequence[str]) -> dict[str, str]:
    """The packages that a command needs, each with the script or option that needs it."""
    link, required = os.environ.get("PACELINE_LINK", ""), {}
    if package := says("link", link, "package")[0]:
        required[package] = f"PACELINE_LINK={link}"
    if os.environ.get("PACELINE_ENCRYPT") == "1":
        required[says("link", ENCRYPTED, "package")[0]] = "--encrypt"
    for script, own in _sources(command):
        if script.is_file():
            return {**dict.fromkeys(imported(script.read_bytes(), own), script.name), **required}
    return required


def _sources(command: Sequence[str]) -> list[tuple[Path, Path]]:
    """Possible paths of the user's script, each with the folder from which it imports; the first that exists is it."""
    if command[0] != "-m":
        return [(Path(command[0]), Path(command[0]).parent)]
    module = command[1]
    if module == TRAIN:
        model = json.loads(command[2]).get("model") if len(command) > 2 else None
        module = str(model or "").partition(":")[0]
        if not module or ":" not in str(model):
            return []
    path = Path(*module.split("."))
    return [(path.with_suffix(".py"), Path()), (path / "__main__.py", Path()), (path / "__init__.py", Path())]


def imported(source: bytes, own: Path) -> list[str]:
    """Packages that a script imports at its top level, without the standard library and modules beside the script.

    If the script changes sys.path, modules that are not found here are no packages.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []  # the script itself will raise the error
    modules = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    found = {name.partition(".")[0] for name in modules} - set(PACKAGES) - sys.stdlib_module_names
    beside = [str(own), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    moves = b"sys.path" in source
    return sorted(
        name
        for name in found
        if not PathFinder.find_spec(name, beside) and not (moves and importlib.util.find_spec(name) is None)
    )


def lacking(needs: Mapping[str, str], lacks: Sequence[str], python: str) -> list[str]:
    """One line that names the needed packages that ``python`` on a host lacks; empty if there are none."""
    if not (missing := [name for name in needs if name in lacks]):
        return []
    what = ", ".join(f"{name} (needed by {needs[name]})" for name in missing)
    verb = "is" if len(missing) == 1 else "are"
    wanted = " ".join(map(_distribution, missing))
    return [
        f"{what} {verb} not installed for {python} there; install there: {python} -m pip install {wanted}; or name "
        f"another interpreter with --python"
    ]


def _distribution(package: str) -> str:
    """The name and version for pip: the distribution that installed the package here."""
    if extra := dict(says("link", name, "package") for name in names("link")).get(package):
        return f"'paceline[{extra}]'"
    if not (found := importlib.metadata.packages_distributions().get(package)):
        return package
    return f"{found[0]}=={importlib.metadata.version(found[0]).partition('+')[0]}"
