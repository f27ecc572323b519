"""Network probe between two hosts: reachability, latency, bandwidth. Sent over as source.

Each listens at its own address, and lets in who proves the secret of this examination (`link.proof`); then

    guest -> gate:  'p', then single bytes       which come back at once
    guest -> gate:  'f', seconds, then a flood   gate -> guest: bytes and the seconds that they took, when it has enough
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import statistics
import struct
import threading
import time

from paceline.link.net.auth import CLIENT, HEADER, HELLO, SERVER, SIZE, exactly, mac, same

TIMEOUT_S = 5.0  # with a guest that says nothing
PINGS = 100
PING_S = 0.3  # for all of them
STALL_S = 2.0
SECONDS = struct.Struct("<d")
COUNT = struct.Struct("<dd")
AT_ONCE = struct.pack("ii", 1, 0)  # closed with nothing left behind


class Gate:
    """Listens at ``address``:``port`` (0: any) until closed. Raises OSError where it cannot."""

    def __init__(self, address: str, port: int, secret: bytes):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret = secret
        self._server = socket.create_server((address, port), family=family, backlog=64)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._attend, args=(line,), daemon=True).start()

    def _attend(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError, struct.error):
            line.settimeout(TIMEOUT_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(SIZE)
            line.sendall(HEADER + nonce)
            header, rank, theirs, proof = HELLO.unpack(exactly(line, HELLO.size))
            if header != HEADER or not same(proof, mac(self._secret, CLIENT, rank, nonce + theirs)):
                return
            line.sendall(mac(self._secret, SERVER, rank, nonce + theirs))
            if exactly(line, 1) == b"p":
                while words := line.recv(1):
                    line.sendall(words)
            else:
                _count(line, *SECONDS.unpack(exactly(line, SECONDS.size)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _count(line: socket.socket, seconds: float) -> None:
    """What comes in ``seconds``, without the first quarter, in which TCP finds its speed."""
    buffer = bytearray(1 << 20)
    total, begin, mark, now = 0, 0.0, 0.0, 0.0
    while size := line.recv_into(buffer):
        now = time.monotonic()
        begin = begin or now
        if now - begin < seconds / 4:
            mark = now
            continue
        total += size
        if now - begin >= seconds:
            break
    line.sendall(COUNT.pack(total, now - mark))
    while line.recv_into(buffer):  # what is under way, until the guest hangs up
        pass


def reach(own: str, address: str, port: int, secret: bytes, limit_s: float) -> socket.socket:
    """A line from ``own`` to the gate there. Raises OSError, also where somebody else answers."""
    line = socket.create_connection((address, port), limit_s, (own, 0))
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = exactly(line, len(HEADER) + SIZE)
        nonce = secrets.token_bytes(SIZE)
        nonces = greeting[len(HEADER) :] + nonce
        line.sendall(HELLO.pack(HEADER, 0, nonce, mac(secret, CLIENT, 0, nonces)))
        if not same(exactly(line, SIZE), mac(secret, SERVER, 0, nonces)):
            raise ConnectionError("another process answered")
        return line
    except BaseException:
        line.close()
        raise


def latency_s(line: socket.socket) -> float:
    """Of one byte, one way: half of the median time there and back."""
    line.settimeout(TIMEOUT_S)
    line.sendall(b"p")
    times: list[float] = []
    end = time.monotonic() + PING_S
    while len(times) < PINGS and (not times or time.monotonic() < end):
        start = time.perf_counter()
        line.sendall(b".")
        exactly(line, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


def bandwidth_per_s(line: socket.socket, seconds: float) -> float:
    """Bytes per second of one stream to the gate. Raises TimeoutError where they stop coming through."""
    line.sendall(b"f" + SECONDS.pack(seconds))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    line.setblocking(False)
    block = bytes(1 << 18)
    end = time.monotonic() + 2 * seconds + STALL_S
    while (left_s := end - time.monotonic()) > 0:
        readable, writable, _ = select.select([line], [line], [], left_s)
        if readable:
            line.settimeout(TIMEOUT_S)
            num_bytes, took_s = COUNT.unpack(exactly(line, COUNT.size))
            return float(num_bytes / took_s) if took_s else 0.0
        if writable:
            with contextlib.suppress(BlockingIOError):
                line.send(block)
    raise TimeoutError(f"nothing more came through for {STALL_S:.0f} s")
