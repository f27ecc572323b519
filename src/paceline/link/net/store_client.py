"""Client of the rendezvous store, with the interface that gloo expects of a store."""

from __future__ import annotations

import errno
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.errors import LinkError
from paceline.link.net import auth
from paceline.link.net.framing import close_on_fork, closed_on_error
from paceline.link.net.store_server import HANDSHAKE_S, RendezvousStore

POLL_S = 0.5  # one request may hold the connection for this long; other threads share it
RETRY_DELAY_S = 0.1  # between attempts to connect
KEEP_S = 60  # of silence, before the kernel sends a keepalive probe
NO_RANK_YET = 0xFFFF  # in place of a rank, for a joining node
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, without TIME_WAIT


def connect(host: str, port: int, limit_s: float) -> socket.socket:
    """A connection to the server there. Raises OSError where none listens."""
    line = close_on_fork(socket.create_connection((host, port), timeout=limit_s))
    if line.getsockname() == line.getpeername():
        # TCP self-connect: the kernel chose the requested port as the local one; kept open, it would block rank 0
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        line.close()
        raise ConnectionRefusedError("nothing listens there yet")
    return line


class StoreClient(Store):
    """One connection to ``host``:``port``, for any thread. Raises LinkError within ``patience_s``, with missing ranks.

    ``alert`` is called while waiting; it raises where the wait cannot succeed any more. On rank 0 ``point`` is the
    store server itself, whose notes list the refused connections. ``advice``: the end of a timeout's error text.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        rank: int,
        size: int,
        patience_s: float,
        point: RendezvousStore | None = None,
        advice: str = "",
    ):
        super().__init__()
        self.host, self.port, self.rank, self.size, self.patience_s = host, port, rank, size, patience_s
        self.point, self.secret, self.advice = point, secret, advice
        self.alert: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._received = bytearray()
        self._line, self._seal = self._reach(secret)

    @property
    def here(self) -> str:
        name = "a node that comes late" if self.rank == NO_RANK_YET else f"rank {self.rank} of {self.size}"
        return f"{name} on {socket.gethostname()}"

    @property
    def place(self) -> str:
        return f"the meeting point {self.host}:{self.port}"

    @property
    def address(self) -> str:
        """The local address of the connection: that of the interface on the route to rank 0."""
        return str(self._line.getsockname()[0])

    def _reach(self, secret: bytes) -> tuple[socket.socket, auth.MessageAuthenticator]:
        end, why = time.monotonic() + self.patience_s, "no answer"
        while (left_s := end - time.monotonic()) > 0:
            try:
                line = connect(self.host, self.port, min(HANDSHAKE_S, left_s))
                with closed_on_error(line):
                    return line, self._greet(line, secret)
            except LinkError:
                raise
            except OSError as error:  # it may be busy with unauthenticated connections
                why = str(error)
            time.sleep(RETRY_DELAY_S)
        raise LinkError(
            f"{self.here} could not reach {self.place} within {self.patience_s:.0f} s ({why}); check MASTER_ADDR, "
            f"MASTER_PORT, the firewall, and that rank 0 is running{self.advice}"
        )

    def _greet(self, line: socket.socket, secret: bytes) -> auth.MessageAuthenticator:
        line.settimeout(HANDSHAKE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        header = auth.exactly(line, len(auth.HEADER))
        if not header.startswith(auth.MAGIC):
            raise LinkError(
                f"{self.here}: what answers at {self.host}:{self.port} is no rendezvous of paceline; give all "
                f"ranks another MASTER_PORT"
            )
        if header != auth.HEADER:
            line.sendall(auth.HEADER)
            raise LinkError(
                f"{self.here} speaks version {auth.VERSION} of the rendezvous, rank 0 at {self.host}:{self.port} "
                f"version {header[-1]}; install the same paceline on every node"
            )
        nonce = secrets.token_bytes(auth.SIZE)
        nonces = auth.exactly(line, auth.SIZE) + nonce
        line.sendall(auth.HELLO.pack(auth.HEADER, self.rank, nonce, auth.mac(secret, auth.CLIENT, self.rank, nonces)))
        reply = auth.exactly(line, auth.SIZE)
        if reply == auth.REFUSED or not auth.same(reply, auth.mac(secret, auth.SERVER, self.rank, nonces)):
            why = "refused this process" if reply == auth.REFUSED else "did not prove that it belongs to this run"
            raise LinkError(
                f"{self.here}: rank 0 at {self.host}:{self.port} {why}: their PACELINE_SECRET differ; start all "
                f"ranks of a run with the same, or all without, and all or none with --encrypt (PACELINE_ENCRYPT)"
            )
        return auth.MessageAuthenticator(secret, auth.CLIENT, self.rank, nonces)

    def _request(self, *fields: bytes) -> list[bytes]:
        with self._lock:
            try:
                self._line.settimeout(HANDSHAKE_S + POLL_S)
                self._line.sendall(self._seal.wrap(fields))
                while (reply := self._seal.take(self._received)) is None:
                    if not (received := self._line.recv(auth.MAX_BYTES)):
                        raise ConnectionResetError("it closed the connection")
                    self._received += received
                return reply
            except (OSError, auth.AuthError) as error:
                self._line.close()  # half a frame may be in flight
                raise LinkError(
                    f"{self.here} lost {self.place} ({error}): rank 0 ended, or the network to it broke; look there", 0
                ) from error

    def _wait(self, keys: Sequence[str], patience_s: float) -> list[bytes]:
        wanted = [key.encode() for key in keys]
        end = time.monotonic() + patience_s
        while wanted:
            left_s = max(0.0, end - time.monotonic())
            state, *rest = self._request(b"get", b"%f" % min(POLL_S, left_s), *wanted)
            if state == b"ok":
                return rest
            self.alert()
            if not left_s:
                raise LinkError(self._missing([key.decode() for key in rest], patience_s))
            time.sleep(0.001)  # lets another thread use the connection
        return []

    def _missing(self, keys: Sequence[str], waited_s: float) -> str:
        missing = sorted({int(found[1]) if (found := re.search(r"/(\d+)$", key)) else 0 for key in keys})
        ranks = ", ".join(f"rank {rank}" for rank in missing)
        refused = f" ({'; '.join(self.point.notes)})" if self.point and self.point.notes else ""
        return (
            f"{self.here}: {ranks} did not come to {self.place} within {waited_s:.0f} s{refused}; start every rank, "
            f"and look at their output{self.advice}"
        )

    def lease(self, key: str, value: str) -> None:
        """As `set`; the server deletes the key when this connection closes."""
        self._request(b"lease", key.encode(), value.encode())

    def keep(self) -> None:
        """Turns on TCP keepalive: firewalls and NATs on the way then keep the idle connection open."""
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_S)

    def ended(self, limit_s: float) -> bool:
        """Whether the other end has closed the connection with FIN, or does within ``limit_s``. After any other error
        the socket is closed here: the next recv would look like a FIN."""
        with self._lock:
            try:
                self._line.settimeout(limit_s)
                return not self._line.recv(1, socket.MSG_PEEK)
            except OSError as error:
                if error.errno not in (None, errno.EAGAIN):  # not a time-out
                    self._line.close()
        return False

    @property
    def broken(self) -> bool:
        return self._line.fileno() < 0

    def close(self) -> None:
        self._line.close()

    # What follows has the names and meanings of torch.distributed.Store, whose subclasses gloo calls from C++.

    def set(self, key: str, value: str | bytes) -> None:
        self._request(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._wait([key], self.patience_s)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._wait(keys, self.patience_s)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, min(timeout.total_seconds() if timeout else self.patience_s, self.patience_s))

    def check(self, keys: list[str]) -> bool:
        return self._request(b"check", *(key.encode() for key in keys))[1] == b"1"

    def add(self, key: str, value: int) -> int:
        return int(self._request(b"add", key.encode(), b"%d" % value)[1])

    def append(self, key: str, value: str | bytes) -> None:
        self._request(b"append", key.encode(), _bytes(value))

    def delete_key(self, key: str) -> bool:
        return self._request(b"delete", key.encode())[1] == b"1"

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._request(b"swap", key.encode(), _bytes(expected_value), _bytes(desired_value))[1]

    def num_keys(self) -> int:
        return int(self._request(b"count")[1])

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls them

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> StoreClient:
        return self


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
