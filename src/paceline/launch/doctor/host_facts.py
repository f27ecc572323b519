"""Metadata that a host reports before a run starts there. Sent to it as source: it needs the standard library alone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import socket
from typing import Any

PACKAGES = ("paceline", "torch")


def collect(folder: str, paths: list[str], packages: list[str] | None = None) -> dict[str, Any]:
    """Whether the folder exists, what each path is (a file's hash, "folder", "not readable: ...", None), versions, the
    packages that are not installed, the address, and a free port.

    The address is the one at which ssh reached this host ("" outside ssh). The port is almost always still free when
    the first node starts; otherwise that node reports the error.
    """
    exists = os.path.isdir(folder)
    hashes: dict[str, str | None] = {}
    for path in paths:
        full = os.path.join(folder, path)
        if os.path.isfile(full):
            try:
                with open(full, "rb") as file:
                    hashes[path] = hashlib.sha256(file.read()).hexdigest()
            except OSError as error:
                hashes[path] = "not readable: " + str(error.strerror)
        else:
            hashes[path] = "folder" if os.path.isdir(full) else None
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    connection = os.environ.get("SSH_CONNECTION", "").split()
    address = connection[2] if len(connection) == 4 else ""
    lacks = [name for name in packages or () if importlib.util.find_spec(name) is None]
    return {"folder": exists, "paths": hashes, "versions": versions, "lacks": lacks, "address": address, "port": port}
