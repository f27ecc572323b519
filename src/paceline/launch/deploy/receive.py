"""Receiving end of `--send`: keeps contents by hash, and lays out folders. Sent over as source: Python alone.

    files/HASH         a content, read-only, its time set to STAMP: what was changed in place no longer counts
    trees/HASH/        a folder laid out; HASH is that of trees/HASH.json, which says what is in it
    lock               held while anything here changes: those who send take turns

All below ~/.cache/paceline/sent, for its owner alone. The talk over stdin and stdout: a line of JSON asks for folders;
a line says which contents are missing, by number; these follow as they are, one after the other, since their sizes are
known; a line says where the folders are, or what stood in the way. Nothing that arrives is evaluated.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

STAMP = 1_000_000_000  # seconds
TIMEOUT_S = 60  # without a byte; then the sender is gone, and the lock with this process
KEPT = 6  # folders that stay; what is in use stays besides
PART = 1 << 16  # what TIMEOUT_S is for
SPARE_BYTES = 16 << 20  # of a disk


class Refused(Exception):
    """The error that is sent to the sender."""


def root() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "paceline", "sent")


def mark(tree: dict[str, Any]) -> str:
    """The name of a folder that holds this."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def receive(source: BinaryIO, sink: BinaryIO, base: str) -> None:
    def say(**what: Any) -> None:
        sink.write(json.dumps(what).encode() + b"\n")
        sink.flush()

    try:
        asked = json.loads(_line(source))
        for tree in asked["trees"]:
            _check(tree)
        for name in ("files", "trees"):
            os.makedirs(os.path.join(base, name), mode=0o700, exist_ok=True)
        os.chmod(base, 0o700)
        with _alone(base, say):
            _clear_parts(base)
            wanted = {hash_: size for tree in asked["trees"] for _, hash_, size, _ in tree["files"]}
            contents, files = list(wanted.items()), os.path.join(base, "files")
            missing = [i for i, (name, size) in enumerate(contents) if not _right(os.path.join(files, name), size)]
            _room(base, asked["trees"], sum(contents[i][1] for i in missing))
            say(missing=missing)
            for i in missing:
                _keep(source, base, *contents[i])
            folders = [_lay(base, tree) for tree in asked["trees"]]
            sweep(base, [mark(tree) for tree in asked["trees"]])
        say(folders=folders, home=os.path.expanduser("~"))
    except Refused as error:
        say(error=str(error))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(error=f"no space is left for {base} there; free some, or point XDG_CACHE_HOME there elsewhere")
        else:
            say(error=f"what was sent cannot be kept in {base} there: {error}")


def _line(source: BinaryIO) -> bytes:
    """In parts: a list of a million files is long, too."""
    parts = [b""]
    while not parts[-1].endswith(b"\n"):
        signal.alarm(TIMEOUT_S)
        parts.append(source.readline(PART))
        signal.alarm(0)
        if not parts[-1]:
            break
    return b"".join(parts)


def _check(tree: dict[str, Any]) -> None:
    """Nothing leads out of the folder."""
    for path, *_ in (*tree["files"], *tree["links"], *tree["mounts"]):
        if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise Refused(f"{path!r} is outside of the folder, and was not written")
    for path, target in tree["links"]:
        ends = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if target.startswith("/") or ends.split("/")[0] == "..":
            raise Refused(f"the link {path!r} points out of the folder, to {target!r}, and was not made")
    names = [hash_ for _, hash_, _, _ in tree["files"]] + [name for _, name in tree["mounts"]]
    if any(not name.isalnum() for name in names):
        raise Refused("a hash is none, and nothing was written")


@contextlib.contextmanager
def _alone(base: str, say: Any) -> Iterator[None]:
    with open(os.path.join(base, "lock"), "a") as lock:
        said = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - said > 2.0:
                    said = time.monotonic()
                    say(waiting=True)
                time.sleep(0.05)
        yield


def _clear_parts(base: str) -> None:
    """Of those who were cut off; nobody else is at work."""
    for folder in ("files", "trees"):
        for name in os.listdir(os.path.join(base, folder)):
            path = os.path.join(base, folder, name)
            if name.startswith(".part") and os.path.isdir(path):
                shutil.rmtree(path)
            elif name.startswith(".part"):
                os.unlink(path)


def _right(path: str, size: int) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size and found.st_mtime_ns == STAMP * 10**9


def _room(base: str, trees: list[dict[str, Any]], arriving: int) -> None:
    """Where there is too little, all folders that nobody needs go first."""
    new = [tree for tree in trees if not os.path.isdir(os.path.join(base, "trees", mark(tree)))]
    wanted = arriving + sum(size for tree in new if not tree["linked"] for _, _, size, _ in tree["files"])
    if wanted + SPARE_BYTES > shutil.disk_usage(base).free:
        sweep(base, [mark(tree) for tree in trees], 0, {hash_ for tree in trees for _, hash_, *_ in tree["files"]})
    if wanted + SPARE_BYTES > (free := shutil.disk_usage(base).free):
        raise Refused(
            f"{wanted / 1e6:.1f} MB are needed in {base} there, and {free / 1e6:.1f} MB are free; free some, or point "
            f"XDG_CACHE_HOME there elsewhere"
        )


