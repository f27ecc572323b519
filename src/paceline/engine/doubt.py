"""A process of this node that is waited for: it may compute for long, and if it is stopped that is told at once."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from pathlib import Path

from paceline.whereabouts import Whereabouts


class Doubt:
    """Of the process ``rank`` of a node, whose others have the process ids ``pids``. ``tells``: of long waits."""

    def __init__(self, rank: int, pids: dict[int, int], patience_s: float):
        self.rank, self.pids, self.patience_s = rank, pids, patience_s
        self.whereabouts, self.tells = Whereabouts(), rank == 0
        self._stopped: dict[int, float] = {}  # since when
        self._late: dict[int, float] = {}  # since when those were waited for of whom people have been told

    def about(self, peer: int, doing: str, waited_s: float) -> str:
        """Why nothing can be hoped for any more from ``peer``, which has been waited for; empty where something can."""
        now, pid, limit_s = time.monotonic(), self.pids[peer], self.whereabouts.limit_s
        if waited_s > self.patience_s:
            return f"it said nothing for {waited_s:.0f} s"
        if (seen := state(pid)) != "T":
            self._stopped.pop(peer, None)
            if self.tells and waited_s > limit_s and self._late.get(peer, -math.inf) < now - waited_s:
                self._late[peer] = now
                self.whereabouts.notice(
                    f"local rank {self.rank} on {self.whereabouts.host} at step {self.whereabouts.step} has waited "
                    f"{waited_s:.0f} s, {doing}, for local rank {peer} (pid {pid}, state {seen or 'unknown'})\n"
                    f"{self.whereabouts.siblings()}".rstrip()
                )
            return ""
        if peer not in self._stopped:
            self._stopped[peer] = now
            self.whereabouts.notice(
                f"local rank {self.rank} on {self.whereabouts.host} waits, {doing}, for local rank {peer}, which is "
                f"stopped (state T); kill -CONT {pid} lets it go on, and in {limit_s:.0f} s this node gives up"
            )
        stopped_s = now - self._stopped[peer]
        return f"its process {pid} has been stopped (state T) for {stopped_s:.0f} s" if stopped_s > limit_s else ""


def state(pid: int) -> str:
    """R, S, T and so on, as the kernel calls it; empty where it does not tell."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def other_end(line: socket.socket) -> tuple[int, int]:
    """(process id, user id) of whoever holds the other end of a local line."""
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)
