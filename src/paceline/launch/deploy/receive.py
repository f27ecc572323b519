"""Receiving end of `--send`: stores contents by hash, and lays out folders. Sent as source: standard library alone.

    files/HASH         a content, read-only, its time set to STAMP, which shows whether it was changed in place
    trees/HASH/        a folder laid out; HASH is that of trees/HASH.json, which lists its content
    lock               held while anything here changes, so that senders take turns

All of it is below ~/.cache/paceline/sent, readable by its owner alone. The protocol over stdin and stdout: the sender
lists the folders in a line of JSON; the receiver replies with the numbers of the missing contents; their bytes follow
without separators, since the sizes are known; the receiver replies with the paths of the folders, or with an error.
Nothing that arrives is executed.
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
TIMEOUT_S = 60  # for each PART bytes; then this process ends, and releases the lock
MAX_FOLDERS = 6  # folders that are kept, besides those in use
PART = 1 << 16
SPARE_BYTES = 16 << 20  # of the disk, left free


class Refused(Exception):
    """An error whose text is sent to the sender."""


def root() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "paceline", "sent")


def tree_hash(tree: dict[str, Any]) -> str:
    """The hash that names the folder of this tree."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def receive(source: BinaryIO, sink: BinaryIO, base: str) -> None:
    def reply(**fields: Any) -> None:
        sink.write(json.dumps(fields).encode() + b"\n")
        sink.flush()

    try:
        request = json.loads(_line(source))
        for tree in request["trees"]:
            _check_paths(tree)
        for name in ("files", "trees"):
            os.makedirs(os.path.join(base, name), mode=0o700, exist_ok=True)
        os.chmod(base, 0o700)
        with _lock(base, reply):
            _clear_parts(base)
            wanted = {hash_: size for tree in request["trees"] for _, hash_, size, _ in tree["files"]}
            contents, files = list(wanted.items()), os.path.join(base, "files")
            missing = [i for i, (name, size) in enumerate(contents) if not _is_intact(os.path.join(files, name), size)]
            _make_room(base, request["trees"], sum(contents[i][1] for i in missing))
            reply(missing=missing)
            for i in missing:
                _receive_file(source, base, *contents[i])
            folders = [_lay_out(base, tree) for tree in request["trees"]]
            sweep(base, [tree_hash(tree) for tree in request["trees"]])
        reply(folders=folders, home=os.path.expanduser("~"))
    except Refused as error:
        reply(error=str(error))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reply(error=f"no space is left for {base} there; free some, or set XDG_CACHE_HOME there to another disk")
        else:
            reply(error=f"the files that were sent cannot be stored in {base} there: {error}")


def _line(source: BinaryIO) -> bytes:
    """Reads a line in parts, each within TIMEOUT_S, since a list of a million files is long."""
    parts = [b""]
    while not parts[-1].endswith(b"\n"):
        signal.alarm(TIMEOUT_S)
        parts.append(source.readline(PART))
        signal.alarm(0)
        if not parts[-1]:
            break
    return b"".join(parts)


def _check_paths(tree: dict[str, Any]) -> None:
    """Raises Refused if a path or link leads out of the folder, or a hash is malformed."""
    for path, *_ in (*tree["files"], *tree["links"], *tree["mounts"]):
        if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise Refused(f"{path!r} is outside of the folder, and was not written")
    for path, target in tree["links"]:
        ends = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if target.startswith("/") or ends.split("/")[0] == "..":
            raise Refused(f"the link {path!r} points out of the folder, to {target!r}, and was not created")
    names = [hash_ for _, hash_, _, _ in tree["files"]] + [name for _, name in tree["mounts"]]
    if any(not name.isalnum() for name in names):
        raise Refused("a hash is malformed, and nothing was written")


@contextlib.contextmanager
def _lock(base: str, reply: Any) -> Iterator[None]:
    with open(os.path.join(base, "lock"), "a") as lock:
        reported_s = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - reported_s > 2.0:
                    reported_s = time.monotonic()
                    reply(waiting=True)
                time.sleep(0.05)
        yield


def _clear_parts(base: str) -> None:
    """Removes the partial files of interrupted transfers. The caller holds the lock."""
    for folder in ("files", "trees"):
        for name in os.listdir(os.path.join(base, folder)):
            path = os.path.join(base, folder, name)
            if name.startswith(".part") and os.path.isdir(path):
                shutil.rmtree(path)
            elif name.startswith(".part"):
                os.unlink(path)


def _is_intact(path: str, size: int) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size and found.st_mtime_ns == STAMP * 10**9


def _make_room(base: str, trees: list[dict[str, Any]], arriving: int) -> None:
    """Deletes all unused folders if the disk has too little space. Raises Refused if that does not suffice."""
    new = [tree for tree in trees if not os.path.isdir(os.path.join(base, "trees", tree_hash(tree)))]
    wanted = arriving + sum(size for tree in new if not tree["linked"] for _, _, size, _ in tree["files"])
    if wanted + SPARE_BYTES > shutil.disk_usage(base).free:
        sweep(base, [tree_hash(tree) for tree in trees], 0, {hash_ for tree in trees for _, hash_, *_ in tree["files"]})
    if wanted + SPARE_BYTES > (free := shutil.disk_usage(base).free):
        raise Refused(
            f"{wanted / 1e6:.1f} MB are needed in {base} there, and {free / 1e6:.1f} MB are free; free some, or set "
            f"XDG_CACHE_HOME there to another disk"
        )


