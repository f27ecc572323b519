"""What a host writes, in whole lines, each with the host's name before it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any, BinaryIO

MOST = 2000  # bytes of `last`
LONGEST = 64 << 20  # of a line, which then is cut
BAR_S = 1.0  # between two states of a progress bar that are shown
# sequences that begin with an escape, whole, and every other character that is a control, but tabs and ends of lines
CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def shown(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours, title or clipboard: hosts wrote some of it."""
    return CONTROLS.sub("", text)


class Lines:
    """From a file descriptor to a file; ``last`` is how the last line that says something begins.

    With ``result``, a last line that is a JSON object goes there instead, without a name. Where a line ends with
    ``mark``, that is left out, and `marked` from then on. ``unheard``: nobody reads the file, which leads nowhere now.
    What stands in a line between ``says`` and the first byte of that is JSON for ``hear``, and left out as well.
    """

    says = b""
    hear: Callable[[Any], None]

    def __init__(self, name: str, source: int, out: BinaryIO, result: BinaryIO | None = None, mark: bytes = b""):
        self.last, self.marked, self._mark = "", not mark, mark
        self._head, self._source, self._out, self._rest = f"[{name}] ".encode(), source, out, bytearray()
        self._result, self._held = result, list[bytes]()
        self.unheard, self._drawn_s = False, -math.inf

    def pass_on(self) -> bool:
        """Reads once. False at the end, when a line without an end gets one."""
        data = os.read(self._source, 1 << 16)
        first, end, others = data.partition(b"\n")
        self._rest += first  # a line that has not ended yet is not searched again with each part of it that comes
        if end or len(self._rest) > LONGEST or (not data and self._rest):
            *lines, rest = bytes(self._rest), *others.split(b"\n")
            lines = lines if self.marked else self._unmarked(lines)
            lines = self._heard(lines) if self.says else lines
            self._rest = bytearray(rest)
            telling = next((line for line in reversed(lines) if line.strip()), None)
            if telling is not None:
                self.last = telling[:MOST].decode(errors="replace")
            if lines:
                self._write(lines)
        elif b"\r" in first and self.marked and time.monotonic() - self._drawn_s > BAR_S:
            self._draw()
        if not data:
            self._finish()
        return bool(data)

    def _draw(self) -> None:
        """A bar says each of its states after a return, and ends no line: the last whole one as a line of its own."""
        self._drawn_s = time.monotonic()
        cut = self._rest.rfind(b"\r", 0, -1)  # the end of a line may follow the last byte
        whole = next((state for state in reversed(self._rest[: max(0, cut)].split(b"\r")) if state.strip()), None)
        if whole:
            del self._rest[: cut + 1]
            self._write([bytes(whole)])

    def _unmarked(self, lines: list[bytes]) -> list[bytes]:
        """What a login says without an end may stand before the mark."""
        found = next((i for i, line in enumerate(lines) if line.endswith(self._mark)), None)
        if found is None:
            return lines
        self.marked = True
        before = lines[found].removesuffix(self._mark)
        return [*lines[:found], *([before] if before else []), *lines[found + 1 :]]

    def _heard(self, lines: list[bytes]) -> list[bytes]:
        """What a script writes without an end may stand before."""
        left = []
        for line in lines:
            before, sign, said = line.partition(self.says)
            words, end, _ = said.partition(self.says[:1])
            if sign and end:
                with contextlib.suppress(ValueError):
                    self.hear(json.loads(words))
            if before or not (sign and end):
                left.append(before if end else line)
        return left

    def _write(self, lines: list[bytes]) -> None:
        if self._result:
            lines = self._held + lines
            self._held = [lines.pop()]
        try:
            self._out.write(b"".join(self._head + line + b"\n" for line in lines))
            self._out.flush()
        except BrokenPipeError:
            self.unheard = True
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())

    def _finish(self) -> None:
        result, self._result = self._result, None
        if result and self._held and self._held[0].startswith(b"{") and self._held[0].rstrip().endswith(b"}"):
            result.write(self._held[0] + b"\n")
            result.flush()
        else:
            self._write(self._held)
        self._held = []
