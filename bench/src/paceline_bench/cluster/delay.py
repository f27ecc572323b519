"""Cables that are late: what enters at one end leaves the other so many seconds after, in the order of entering.

    python -I delay.py SECONDS DESCRIPTOR DESCRIPTOR [DESCRIPTOR DESCRIPTOR ...]

The two ends of a cable are TAP devices, and this file, run by itself, is the process that carries frames between each
two descriptors until its stdin ends; the devices go with it. For kernels without netem. Frames are as large as those of
a veth, since they travel with the word on how to cut and sum them (virtio's header), which nobody here reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

CLONE = "/dev/net/tun"
SET_DEVICE, SET_OFFLOAD = 0x400454CA, 0x400454D0
TAP, PLAIN, WITH_HEADER = 0x0002, 0x1000, 0x4000
SUMS_AND_LARGE_FRAMES = 0x01 | 0x02 | 0x04  # checksums left to the other end; TCP over IPv4 and IPv6 in large frames
MAX_BYTES = 1 << 17  # of a frame with its header
AT_ONCE = 16  # frames of one end, before others have their turn
SOONER = -10  # niceness: what is due goes before what the nodes compute


class Cables:
    """As many as are laid before `start`. They are gone after `close`, and when this process is."""

    def __init__(self, delay_s: float):
        self._delay_s, self._ends = delay_s, list[int]()
        self._carrier: subprocess.Popen[bytes] | None = None

    def lay(self, one: str, other: str) -> None:
        """Two devices by these names. Raises ValueError where there can be none."""
        try:
            self._ends += [_device(one)]
            self._ends += [_device(other)]
        except OSError as error:
            raise ValueError(
                f"a delay is made with TAP devices, and {CLONE} gives none here: {error.strerror}; load the module "
                f"tun, or leave the delay out"
            ) from None

    def start(self) -> None:
        words = [sys.executable, "-I", __file__, str(self._delay_s), *map(str, self._ends)]
        self._carrier = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=self._ends)
        self._let_go()

    def close(self) -> None:
        self._let_go()
        if self._carrier:
            self._carrier.kill()
            self._carrier.communicate()

    def _let_go(self) -> None:
        while self._ends:
            os.close(self._ends.pop())


def _device(name: str) -> int:
    descriptor = os.open(CLONE, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, SET_DEVICE, struct.pack("16sH22x", name.encode(), TAP | PLAIN | WITH_HEADER))
        with contextlib.suppress(OSError):  # then frames are small, and it takes more of them
            fcntl.ioctl(descriptor, SET_OFFLOAD, SUMS_AND_LARGE_FRAMES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def carry(delay_s: float, ends: Sequence[int], leave: int = 0) -> None:
    """Until ``leave`` ends. All cables are equally late, so frames are due in the order in which they came."""
    far = {end: ends[i ^ 1] for i, end in enumerate(ends)}
    late: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([leave, *ends], [], [], wait_s)
        if leave in ready:
            return
        for end in ready:
            for _ in range(AT_ONCE):
                try:
                    frame = os.read(end, MAX_BYTES)
                except BlockingIOError:
                    break
                late.append((time.monotonic() + delay_s, far[end], frame))
        while late and late[0][0] <= time.monotonic():
            _, end, frame = late.popleft()
            with contextlib.suppress(OSError):  # a device that is down takes nothing, as a cable that is pulled
                os.write(end, frame)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(SOONER)
    # whoever has many files open gives high numbers, and `select.select` knows none above 1,023
    carry(float(sys.argv[1]), [os.dup(int(word)) for word in sys.argv[2:]])