def _receive_file(source: BinaryIO, base: str, hash_: str, size: int) -> None:
    """Receives one content, and stores it under its hash once it is complete and verified."""
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
        raise Refused("a file does not match its hash: it changed while it was sent, or on the network; start again")
    _move_into_place(part, os.path.join(base, "files", hash_), 0o444)


def _move_into_place(part: str, path: str, mode: int) -> None:
    os.chmod(part, mode)
    os.utime(part, (STAMP, STAMP))
    os.replace(part, path)


def _lay_out(base: str, tree: dict[str, Any]) -> str:
    """Lays out a folder and returns its path; in a folder that exists, replaces files that differ from those sent."""
    name = tree_hash(tree)
    folder, listing = (os.path.join(base, "trees", name + end) for end in ("", ".json"))
    current = folder if os.path.isdir(folder) else os.path.join(base, "trees", f".part{os.getpid()}")
    parents = {os.path.dirname(path) for path, *_ in (*tree["files"], *tree["links"], *tree["mounts"])}
    for parent in sorted(parents | {""}):
        full = os.path.join(current, parent)
        os.makedirs(full, exist_ok=True)
        if os.path.realpath(full) != os.path.normpath(os.path.join(os.path.realpath(current), parent)):
            raise Refused(f"{full} there is a link that leads elsewhere; remove it")
    for path, hash_, size, runs in tree["files"]:
        full, content = os.path.join(current, path), os.path.join(base, "files", hash_)
        if not _is_intact(full, size):
            part = os.path.join(base, "trees", f".part{os.getpid()}f")
            _copy(content, part, tree["linked"])
            if os.path.isdir(full) and not os.path.islink(full):
                raise Refused(f"{full} there is a folder, and a file of that name was sent; remove it")
            _move_into_place(part, full, 0o444 if tree["linked"] else 0o755 if runs else 0o644)
    for path, target in (*tree["links"], *((path, os.path.join(base, "trees", to)) for path, to in tree["mounts"])):
        full = os.path.join(current, path)
        if not (os.path.islink(full) and os.readlink(full) == target):
            if os.path.lexists(full):
                raise Refused(f"{full} there is not the link that was sent; remove it")
            os.symlink(target, full)
    if current != folder:
        os.rename(current, folder)
    if _read_listing(listing) != tree:
        with open(listing + ".part", "w") as file:
            json.dump(tree, file)
        os.replace(listing + ".part", listing)
    os.utime(listing)  # used now
    return folder


def _copy(content: str, part: str, linked: bool) -> None:
    """Copies a content; a ``linked`` one is a hard link, so that large data are stored once, if the disk allows it."""
    if linked:
        with contextlib.suppress(OSError):
            os.link(content, part)
            return
    shutil.copyfile(content, part)


@contextlib.contextmanager
def hold(folder: str) -> Iterator[None]:
    """Context in which `sweep` does not delete a folder that was laid out here; has no effect on other folders."""
    trees = os.path.join(root(), "trees")
    with contextlib.ExitStack() as held:
        names = [os.path.basename(folder)] if os.path.dirname(folder) == trees else []
        for name in names:
            file = held.enter_context(open(os.path.join(trees, name + ".json"), "rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            names += [to for _, to in json.load(file)["mounts"]]
        yield


def sweep(base: str, needed: list[str], max_kept: int = MAX_FOLDERS, arrived: Iterable[str] = ()) -> None:
    """Deletes all folders except the last ``max_kept``, those needed and those held; then contents in no folder.

    ``arrived``: contents of folders that are yet to be laid out. Files that a run wrote into a folder stay, and so do
    files that cannot be removed.
    """
    trees = os.path.join(base, "trees")
    names = [name[: -len(".json")] for name in os.listdir(trees) if name.endswith(".json")]
    names.sort(key=lambda name: os.stat(os.path.join(trees, name + ".json")).st_mtime_ns, reverse=True)
    used = set(arrived)
    for i, name in enumerate(names):
        tree = _read_listing(os.path.join(trees, name + ".json"))
        deleted = name not in needed and (i >= max_kept or not tree) and _delete_folder(os.path.join(trees, name), tree)
        used |= {hash_ for _, hash_, _, _ in tree["files"]} if tree and not deleted else set()
    for name in os.listdir(os.path.join(base, "files")):
        if name not in used:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(base, "files", name))


def _read_listing(path: str) -> dict[str, Any] | None:
    """The listing of a folder; None if it cannot be read, as after a power failure."""
    try:
        with open(path, "rb") as file:
            tree: dict[str, Any] = json.load(file)
        return tree
    except (OSError, ValueError):
        return None


def _delete_folder(folder: str, tree: dict[str, Any] | None) -> bool:
    """Deletes a folder's listing, and the files that it lists; returns False if the folder is held."""
    try:
        with open(folder + ".json", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if tree:
                _remove(folder, tree)
            os.unlink(folder + ".json")
    except OSError:
        return False
    return True


def _remove(folder: str, tree: dict[str, Any]) -> None:
    for path, _, size, _ in tree["files"]:
        if _is_intact(os.path.join(folder, path), size):
            os.unlink(os.path.join(folder, path))
    for path, _ in (*tree["links"], *tree["mounts"]):
        if os.path.islink(os.path.join(folder, path)):
            os.unlink(os.path.join(folder, path))
    for parent, _, names in os.walk(folder, topdown=False):
        if os.path.basename(parent) == "__pycache__":
            for name in names:
                os.unlink(os.path.join(parent, name))
        with contextlib.suppress(OSError):
            os.rmdir(parent)


if __name__ == "__main__":
    receive(sys.stdin.buffer, sys.stdout.buffer, root())
