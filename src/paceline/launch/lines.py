"""What a host writes, in whole lines, each with the host's name before it."""

from __future__ import annotations

import os
from typing import BinaryIO


class Lines:
    """From a file descriptor to a file; ``last`` is the last line that says something."""

    def __init__(self, name: str, source: int, out: BinaryIO):
        self.last = ""
        self._head, self._source, self._out, self._rest = f"[{name}] ".encode(), source, out, b""

    def pass_on(self) -> bool:
        """Reads once. False at the end, when a line without an end gets one."""
        data = os.read(self._source, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        if lines:
            self._out.write(b"".join(self._head + line + b"\n" for line in lines))
            self._out.flush()
            self.last = next((line.decode(errors="replace") for line in reversed(lines) if line.strip()), self.last)
        return bool(data)
