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


def begin(*words: Any, cwd: Path | None = None, own_session: bool = False, **more: str) -> subprocess.Popen[str]:
    """The command `paceline`, for `finish`."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, words)],
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=own_session,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What it said on stdout and stderr until its end, which must be with this exit code."""
    try:
        output, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, output + errors
    return output, errors
