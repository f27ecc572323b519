"""Lock of one node of a run on its host: a launcher that restarts the node finds the one that still trains there.

Perhaps only the connection to its launcher has failed. A file per run and node is locked while the node
runs. It holds the agent's process id, the number of the run's start, and at the end the exit code.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.supervise.local_nodes import HOLDS

GRACE_S = 20.0  # between SIGTERM and SIGKILL to a node of an earlier start of the run
POLL_S = 0.1


class NodeLock:
    """``run``: the id that all starts of the run share; ``turn``: the number of this start."""

    def __init__(self, run: str, node: int, turn: int):
        self.path = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{run}-{node}"
        self.turn = turn
        # another user's symbolic link is not followed, and no other user may write the file
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(self._file).st_uid != os.getuid():
            raise OSError(f"{self.path} is another user's")

    def try_lock(self) -> bool:
        """Whether this process has acquired the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def read(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._file, 1 << 12, 0))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, **values: Any) -> None:
        data = json.dumps({"pid": os.getpid(), "turn": self.turn, **values}).encode()
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, data, 0)

    def wait(
        self, requests: Callable[[], Sequence[int]], report: Callable[[dict[str, Any]], None] | None = None
    ) -> int | None:
        """Waits for the lock. Returns the exit code that a holder of this start of the run left; None: there is none.

        ``requests``: signals to pass on to the holder; ``report``: gets its state. An earlier start's holder is ended.
        """
        kills, kill_s, signalled, state = [signal.SIGTERM, signal.SIGKILL], 0.0, False, None
        while not self.try_lock():
            content = self.read()
            current = {"state": HOLDS, "members": content.get("members", [])}  # the last that the file says
            if report and current != state:
                report(current)
                state = current
            same_start, pid = content.get("turn") == self.turn, content.get("pid")
            numbers = list(requests())
            if signal.SIGHUP in numbers:
                return 1  # this agent's launcher has ended as well; the holder continues to train
            numbers = [number or signal.SIGTERM for number in numbers if number or not signalled]
            signalled |= bool(numbers)  # a second signal would interrupt the holder while it saves
            if not same_start and kills and time.monotonic() > kill_s:
                numbers.append(kills.pop(0))
                kill_s = time.monotonic() + GRACE_S
            if isinstance(pid, int) and pid > 1:
                with contextlib.suppress(ProcessLookupError):
                    for number in numbers:
                        os.kill(pid, number)
            time.sleep(POLL_S)
        content = self.read()
        code = content.get("code")
        return code if content.get("turn") == self.turn and isinstance(code, int) else None

    @contextlib.contextmanager
    def hold(self) -> Iterator[Callable[[int, bool], None]]:
        """Notes this process in the file. Yields a function of the exit code and whether the launcher received it."""

        def done(code: int, reported: bool) -> None:
            self.write(code=code)
            if reported:
                self.path.unlink(missing_ok=True)

        self.write()
        try:
            yield done
        finally:
            os.close(self._file)
