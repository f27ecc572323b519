"""Were the processes of a run one training? Where each of them trained alone, that is said, and is a failure."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch import ended

NOTES = "PACELINE_NOTES"  # a folder; `join` notes there, too


class Notes:
    """A folder in which the processes of a run note whether they met others. ``num_processes``: of all nodes."""

    def __init__(self, folder: Path, num_processes: int):
        self.folder, self.num_processes = folder, num_processes

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """What a process needs to be watched, beside what it is ``given``."""
        shutil.copyfile(ended.__file__, self.folder / "sitecustomize.py")
        paths = [str(self.folder), given.get("PYTHONPATH", "")]
        return {NOTES: str(self.folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def code(self, pids: Sequence[int]) -> int:
        """Of a run whose processes all ended with 0."""
        if (self.folder / "unstepped").exists():
            return 1  # they have said so
        if (self.folder / "met").exists() or not all((self.folder / f"alone-{pid}").exists() for pid in pids):
            return 0
        print(
            f"paceline: {self.num_processes} processes ran the script, and none joined the others (paceline.join, "
            f"torch.distributed or MPI): each did all of it alone. Call paceline.join and pace.step in the script, or "
            f"start one process: --plan sequential or threads:k",
            file=sys.stderr,
        )
        return 1
