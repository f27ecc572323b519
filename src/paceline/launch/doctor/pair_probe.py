"""Network probe between two hosts: reachability, latency, bandwidth. Sent to the hosts as source.

Each host listens at its own address, and accepts clients that authenticate with the examination's secret (`net.auth`):

    client -> server   'p', then single bytes           server -> client   each byte, at once
    client -> server   'f', seconds, then a flood       server -> client   bytes received, and in how many seconds
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

TIMEOUT_S = 5.0  # for a peer that sends nothing
PINGS = 100
PING_S = 0.3  # for all PINGS
STALL_S = 2.0
SECONDS = struct.Struct("<d")
COUNT = struct.Struct("<dd")
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close() resets the connection and drops unsent bytes


class ProbeServer:
    """Server that listens at ``address``:``port`` (0: any) until closed. Raises OSError if it cannot."""

    def __init__(self, address: str, port: int, secret: bytes):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret = secret
        self._server = socket.create_server((address, port), family=family, backlog=64)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, struct.error):
            connection.settimeout(TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(SIZE)
            connection.sendall(HEADER + nonce)
            header, rank, client_nonce, proof = HELLO.unpack(exactly(connection, HELLO.size))
            if header != HEADER or not same(proof, mac(self._secret, CLIENT, rank, nonce + client_nonce)):
                return
            connection.sendall(mac(self._secret, SERVER, rank, nonce + client_nonce))
            if exactly(connection, 1) == b"p":
                while data := connection.recv(1):
                    connection.sendall(data)
            else:
                _count(connection, *SECONDS.unpack(exactly(connection, SECONDS.size)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _count(connection: socket.socket, seconds: float) -> None:
    """Counts the bytes of ``seconds`` and sends the count; the first quarter, TCP's slow start, is not counted."""
    buffer = bytearray(1 << 20)
    total, begin_s, start_s, now = 0, 0.0, 0.0, 0.0
    while size := connection.recv_into(buffer):
        now = time.monotonic()
        begin_s = begin_s or now
        if now - begin_s < seconds / 4:
            start_s = now
            continue
        total += size
        if now - begin_s >= seconds:
            break
    connection.sendall(COUNT.pack(total, now - start_s))
    while connection.recv_into(buffer):  # the bytes under way, until the client closes the connection
        pass


def reach(own: str, address: str, port: int, secret: bytes, limit_s: float) -> socket.socket:
    """A connection from ``own`` to the server there. Raises OSError, also if another program answers."""
    connection = socket.create_connection((address, port), limit_s, (own, 0))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = exactly(connection, len(HEADER) + SIZE)
        nonce = secrets.token_bytes(SIZE)
        nonces = greeting[len(HEADER) :] + nonce
        connection.sendall(HELLO.pack(HEADER, 0, nonce, mac(secret, CLIENT, 0, nonces)))
        if not same(exactly(connection, SIZE), mac(secret, SERVER, 0, nonces)):
            raise ConnectionError("another process answered")
        return connection
    except BaseException:
        connection.close()
        raise


def latency_s(connection: socket.socket) -> float:
    """One-way latency of one byte: half of the median round-trip time."""
    connection.settimeout(TIMEOUT_S)
    connection.sendall(b"p")
    times: list[float] = []
    end = time.monotonic() + PING_S
    while len(times) < PINGS and (not times or time.monotonic() < end):
        start = time.perf_counter()
        connection.sendall(b".")
        exactly(connection, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


def bandwidth_per_s(connection: socket.socket, seconds: float) -> float:
    """Bytes per second of one stream to the server. Raises TimeoutError if the stream stalls."""
    connection.sendall(b"f" + SECONDS.pack(seconds))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    connection.setblocking(False)
    block = bytes(1 << 18)
    end = time.monotonic() + 2 * seconds + STALL_S
    while (left_s := end - time.monotonic()) > 0:
        readable, writable, _ = select.select([connection], [connection], [], left_s)
        if readable:
            connection.settimeout(TIMEOUT_S)
            num_bytes, took_s = COUNT.unpack(exactly(connection, COUNT.size))
            return float(num_bytes / took_s) if took_s else 0.0
        if writable:
            with contextlib.suppress(BlockingIOError):
                connection.send(block)
    raise TimeoutError(f"nothing more came through for {STALL_S:.0f} s")
