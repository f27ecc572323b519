"""Files of one process in the run's folder: its lock, the event log, and the machine's resource usage."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.run_lock import claim
from paceline.errors import CheckpointError
from paceline.report.log import log
from paceline.report.record import Record

if TYPE_CHECKING:
    from paceline.report.usage import Usage


class RunFolder:
    """Without ``path`` nothing is written."""

    def __init__(self, path: Path | None, record: Record):
        self.path, self.record = path, record
        self._claim: int | None = None
        self._usage: Usage | None = None

    def open(self) -> None:
        """Raises CheckpointError."""
        if self.path is None:
            return
        try:
            self._claim = claim(self.path)
            self.record.open(self.path)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"the run's folder {self.path} cannot be written on {socket.gethostname()} "
                f"({error.strerror or error}); give another: --out, PACELINE_FOLDER, or join(folder=)"
            ) from error

    def take_over(self) -> None:
        """Whoever wrote there is lost, and may only be stopped, or may have had a folder of its own."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self._claim = claim(self.path)
        try:
            self.record.open(self.path)
        except OSError as error:
            log.warning(
                f"{self.path} cannot be written here ({error.strerror or error}): training continues without a record, "
                f"until it is to be saved; let every node write there"
            )
            return
        self.measure()

    def measure(self) -> None:
        """From now on processors, memory and network are in the record."""
        if self.record.folder and not self._usage:
            from paceline.report.usage import Usage

            self._usage = Usage(self.record).start()

    def close(self, reason: str) -> None:
        if self._usage:
            self._usage.stop()
        self.record.write("end", reason=reason)
        self.record.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None
