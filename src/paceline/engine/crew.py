"""The processes of one node: a private socket each to local rank 0, and memory shared by all.

The meeting point is a Linux abstract socket, the memory an anonymous file passed over it: neither has
a name on disk, so nothing is left when any of them is killed. A closed socket is how a death is told.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence

from paceline.contract import LinkError

JOIN_S = 60.0
PATIENCE_S = 1800.0
MESSAGE_BYTES = 1 << 17  # one packet; ballots and verdicts are far smaller


class CrewError(LinkError):
    """Another process of this node ended, or said why it must."""


class Crew:
    """Local rank 0 hears everyone; the others hear local rank 0."""

    def __init__(self, rank: int, size: int, name: str):
        self.rank, self.size, self.name = rank, size, name
        self.lines: dict[int, socket.socket] = {}
        address = f"\0paceline-{name}"
        end = time.monotonic() + JOIN_S
        if rank == 0:
            self._gather(address, end)
        else:
            self._reach(address, end)
        for line in self.lines.values():
            line.settimeout(PATIENCE_S)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)

    def _gather(self, address: str, end: float) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            try:
                server.bind(address)
            except OSError as error:
                raise CrewError(
                    f"another run on this machine already uses the name {self.name!r} ({error}); start this one "
                    f"with another MASTER_PORT"
                ) from None
            server.listen(self.size)
            while len(self.lines) < self.size - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                try:
                    line, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - set(self.lines))
                    raise CrewError(
                        f"local rank 0 of {self.size} waited {JOIN_S:.0f} s for local ranks {missing}; were all "
                        f"started, with the same MASTER_PORT?"
                    ) from None
                # another user may not join: pid, uid, gid of the other end
                _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid != os.getuid():
                    line.close()
                    continue
                line.settimeout(2.0)
                self.lines[struct.unpack("<I", line.recv(4))[0]] = line

    def _reach(self, address: str, end: float) -> None:
        while True:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                line.connect(address)
                break
            except (ConnectionRefusedError, FileNotFoundError):
                line.close()
                if time.monotonic() > end:
                    raise CrewError(
                        f"local rank {self.rank} of {self.size} found no local rank 0 within {JOIN_S:.0f} s"
                    ) from None
                time.sleep(0.01)
        line.send(struct.pack("<I", self.rank))
        self.lines[0] = line

    def send(self, peer: int, kind: bytes, body: bytes = b"") -> None:
        try:
            self.lines[peer].send(kind + body)
        except OSError as error:
            raise self._lost(f"local rank {self.rank} lost local rank {peer} of this node ({error})") from None

    def recv(self, peer: int, doing: str) -> tuple[bytes, bytes]:
        """(kind, body). Raises CrewError when the other end died, gave up, or says nothing for PATIENCE_S."""
        try:
            message = self.lines[peer].recv(MESSAGE_BYTES)
        except OSError as error:
            message, why = b"", str(error)
        else:
            why = "its process ended"
        if not message:
            raise self._lost(f"local rank {self.rank} lost local rank {peer} of this node while {doing}: {why}")
        if message[:1] == b"E":
            raise CrewError(message[1:].decode())
        return message[:1], message[1:]

    def expect(self, peer: int, kind: bytes, doing: str) -> bytes:
        got, body = self.recv(peer, doing)
        assert got == kind, f"local rank {self.rank} got {got!r} for {kind!r} while {doing}"
        return body

    def barrier(self, doing: str) -> None:
        """Nobody passes before all have come."""
        if self.rank == 0:
            for peer in self.lines:
                self.expect(peer, b"b", doing)
            for peer in self.lines:
                self.send(peer, b"b")
        else:
            self.send(0, b"b")
            self.expect(0, b"b", doing)

    def gather(self, values: Sequence[float], doing: str) -> list[list[float]]:
        """Everyone's numbers, in local rank order, to everyone."""
        shape = f"<{len(values)}d"
        if self.rank:
            self.send(0, b"g", struct.pack(shape, *values))
            flat = struct.unpack(f"<{len(values) * self.size}d", self.expect(0, b"g", doing))
            return [list(flat[i * len(values) : (i + 1) * len(values)]) for i in range(self.size)]
        rows = [list(values)]
        rows += [list(struct.unpack(shape, self.expect(peer, b"g", doing))) for peer in range(1, self.size)]
        for peer in self.lines:
            self.send(peer, b"g", b"".join(struct.pack(shape, *row) for row in rows))
        return rows

    def collect(self, words: bytes, doing: str) -> list[bytes]:
        """Everyone's words, in local rank order, to local rank 0; nothing to the others."""
        if self.rank:
            self.send(0, b"w", words)
            return []
        return [words, *(self.expect(peer, b"w", doing) for peer in range(1, self.size))]

    def hand_out(self, everyone: Sequence[bytes], doing: str) -> list[bytes]:
        """Local rank 0's list to everyone."""
        if self.rank:
            (count,) = struct.unpack("<I", self.expect(0, b"w", doing))
            return [self.expect(0, b"w", doing) for _ in range(count)]
        for peer in self.lines:
            self.send(peer, b"w", struct.pack("<I", len(everyone)))
            for words in everyone:
                self.send(peer, b"w", words)
        return list(everyone)

    def _lost(self, why: str) -> CrewError:
        error = CrewError(why)
        self.say_why(error)
        return error

    def say_why(self, error: BaseException) -> None:
        """Local rank 0 tells the others why it must end, so that they end with the same words."""
        for line in self.lines.values() if self.rank == 0 else ():
            with contextlib.suppress(OSError):
                line.send(b"E" + str(error).encode()[: MESSAGE_BYTES - 1])

    def share(self, num_bytes: int) -> memoryview:
        """Memory that all see, zero, and real only where written."""
        if self.rank == 0:
            file = os.memfd_create(f"paceline-{self.name}", os.MFD_CLOEXEC)
            os.ftruncate(file, max(num_bytes, 1))
            for line in self.lines.values():
                socket.send_fds(line, [b"m"], [file])
        else:
            _, files, _, _ = socket.recv_fds(self.lines[0], 1, 1)
            file = files[0]
        view = memoryview(mmap.mmap(file, max(num_bytes, 1)))
        os.close(file)
        return view

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
