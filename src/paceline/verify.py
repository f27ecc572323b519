"""N nodes against one process: both run the user's script for a few steps from the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch import local
from paceline.probe.witness import Comparison, compare

LIMIT_S = 600.0


def verify(command: Sequence[str], steps: int, nodes: int, engine: str, dtype: str) -> Comparison | None:
    """None on a launcher's ranks other than 0. Raises ValueError when a run failed, or was too short."""
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    if nodes < 1:
        raise ValueError(f"--nodes must be at least 1, got {nodes}")
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        many, one = Path(folder) / "many", Path(folder) / "one"
        if "RANK" in os.environ:
            code = subprocess.run(
                command, env=_environment(many, steps, dtype), check=False, timeout=LIMIT_S
            ).returncode
            if os.environ["RANK"] != "0":
                if code:
                    raise ValueError(f"verify: the script failed on rank {os.environ['RANK']} (exit code {code})")
                return None
        else:
            code = local.start(command, engine, nodes, _environment(many, steps, dtype))
        _demand(many, code, steps, "on all nodes")
        alone = _environment(one, steps, dtype, many / "first.safetensors", without_launcher=True)
        code = subprocess.run(command, env=alone, check=False, timeout=LIMIT_S).returncode
        _demand(one, code, steps, "in one process")
        return compare(many, one, dtype)


def _demand(folder: Path, code: int, steps: int, where: str) -> None:
    if not (folder / "last.safetensors").exists():
        raise ValueError(
            f"verify: the script ended {where} (exit code {code}) before step {steps}; it must call pace.step at "
            f"least that often: give fewer --steps, or mend the error above"
        )


def _environment(
    folder: Path, steps: int, dtype: str, start: Path | None = None, without_launcher: bool = False
) -> Mapping[str, str]:
    said = {"folder": str(folder), "steps": steps, "dtype": dtype, "start": str(start or "")}
    environment = {**os.environ, "PACELINE_VERIFY": json.dumps(said)}
    if without_launcher:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            environment.pop(name, None)
        environment["PACELINE_ENGINE"] = "sequential"
    return environment
