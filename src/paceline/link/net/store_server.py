"""Rendezvous store, served by rank 0: keys and values for processes that authenticate with the run's secret.

One thread serves all connections from one listening socket. A connection must authenticate within HANDSHAKE_S and a few
bytes. At most MAX_STRANGERS unauthenticated connections are open: one more closes the oldest.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import threading
import time

from paceline.errors import LinkError
from paceline.link.net import auth
from paceline.link.net.framing import close_on_fork
from paceline.link.net.keepalive import watch
from paceline.report.log import log

HANDSHAKE_S = 5.0
BUSY_S = 2.0  # for this long a port that is in use is retried
MAX_STRANGERS = 64
MAX_NOTES = 8  # log lines about refused connections
MAX_WAITING_BYTES = 16 * auth.MAX_BYTES  # of replies that a member has not read
NEVER = float("inf")


class _Client:
    """One connection: a stranger until it has authenticated, then a member."""

    def __init__(self, line: socket.socket, host: str):
        self.line, self.host = line, host
        self.received, self.to_send = bytearray(), bytearray()
        self.nonce = secrets.token_bytes(auth.SIZE)
        self.seal: auth.MessageAuthenticator | None = None
        self.wanted: list[bytes] = []  # keys that it waits for
        self.deadline = time.monotonic() + HANDSHAKE_S  # of a stranger's authentication, or of a member's wait
        self.closing = False  # once its last reply has been sent


class RendezvousStore:
    """Serves ``address``:``port`` (0: any) until closed. Raises LinkError where it cannot listen there.

    *Invariants*: no unauthenticated connection, whatever it sends or fails to send, stops it or delays a member.
    """

    def __init__(self, address: str, port: int, secret: bytes):
        self._secret = secret
        try:
            self._server = close_on_fork(_listen(address, port))
        except OSError as error:
            raise LinkError(_cannot_serve(address, port, error)) from error
        self._server.setblocking(False)
        self.address, self.port = self._server.getsockname()[:2]
        self.notes: list[str] = []  # the refused connections, with reasons
        self._holders: dict[bytes, _Client] = {}  # of leased keys, which are deleted when the connection closes
        self._values: dict[bytes, bytes] = {}
        self._clients: dict[socket.socket, _Client] = {}
        self._woken, self._wake = map(close_on_fork, socket.socketpair())
        self._selector = selectors.DefaultSelector()
        for line in (self._server, self._woken):
            self._selector.register(line, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="paceline meeting point", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"q")
        self._thread.join(5.0)
        for line in (*self._clients, self._server, self._woken, self._wake):
            line.close()
        self._selector.close()

    @property
    def num_leased(self) -> int:
        return len(self._holders)

    def post(self, key: str, value: str) -> None:
        """Sets a key for later requests. A client that already waits for the key is not woken."""
        self._values[key.encode()] = value.encode()

    def posted(self, start: str) -> dict[str, str]:
        """The values of all keys that start with ``start``, by the rest of the key."""
        found = [(key.decode(), value) for key, value in list(self._values.items()) if key.startswith(start.encode())]
        return {key.removeprefix(start): value.decode() for key, value in found}

    def remove(self, key: str) -> None:
        self._values.pop(key.encode(), None)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            first = min((client.deadline for client in self._clients.values()), default=NEVER)
            for key, events in self._selector.select(None if first == NEVER else max(0.0, first - now)):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._server:
                    self._accept()
                elif client := self._clients.get(key.fileobj):  # type: ignore[call-overload]
                    self._handle(client, events)
            now = time.monotonic()
            for client in [client for client in self._clients.values() if client.deadline <= now]:
                if client.wanted:
                    self._reply(client, b"missing", *(key for key in client.wanted if key not in self._values))
                else:
                    self._drop(client)

    def _accept(self) -> None:
        try:
            line, where = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.05)  # no descriptor is free, and the connection stays ready to be accepted
            return
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = [client for client in self._clients.values() if client.seal is None]
        if len(strangers) >= MAX_STRANGERS:
            self._drop(strangers[0])
        client = self._clients[line] = _Client(close_on_fork(line), where[0])
        self._selector.register(line, selectors.EVENT_READ)
        try:
            self._send(client, auth.HEADER + client.nonce)
        except OSError:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.line, None):
            self._selector.unregister(client.line)
            client.line.close()
            for key in [key for key, holder in self._holders.items() if holder is client]:
                del self._holders[key]
                self._values.pop(key, None)

    def _handle(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client, b"")
            if events & selectors.EVENT_READ:
                self._receive(client)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # AuthError is a ValueError; a number that cannot be parsed raises one, too
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        if not (received := client.line.recv(auth.MAX_BYTES)):
            raise ConnectionResetError
        if client.closing:
            return
        client.received += received
        if client.seal is None:
            self._authenticate(client)
        while client.seal and (fields := client.seal.take(client.received)):
            if client.wanted:
                raise auth.AuthError("a request before the reply to the last")
            self._execute(client, *fields)

    def _authenticate(self, client: _Client) -> None:
        header = bytes(client.received[: len(auth.HEADER)])
        if not auth.MAGIC.startswith(header[: len(auth.MAGIC)]):
            raise auth.AuthError("another protocol")
        if len(header) == len(auth.HEADER) and header != auth.HEADER:
            self._note(client, f"it speaks version {header[-1]} of the meeting, this process version {auth.VERSION}")
            raise auth.AuthError("another version")
        if len(client.received) < auth.HELLO.size:
            return
        _, rank, nonce, proof = auth.HELLO.unpack_from(client.received)
        nonces = client.nonce + nonce
        if not auth.same(proof, auth.mac(self._secret, auth.CLIENT, rank, nonces)):
            self._note(client, f"it calls itself rank {rank}, and {self._mismatch(rank, nonces, proof)}")
            client.closing = True
            self._send(client, auth.REFUSED)
            return
        del client.received[: auth.HELLO.size]
        client.deadline = NEVER
        self._send(client, auth.mac(self._secret, auth.SERVER, rank, nonces))
        client.seal = auth.MessageAuthenticator(self._secret, auth.SERVER, rank, nonces)

    def _mismatch(self, rank: int, nonces: bytes, proof: bytes) -> str:
        encrypts = isinstance(self._secret, auth.EncryptionKey)
        other = bytes(self._secret) if encrypts else auth.EncryptionKey(self._secret)
        if auth.same(proof, auth.mac(other, auth.CLIENT, rank, nonces)):
            own, its = ("with", "without") if encrypts else ("without", "with")
            return f"it was started {its} --encrypt (PACELINE_ENCRYPT), and this run {own}"
        return "its PACELINE_SECRET is not that of this run"

    def _note(self, client: _Client, why: str) -> None:
        note = f"refused {client.host} at the meeting point {self.address}:{self.port}: {why}"
        if note not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(note)
            log.warning(note)

    def _execute(self, client: _Client, verb: bytes, *args: bytes) -> None:
        values = self._values
        if verb == b"get" and len(args) > 1:
            limit_s, *client.wanted = float(args[0]), *args[1:]
            client.deadline = time.monotonic() + max(0.0, min(limit_s, 3600.0))
            self._serve(client)
            return
        if verb == b"check":
            self._reply(client, b"ok", b"%d" % all(key in values for key in args))
            return
        if verb == b"count":
            self._reply(client, b"ok", b"%d" % len(values))
            return
        key, *rest = args or (b"",)
        if verb in (b"set", b"lease") and len(rest) == 1:
            values[key] = rest[0]
            if verb == b"lease":
                self._holders[key] = client
                watch(client.line)
            self._reply(client, b"ok")
        elif verb == b"append" and len(rest) == 1:
            values[key] = values.get(key, b"") + rest[0]
            self._reply(client, b"ok")
        elif verb == b"add" and len(rest) == 1:
            values[key] = b"%d" % (int(values.get(key, b"0")) + int(rest[0]))
            self._reply(client, b"ok", values[key])
        elif verb == b"delete" and not rest:
            self._reply(client, b"ok", b"%d" % (values.pop(key, None) is not None))
        elif verb == b"swap" and len(rest) == 2:
            expected, desired = rest
            if values.get(key, b"") == expected:
                values[key] = desired
            self._reply(client, b"ok", values.get(key, expected))
        else:
            raise auth.AuthError("an unknown command")
        for other in list(self._clients.values()):
            self._serve(other)

    def _serve(self, client: _Client) -> None:
        if client.wanted and all(key in self._values for key in client.wanted):
            self._reply(client, b"ok", *(self._values[key] for key in client.wanted))

    def _reply(self, client: _Client, *fields: bytes) -> None:
        client.wanted, client.deadline = [], NEVER
        assert client.seal is not None
        try:
            self._send(client, client.seal.wrap(fields))
        except (OSError, ValueError):
            self._drop(client)

    def _send(self, client: _Client, message: bytes) -> None:
        client.to_send += message
        with contextlib.suppress(BlockingIOError):
            del client.to_send[: client.line.send(client.to_send)]
        if len(client.to_send) > MAX_WAITING_BYTES:
            raise auth.AuthError("a client that does not read its replies")
        more = selectors.EVENT_WRITE if client.to_send else 0
        self._selector.modify(client.line, selectors.EVENT_READ | more)
        if client.closing and not client.to_send:
            client.line.shutdown(socket.SHUT_WR)  # then the client closes the connection, or its deadline does


def _listen(address: str, port: int) -> socket.socket:
    """Retries for BUSY_S: an outgoing connection may hold the port for a moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    end = time.monotonic() + BUSY_S
    while True:
        try:
            return socket.create_server((address, port), family=family, backlog=MAX_STRANGERS)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
        time.sleep(0.05)


def _cannot_serve(address: str, port: int, error: OSError) -> str:
    failed = f"rank 0 could not serve the meeting point {address}:{port} on {socket.gethostname()}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{failed}: another process listens there (`ss -ltnp` names it); end it, or give all ranks another "
            f"MASTER_PORT"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{failed}: that is not an address of this machine; set MASTER_ADDR to one of rank 0's, on every rank"
    return f"{failed} ({error.strerror or error}); give all ranks another MASTER_ADDR or MASTER_PORT"
