"""Scripts of the tests, started as a user's would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START = (
    "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[3:], sys.argv[1], int(sys.argv[2])))"
)


def command(script: str, *arguments: Any, engine: str, num_nodes: int = 1, strict: bool = False) -> list[str]:
    path = script if Path(script).is_absolute() else str(HERE / "scripts" / script)
    run = [sys.executable, "-W", "error" if strict else "ignore", path, *map(str, arguments)]
    return [sys.executable, "-c", START, engine, str(num_nodes), *run]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **more}


def launch(
    script: str, *arguments: Any, engine: str, num_nodes: int = 1, code: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Waits for the end, which must be with exit code ``code``; on success, a warning is an error."""
    done = subprocess.run(
        command(script, *arguments, engine=engine, num_nodes=num_nodes, strict=code == 0),
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
