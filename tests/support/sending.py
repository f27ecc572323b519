"""A working tree to be sent, and the far end of sending as a function."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

from paceline.launch.deploy import receive

SHA = hashlib.sha256(b"x").hexdigest()


def lay(folder: Path) -> Path:
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("import package.words\nprint(package.words.SAID)\n")
    (folder / "package" / "words.py").write_text("SAID = 'as sent'\n")
    (folder / "package" / "empty").touch()
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "short").symlink_to("package/words.py")
    return folder


def ask(base, trees, rest=b""):
    """What the far end says."""
    Path(base).mkdir(parents=True, exist_ok=True)
    sink = io.BytesIO()
    receive.receive(io.BytesIO(json.dumps({"trees": trees}).encode() + b"\n" + rest), sink, str(base))
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def tree(files=(), links=(), mounts=()):
    return {"linked": False, "files": list(files), "links": list(links), "mounts": list(mounts)}
