"""Facts that a host reports before anything starts there. Sent over as source: it needs nothing but Python."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import socket
from typing import Any

PACKAGES = ("paceline", "torch")


def tell(folder: str, paths: list[str], packages: list[str] | None = None) -> dict[str, Any]:
    """Is the folder there, what is at each path (a file's hash, "folder", "not readable: ...", None), versions, which
    of the packages it lacks, address, a free port.

    The address is the one that ssh reached this host by ("" outside ssh). A port found free now is nearly always free
    when the first node has started, and what takes it in between is told by that node.
    """
    there = os.path.isdir(folder)
    found: dict[str, str | None] = {}
    for path in paths:
        full = os.path.join(folder, path)
        if os.path.isfile(full):
            try:
                with open(full, "rb") as file:
                    found[path] = hashlib.sha256(file.read()).hexdigest()
            except OSError as error:
                found[path] = "not readable: " + str(error.strerror)
        else:
            found[path] = "folder" if os.path.isdir(full) else None
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
    return {"folder": there, "paths": found, "versions": versions, "lacks": lacks, "address": address, "port": port}
