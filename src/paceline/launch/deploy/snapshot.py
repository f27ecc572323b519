"""Lists what --send copies: the working tree as it is now, and a folder of data, as hashes and paths to read them."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.deploy.receive import mark

LEFT_OUT = ("__pycache__", "runs", "node_modules")  # and hidden ones, and virtual environments
LARGE_BYTES = 300 << 20  # of a working tree, from which a line asks whether all of it is meant
PART = 1 << 20
DATA = ".paceline/data"  # where data from elsewhere lie in the tree


@dataclass
class Tree:
    """``linked``: contents are there once, read-only, however many folders have them. ``sources``: hash to a path here.

    ``files`` (path, hash, size, may be run), ``links`` (path, target), ``mounts`` (path, the name of another tree).
    """

    linked: bool
    files: list[tuple[str, str, int, bool]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    sources: dict[str, Path] = field(default_factory=dict)

    def said(self) -> dict[str, Any]:
        listed = {name: sorted(map(list, getattr(self, name))) for name in ("files", "links", "mounts")}
        return {"linked": self.linked, **listed}

    @property
    def name(self) -> str:
        return mark(self.said())

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size, _ in self.files)


def take(folder: Path, data: Path | None = None) -> tuple[list[Tree], str | None]:
    """The trees of a working folder, the last of which is the one to start in, and where in it the data are.

    Raises ValueError that names what cannot go along.
    """
    if data is None:
        return [_tree(folder, _listed(folder))], None
    if not (folder / data).is_dir():
        raise ValueError(f"--send: there is no folder {data} here to send along; give --data a folder that is here")
    inside = Path(os.path.normpath(folder / data))
    place = inside.relative_to(folder).as_posix() if folder in inside.parents else DATA
    pictures = _tree(folder / data, sorted(_walked(folder / data, everything=True)), linked=True)
    within = [path for path in _listed(folder) if not (path + "/").startswith(place + "/")]
    tree = _tree(folder, within)
    tree.mounts.append((place, pictures.name))
    return [pictures, tree], place


def _tree(folder: Path, paths: Sequence[str], linked: bool = False) -> Tree:
    tree, faults = Tree(linked), []
    for path in paths:
        full = folder / path
        try:
            found = full.lstat()
            if stat.S_ISLNK(found.st_mode) and not (linked and full.is_file()):
                target = os.readlink(full)
                ends = os.path.normpath(os.path.join(os.path.dirname(path), target))
                if os.path.isabs(target) or ends.split("/")[0] == "..":
                    faults.append(f"the link {path} leads out of it, to {target}")
                tree.links.append((path, target))
            elif stat.S_ISLNK(found.st_mode) or stat.S_ISREG(found.st_mode):
                name, size = _hash(full)
                tree.files.append((path, name, size, bool(found.st_mode & stat.S_IXUSR) and not linked))
                tree.sources.setdefault(name, full)
            else:
                faults.append(f"{path} is neither file nor link")
            path.encode()
        except FileNotFoundError:
            continue  # git still lists what was deleted
        except UnicodeEncodeError:
            faults.append(f"{os.fsencode(path)!r} is a name that is no UTF-8")
        except OSError as error:
            faults.append(f"{path} cannot be read: {error.strerror}")
    if faults:
        more = f", and {len(faults) - 5} others" if len(faults) > 5 else ""
        remedy = "remove them" if linked else "remove them, have git ignore them, or give --data what is data"
        raise ValueError(f"--send: not all of {folder} can go along: {'; '.join(faults[:5])}{more}; {remedy}")
    return tree


def _hash(path: Path) -> tuple[str, int]:
    found, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while data := file.read(PART):
            found.update(data)
            size += len(data)
    return found.hexdigest(), size


def _listed(folder: Path) -> list[str]:
    """What git tracks there, and of what it would what looks like work; without git, everything that does."""
    tracked, others = (_git(folder, which) for which in ("--cached", "--others"))
    if tracked is None or others is None:
        return sorted(_walked(folder))
    environments = [path.removesuffix("pyvenv.cfg") for path in others if path.endswith("/pyvenv.cfg")]
    kept = [path for path in others if _is_work(path) and not path.startswith(tuple(environments))]
    found: set[str] = set()
    for path in {*tracked, *kept} - {"./"}:  # which is how a submodule calls itself that is not here
        inner = folder / path
        if inner.is_dir() and not inner.is_symlink():  # a repository in this one
            found |= {f"{path.rstrip('/')}/{below}" for below in _listed(inner)}
        else:
            found.add(path)
    return sorted(found)


def _is_work(path: str) -> bool:
    parts = path.split("/")
    return not any(part.startswith(".") for part in parts) and not any(part in LEFT_OUT for part in parts[:-1])


def _git(folder: Path, which: str) -> list[str] | None:
    """None where there is no git, or no repository. Raises ValueError where git itself refuses."""
    command = ["git", "-C", str(folder), "ls-files", "-z", which, "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        return None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        if "not a git repository" in said:
            return None
        raise ValueError(f"--send: git does not say what {folder} holds: {said.splitlines()[0] if said else 'nothing'}")
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]


def _walked(folder: Path, everything: bool = False) -> Iterator[str]:
    for here, folders, names in os.walk(folder):
        if not everything:
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".") and name not in LEFT_OUT and not Path(here, name, "pyvenv.cfg").exists()
            ]
        linked = [name for name in folders if Path(here, name).is_symlink()]
        for name in (*names, *linked):
            if everything or not name.startswith("."):
                yield Path(here, name).relative_to(folder).as_posix()
