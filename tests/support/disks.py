"""Small disks, where they may be mounted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from needs import want


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    folder.mkdir()
    try:
        done = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        want(mounts="there is no mount command")
    if done.returncode:
        want(mounts=f"cannot mount a small disk here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)
