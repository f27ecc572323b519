"""Detects processes that each trained alone instead of together, which makes the run a failure."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch.supervise import exit_note
from paceline.registry import ONE_PROCESS
from paceline.report.log import log

NOTES = "PACELINE_NOTES"  # the folder of `Notes`; paceline.join writes there, too
ALONE = "alone"
UNSTEPPED = "unstepped"  # processes joined, but trained without paceline; each has logged it


class Notes:
    """Folder in which the processes of a run note whether they joined other processes."""

    def __init__(self, folder: Path):
        self.folder = folder

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The variables that make a process write notes; ``given``: its other variables."""
        shutil.copyfile(exit_note.__file__, self.folder / "sitecustomize.py")
        paths = [str(self.folder), given.get("PYTHONPATH", "")]
        return {NOTES: str(self.folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def found(self, pids: Sequence[int]) -> str:
        """What the processes on this machine, which all exited with 0, noted: ALONE, UNSTEPPED, or empty."""
        if (self.folder / UNSTEPPED).exists():
            return UNSTEPPED
        met = (self.folder / "met").exists() or not all((self.folder / f"alone-{pid}").exists() for pid in pids)
        return "" if met else ALONE


def note(what: str) -> None:
    """Notes UNSTEPPED or "met", also from a process that does not train; the launcher reads it after all have ended."""
    if folder := os.environ.get(NOTES):
        with contextlib.suppress(OSError):
            Path(folder, what).touch()


def unstepped_text(num_own: int, num_processes: int) -> str:
    """The error for a script that joined but made ``num_own`` optimizer steps of its own; empty if it made none."""
    if not num_own:
        return ""
    return (
        f"joined, but never stepped: the optimizer made {num_own} steps of the script's own, and "
        f"{num_processes} processes each trained alone; call pace.step(batch), or pace.backward(loss) and "
        f"pace.update(), in place of loss.backward() and optimizer.step()"
    )


def exit_code(found: str, num_processes: int) -> int:
    """The exit code of a run, by what was ``found`` on all its nodes. Prints one line for ALONE."""
    if found == ALONE:
        log.error(
            f"{num_processes} processes ran the script, and none joined the others (paceline.join, "
            f"torch.distributed or MPI): each trained alone. Call paceline.join and pace.step in the script, or "
            f"start one process: --plan {ONE_PROCESS}"
        )
    return 1 if found else 0
