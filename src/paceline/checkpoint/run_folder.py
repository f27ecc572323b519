"""Files of one process in the run's folder: its lock, the event log, and the machine's resource usage."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.run_lock import acquire
from paceline.errors import CheckpointError
from paceline.report.log import log
from paceline.report.record import Record

if TYPE_CHECKING:
    from paceline.report.usage import Usage


class RunFolder:
    """The folder of a run; where ``path`` is None, nothing is written."""

    def __init__(self, path: Path | None, record: Record):
        self.path, self.record = path, record
        self._lock: int | None = None
        self._usage: Usage | None = None

    def open(self) -> None:
        """Locks the folder and opens the event log. Raises CheckpointError."""
        if self.path is None:
            return
        try:
            self._lock = acquire(self.path)
            self.record.open(self.path)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"the run's folder {self.path} cannot be written on {socket.gethostname()} "
                f"({error.strerror or error}); give another: --out, PACELINE_FOLDER, or join(folder=)"
            ) from error

    def take_over(self) -> None:
        """The new leader writes the folder. The failed leader may only be suspended, and may have used another one."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self._lock = acquire(self.path)
        try:
            self.record.open(self.path)
        except OSError as error:
            log.warning(
                f"{self.path} cannot be written here ({error.strerror or error}): training continues without an event "
                f"log, and the next checkpoint will fail; give every node write access to this folder"
            )
            return
        self.measure()

    def measure(self) -> None:
        """Starts recording the use of processors, memory and network in the event log."""
        if self.record.folder and not self._usage:
            from paceline.report.usage import Usage

            self._usage = Usage(self.record).start()

    def close(self, reason: str) -> None:
        if self._usage:
            self._usage.stop()
        self.record.write("end", reason=reason)
        self.record.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
