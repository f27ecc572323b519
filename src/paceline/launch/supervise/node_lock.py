"""Lock per host on one node of a run: a launcher that starts it again finds the one that still trains there.

Its launcher may have lost its line alone. A file per run and node is locked while the node runs; it says which process
that is, in which start of the run, and how it ended.
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

GRACE_S = 20.0  # for a node of an earlier start of the run, before it is killed
POLL_S = 0.1


class NodeLock:
    """``run``: the same for all starts; ``turn``: the number of this one."""

    def __init__(self, run: str, node: int, turn: int):
        self.path = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-{run}-{node}"
        self.turn = turn
        # nobody else's link is followed, and nobody else may write there
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(self._file).st_uid != os.getuid():
            raise OSError(f"{self.path} is another user's")

    def free(self) -> bool:
        """Whether it is this one's from now on."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def said(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._file, 1 << 12, 0))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, **facts: Any) -> None:
        words = json.dumps({"pid": os.getpid(), "turn": self.turn, **facts}).encode()
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, words, 0)

    def wait(
        self, asked: Callable[[], Sequence[int]], tell: Callable[[dict[str, Any]], None] | None = None
    ) -> int | None:
        """Until nobody is there. Returns the exit code of who was, in this start of the run; None: it left none.

        ``asked``: signals for it. One of an earlier start is ended. ``tell``: is given the state of who is there.
        """
        ends, end, told, state = [signal.SIGTERM, signal.SIGKILL], 0.0, False, None
        while not self.free():
            said = self.said()
            now = {"state": HOLDS, "members": said.get("members", [])}  # as far as is known here
            if tell and now != state:
                tell(now)
                state = now
            found, pid = said.get("turn") == self.turn, said.get("pid")
            numbers = list(asked())
            if signal.SIGHUP in numbers:
                return 1  # its own launcher is gone, too; who is there trains on
            numbers = [number or signal.SIGTERM for number in numbers if number or not told]
            told |= bool(numbers)  # a second signal would cut its saving short
            if not found and ends and time.monotonic() > end:
                numbers.append(ends.pop(0))
                end = time.monotonic() + GRACE_S
            if isinstance(pid, int) and pid > 1:
                with contextlib.suppress(ProcessLookupError):
                    for number in numbers:
                        os.kill(pid, number)
            time.sleep(POLL_S)
        said = self.said()
        code = said.get("code")
        return code if said.get("turn") == self.turn and isinstance(code, int) else None

    @contextlib.contextmanager
    def taken(self) -> Iterator[Callable[[int, bool], None]]:
        """This one is there; what is given is called with its exit code, and whether its launcher hears that."""

        def done(code: int, heard: bool) -> None:
            self.write(code=code)
            if heard:
                self.path.unlink(missing_ok=True)

        self.write()
        try:
            yield done
        finally:
            os.close(self._file)
