"""Commands under a real mpirun, all on this machine; the benchmarks' own, and where the scripts lie."""

from __future__ import annotations

from pathlib import Path

from paceline_bench.cluster.mpirun import command, end, over, unavailable

__all__ = ["SCRIPTS", "command", "end", "over", "unavailable"]
SCRIPTS = Path(__file__).parent / "scripts"
