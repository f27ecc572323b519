"""Snapshot of what --send copies: lists the working tree and a folder of data, as hashes and paths of the files."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.deploy.receive import tree_hash

LEFT_OUT = ("__pycache__", "runs", "node_modules")  # besides hidden folders and virtual environments
LARGE_BYTES = 300 << 20  # of a working tree; above it a warning names the largest file
PART = 1 << 20
DATA = ".paceline/data"  # path in the tree of data from outside the working folder


@dataclass
class Tree:
    """``linked``: contents are stored once, read-only, for all folders. ``sources``: the path here of each hash.

    ``files``: (path, hash, size, executable); ``links``: (path, target); ``mounts``: (path, name of another tree).
    """

    linked: bool
    files: list[tuple[str, str, int, bool]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    sources: dict[str, Path] = field(default_factory=dict)

    def listing(self) -> dict[str, Any]:
        listed = {name: sorted(map(list, getattr(self, name))) for name in ("files", "links", "mounts")}
        return {"linked": self.linked, **listed}

    @property
    def name(self) -> str:
        return tree_hash(self.listing())

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size, _ in self.files)


def take(folder: Path, data: Path | None = None) -> tuple[list[Tree], str | None]:
    """The trees of a working folder, the last of which is the folder of the run, and the path of the data in it.

    Raises ValueError that names the files that cannot be sent.
    """
    if data is None:
        return [_tree(folder, _listed(folder))], None
    if not (folder / data).is_dir():
        raise ValueError(f"--send: there is no folder {data} here to send; give --data a folder that is here")
    inside = Path(os.path.normpath(folder / data))
    data_path = inside.relative_to(folder).as_posix() if folder in inside.parents else DATA
    data_tree = _tree(folder / data, sorted(_walked(folder / data, everything=True)), linked=True)
    paths = [path for path in _listed(folder) if not (path + "/").startswith(data_path + "/")]
    tree = _tree(folder, paths)
    tree.mounts.append((data_path, data_tree.name))
    return [data_tree, tree], data_path


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
            continue  # git still lists deleted files
        except UnicodeEncodeError:
            faults.append(f"{os.fsencode(path)!r} is a name that is not UTF-8")
        except OSError as error:
            faults.append(f"{path} cannot be read: {error.strerror}")
    if faults:
        more = f", and {len(faults) - 5} others" if len(faults) > 5 else ""
        remedy = "remove them" if linked else "remove them, have git ignore them, or give --data the data"
        raise ValueError(f"--send: not all of {folder} can be sent: {'; '.join(faults[:5])}{more}; {remedy}")
    return tree


def _hash(path: Path) -> tuple[str, int]:
    found, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while data := file.read(PART):
            found.update(data)
            size += len(data)
    return found.hexdigest(), size


def _listed(folder: Path) -> list[str]:
    """Files that git tracks, and untracked, not ignored ones that pass `_is_work`; without git, all that pass."""
    tracked, others = (_git(folder, which) for which in ("--cached", "--others"))
    if tracked is None or others is None:
        return sorted(_walked(folder))
    environments = [path.removesuffix("pyvenv.cfg") for path in others if path.endswith("/pyvenv.cfg")]
    wanted = [path for path in others if _is_work(path) and not path.startswith(tuple(environments))]
    found: set[str] = set()
    for path in {*tracked, *wanted} - {"./"}:  # git lists it for a submodule that is not checked out
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
    """The paths that git lists; None without git or a repository. Raises ValueError if git fails."""
    command = ["git", "-C", str(folder), "ls-files", "-z", which, "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        return None
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip()
        if "not a git repository" in errors:
            return None
        raise ValueError(f"--send: git cannot list {folder}: {errors.splitlines()[0] if errors else 'no output'}")
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]


def _walked(folder: Path, everything: bool = False) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        if not everything:
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".") and name not in LEFT_OUT and not Path(parent, name, "pyvenv.cfg").exists()
            ]
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*names, *linked):
            if everything or not name.startswith("."):
                yield Path(parent, name).relative_to(folder).as_posix()
