"""What a listener on the bridge hears of a cluster: every packet of its cables. Needs root, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from types import TracebackType

EVERY_PROTOCOL = 3  # ETH_P_ALL
ROOM_BYTES = 64 << 20  # for packets that nobody has looked at yet
KEPT_BYTES = 1 << 16  # of the beginning of each conversation
MAX_PACKET_BYTES = 1 << 17  # of a packet that the kernel has not cut up yet

Flow = tuple[bytes, int, bytes, int]  # from an address and a port to an address and a port


class Listener:
    """Hears until left. ``found``: those of ``wanted`` that went over a cable, as they are.

    ``begun``: the first bytes of each conversation, each direction by itself.
    """

    def __init__(self, cables: Sequence[str], wanted: Sequence[bytes]):
        self._cables, self._wanted = frozenset(cables), tuple(wanted)
        self.found: set[bytes] = set()
        self.begun: dict[Flow, bytearray] = {}
        self.num_bytes = 0
        self._ends: dict[Flow, bytes] = {}
        self._longest = max(map(len, wanted), default=1)

    def __enter__(self) -> Listener:
        self._line = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERY_PROTOCOL))
        with contextlib.suppress(OSError):
            self._line.setsockopt(socket.SOL_SOCKET, 33, ROOM_BYTES)  # SO_RCVBUFFORCE
        self._line.settimeout(0.2)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline listener", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._leaving.set()
        self._thread.join(10.0)
        self._line.close()

    def _run(self) -> None:
        while True:
            try:
                packet, where = self._line.recvfrom(MAX_PACKET_BYTES)
            except TimeoutError:
                if self._leaving.is_set():
                    return
                continue
            # a packet comes in by one cable and goes out by another: there it is counted
            if where[0] in self._cables and where[2] == socket.PACKET_OUTGOING:
                self._hear(packet)

    def _hear(self, packet: bytes) -> None:
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        start = 4 * (packet[0] & 15)
        source, target = struct.unpack_from("!HH", packet, start)
        said = packet[start + 4 * (packet[start + 12] >> 4) : struct.unpack_from("!H", packet, 2)[0]]
        if not said:
            return
        flow = packet[12:16], source, packet[16:20], target
        self.num_bytes += len(said)
        begun = self.begun.setdefault(flow, bytearray())
        begun += said[: KEPT_BYTES - len(begun)]
        window = self._ends.get(flow, b"") + said
        self.found.update(each for each in self._wanted if each in window)
        self._ends[flow] = window[1 - self._longest :]
