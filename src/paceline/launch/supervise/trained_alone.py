"""Were the processes of a run one training? Where each of them trained alone, that is said, and is a failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch.supervise import exit_note
from paceline.registry import ONE_PROCESS
from paceline.report.log import log

NOTES = "PACELINE_NOTES"  # a folder; `join` notes there, too
ALONE = "alone"
UNSTEPPED = "unstepped"  # they joined, and trained without; they have said so


class Notes:
    """A folder in which the processes of a run note whether they met others."""

    def __init__(self, folder: Path):
        self.folder = folder

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """What a process needs to be watched, beside what it is ``given``."""
        shutil.copyfile(exit_note.__file__, self.folder / "sitecustomize.py")
        paths = [str(self.folder), given.get("PYTHONPATH", "")]
        return {NOTES: str(self.folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def found(self, pids: Sequence[int]) -> str:
        """Of processes of this machine that all exited with 0: ALONE, UNSTEPPED, or empty."""
        if (self.folder / "unstepped").exists():
            return UNSTEPPED
        met = (self.folder / "met").exists() or not all((self.folder / f"alone-{pid}").exists() for pid in pids)
        return "" if met else ALONE


def not_training() -> None:
    """Called by a process that does not train, so that its run is not judged."""
    if folder := os.environ.get(NOTES):
        Path(folder, "met").touch()


def exit_code(found: str, num_processes: int) -> int:
    """The exit code of a run, by what was ``found`` on all its nodes. Prints one line for ALONE."""
    if found == ALONE:
        log.error(
            f"{num_processes} processes ran the script, and none joined the others (paceline.join, "
            f"torch.distributed or MPI): each did all of it alone. Call paceline.join and pace.step in the script, or "
            f"start one process: --plan {ONE_PROCESS}",
        )
    return 1 if found else 0