def _keep(source: BinaryIO, base: str, hash_: str, size: int) -> None:
    """One content as it comes, under its name when all of it is there and right."""
    part, found, left = os.path.join(base, "files", f".part{os.getpid()}"), hashlib.sha256(), size
    with open(part, "wb") as file:
        while left:
            signal.alarm(TIMEOUT_S)
            data = source.read(min(PART, left))
            signal.alarm(0)
            if not data:
                raise Refused("the connection ended before everything had arrived")
            file.write(data)
            found.update(data)
            left -= len(data)
    if found.hexdigest() != hash_:
        raise Refused("a file arrived other than it was announced: it changed meanwhile, or on its way; start again")
    _finish(part, os.path.join(base, "files", hash_), 0o444)


def _finish(part: str, path: str, mode: int) -> None:
    os.chmod(part, mode)
    os.utime(part, (STAMP, STAMP))
    os.replace(part, path)


def _lay(base: str, tree: dict[str, Any]) -> str:
    """The folder; one that is there already is mended where it is not as it was sent."""
    name = mark(tree)
    folder, said = (os.path.join(base, "trees", name + end) for end in ("", ".json"))
    here = folder if os.path.isdir(folder) else os.path.join(base, "trees", f".part{os.getpid()}")
    below_all = {os.path.dirname(path) for path, *_ in (*tree["files"], *tree["links"], *tree["mounts"])}
    for below in sorted(below_all | {""}):
        full = os.path.join(here, below)
        os.makedirs(full, exist_ok=True)
        if os.path.realpath(full) != os.path.normpath(os.path.join(os.path.realpath(here), below)):
            raise Refused(f"{full} there is a link that leads elsewhere; remove it")
    for path, hash_, size, runs in tree["files"]:
        full, content = os.path.join(here, path), os.path.join(base, "files", hash_)
        if not _right(full, size):
            part = os.path.join(base, "trees", f".part{os.getpid()}f")
            _copy(content, part, tree["linked"])
            if os.path.isdir(full) and not os.path.islink(full):
                raise Refused(f"{full} there is a folder, and a file of that name was sent; remove it")
            _finish(part, full, 0o444 if tree["linked"] else 0o755 if runs else 0o644)
    for path, target in (*tree["links"], *((path, os.path.join(base, "trees", to)) for path, to in tree["mounts"])):
        full = os.path.join(here, path)
        if not (os.path.islink(full) and os.readlink(full) == target):
            if os.path.lexists(full):
                raise Refused(f"{full} there is not the link that was sent; remove it")
            os.symlink(target, full)
    if here != folder:
        os.rename(here, folder)
    if _said(said) != tree:
        with open(said + ".part", "w") as file:
            json.dump(tree, file)
        os.replace(said + ".part", said)
    os.utime(said)  # used now
    return folder


def _copy(content: str, part: str, linked: bool) -> None:
    """Large data are there once; a file system that cannot link, or has linked enough, copies."""
    if linked:
        with contextlib.suppress(OSError):
            os.link(content, part)
            return
    shutil.copyfile(content, part)


@contextlib.contextmanager
def hold(folder: str) -> Iterator[None]:
    """While this is entered, a folder that was laid out here is not swept away. Other folders are not concerned."""
    trees = os.path.join(root(), "trees")
    with contextlib.ExitStack() as held:
        names = [os.path.basename(folder)] if os.path.dirname(folder) == trees else []
        for name in names:
            file = held.enter_context(open(os.path.join(trees, name + ".json"), "rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            names += [to for _, to in json.load(file)["mounts"]]
        yield


def sweep(base: str, needed: list[str], kept: int = KEPT, arrived: Iterable[str] = ()) -> None:
    """Forgets all folders but the last few, those needed and those held; then the contents that no folder has.

    ``arrived``: contents of folders that are yet to be laid out. What a run itself wrote into a folder is not ours, and
    stays; so does what cannot be removed.
    """
    trees = os.path.join(base, "trees")
    names = [name[: -len(".json")] for name in os.listdir(trees) if name.endswith(".json")]
    names.sort(key=lambda name: os.stat(os.path.join(trees, name + ".json")).st_mtime_ns, reverse=True)
    used = set(arrived)
    for i, name in enumerate(names):
        tree = _said(os.path.join(trees, name + ".json"))
        gone = name not in needed and (i >= kept or not tree) and _forget(os.path.join(trees, name), tree)
        used |= {hash_ for _, hash_, _, _ in tree["files"]} if tree and not gone else set()
    for name in os.listdir(os.path.join(base, "files")):
        if name not in used:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(base, "files", name))


def _said(path: str) -> dict[str, Any] | None:
    """What is in a folder; None where that cannot be read, as after a machine stopped."""
    try:
        with open(path, "rb") as file:
            tree: dict[str, Any] = json.load(file)
        return tree
    except (OSError, ValueError):
        return None


def _forget(folder: str, tree: dict[str, Any] | None) -> bool:
    """Whether it could be: not while it is held. Of a folder without a tree nobody knows what in it is ours."""
    try:
        with open(folder + ".json", "rb") as said:
            fcntl.flock(said, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if tree:
                _remove(folder, tree)
            os.unlink(folder + ".json")
    except OSError:
        return False
    return True


def _remove(folder: str, tree: dict[str, Any]) -> None:
    for path, _, size, _ in tree["files"]:
        if _right(os.path.join(folder, path), size):
            os.unlink(os.path.join(folder, path))
    for path, _ in (*tree["links"], *tree["mounts"]):
        if os.path.islink(os.path.join(folder, path)):
            os.unlink(os.path.join(folder, path))
    for here, _, names in os.walk(folder, topdown=False):
        if os.path.basename(here) == "__pycache__":
            for name in names:
                os.unlink(os.path.join(here, name))
        with contextlib.suppress(OSError):
            os.rmdir(here)


if __name__ == "__main__":
    receive(sys.stdin.buffer, sys.stdout.buffer, root())
