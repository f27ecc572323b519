"""Rendezvous store, served by rank 0: keys and values for processes that prove the secret.

One thread, one socket on one address. A stranger has HANDSHAKE_S and a few bytes, and there are never more than
MAX_STRANGERS of them: the oldest goes.
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
from paceline.link.net.framing import alone
from paceline.link.net.keepalive import watch
from paceline.report.log import log

HANDSHAKE_S = 5.0
BUSY_S = 2.0  # for which a port that is in use is tried again
MAX_STRANGERS = 64
MAX_NOTES = 8  # lines about those who were refused
MAX_WAITING_BYTES = 16 * auth.MAX_BYTES  # of answers that a member does not read
NEVER = float("inf")


class _Guest:
    """One connection: a stranger until it has proved the secret, then a member."""

    def __init__(self, line: socket.socket, host: str):
        self.line, self.host = line, host
        self.received, self.to_send = bytearray(), bytearray()
        self.nonce = secrets.token_bytes(auth.SIZE)
        self.seal: auth.MessageAuthenticator | None = None
        self.wanted: list[bytes] = []  # keys that it waits for
        self.deadline = time.monotonic() + HANDSHAKE_S  # of a stranger's proof, or of a member's wait
        self.leaving = False  # once all is said


class RendezvousStore:
    """Serves ``address``:``port`` (0: any) until closed. Raises LinkError where it cannot listen there.

    *Laws*: nothing that a stranger sends, or does not send, ends it or keeps a member waiting.
    """

    def __init__(self, address: str, port: int, secret: bytes):
        self._secret = secret
        try:
            self._server = alone(_serve(address, port))
        except OSError as error:
            raise LinkError(_cannot_serve(address, port, error)) from error
        self._server.setblocking(False)
        self.address, self.port = self._server.getsockname()[:2]
        self.notes: list[str] = []  # who was refused, and why
        self._holders: dict[bytes, _Guest] = {}  # of keys that are gone when those are who said them last
        self._values: dict[bytes, bytes] = {}
        self._guests: dict[socket.socket, _Guest] = {}
        self._bell, self._ring = map(alone, socket.socketpair())
        self._eyes = selectors.DefaultSelector()
        for line in (self._server, self._bell):
            self._eyes.register(line, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="paceline meeting point", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._ring.send(b"q")
        self._thread.join(5.0)
        for line in (*self._guests, self._server, self._bell, self._ring):
            line.close()
        self._eyes.close()

    @property
    def num_leased(self) -> int:
        return len(self._holders)

    def post(self, key: str, value: str) -> None:
        """For whoever asks later; who waits for it already is not woken."""
        self._values[key.encode()] = value.encode()

    def posted(self, start: str) -> dict[str, str]:
        """What was said under keys that start so, by the rest of the key."""
        found = [(key.decode(), value) for key, value in list(self._values.items()) if key.startswith(start.encode())]
        return {key.removeprefix(start): value.decode() for key, value in found}

    def remove(self, key: str) -> None:
        self._values.pop(key.encode(), None)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            first = min((guest.deadline for guest in self._guests.values()), default=NEVER)
            for key, events in self._eyes.select(None if first == NEVER else max(0.0, first - now)):
                if key.fileobj is self._bell:
                    return
                if key.fileobj is self._server:
                    self._welcome()
                elif guest := self._guests.get(key.fileobj):  # type: ignore[call-overload]
                    self._attend(guest, events)
            now = time.monotonic()
            for guest in [guest for guest in self._guests.values() if guest.deadline <= now]:
                if guest.wanted:
                    self._reply(guest, b"missing", *(key for key in guest.wanted if key not in self._values))
                else:
                    self._drop(guest)

    def _welcome(self) -> None:
        try:
            line, where = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.05)  # no descriptor is free, and the connection stays ready to be accepted
            return
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = [guest for guest in self._guests.values() if guest.seal is None]
        if len(strangers) >= MAX_STRANGERS:
            self._drop(strangers[0])
        guest = self._guests[line] = _Guest(alone(line), where[0])
        self._eyes.register(line, selectors.EVENT_READ)
        try:
            self._say(guest, auth.HEADER + guest.nonce)
        except OSError:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if self._guests.pop(guest.line, None):
            self._eyes.unregister(guest.line)
            guest.line.close()
            for key in [key for key, holder in self._holders.items() if holder is guest]:
                del self._holders[key]
                self._values.pop(key, None)

    def _attend(self, guest: _Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._say(guest, b"")
            if events & selectors.EVENT_READ:
                self._hear(guest)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # Distrust is a ValueError, and so is a number that is none
            self._drop(guest)

    def _hear(self, guest: _Guest) -> None:
        if not (received := guest.line.recv(auth.MAX_BYTES)):
            raise ConnectionResetError
        if guest.leaving:
            return
        guest.received += received
        if guest.seal is None:
            self._admit(guest)
        while guest.seal and (fields := guest.seal.take(guest.received)):
            if guest.wanted:
                raise auth.AuthError("a question before the answer to the last")
            self._answer(guest, *fields)

    def _admit(self, guest: _Guest) -> None:
        header = bytes(guest.received[: len(auth.HEADER)])
        if not auth.MAGIC.startswith(header[: len(auth.MAGIC)]):
            raise auth.AuthError("another language")
        if len(header) == len(auth.HEADER) and header != auth.HEADER:
            self._note(guest, f"it speaks version {header[-1]} of the meeting, this process version {auth.VERSION}")
            raise auth.AuthError("another version")
        if len(guest.received) < auth.HELLO.size:
            return
        _, rank, nonce, proof = auth.HELLO.unpack_from(guest.received)
        nonces = guest.nonce + nonce
        if not auth.same(proof, auth.mac(self._secret, auth.GUEST, rank, nonces)):
            self._note(guest, f"it calls itself rank {rank}, and {self._unlike(rank, nonces, proof)}")
            guest.leaving = True
            self._say(guest, auth.REFUSED)
            return
        del guest.received[: auth.HELLO.size]
        guest.deadline = NEVER
        self._say(guest, auth.mac(self._secret, auth.SERVER, rank, nonces))
        guest.seal = auth.MessageAuthenticator(self._secret, auth.SERVER, rank, nonces)

    def _unlike(self, rank: int, nonces: bytes, proof: bytes) -> str:
        hides = isinstance(self._secret, auth.EncryptionKey)
        other = bytes(self._secret) if hides else auth.EncryptionKey(self._secret)
        if auth.same(proof, auth.mac(other, auth.GUEST, rank, nonces)):
            mine, theirs = ("with", "without") if hides else ("without", "with")
            return f"it was started {theirs} --encrypt (PACELINE_ENCRYPT), and this run {mine}"
        return "its PACELINE_SECRET is not that of this run"

    def _note(self, guest: _Guest, why: str) -> None:
        note = f"refused {guest.host} at the meeting point {self.address}:{self.port}: {why}"
        if note not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(note)
            log.warning(note)

    def _answer(self, guest: _Guest, verb: bytes, *words: bytes) -> None:
        values = self._values
        if verb == b"get" and len(words) > 1:
            limit_s, *guest.wanted = float(words[0]), *words[1:]
            guest.deadline = time.monotonic() + max(0.0, min(limit_s, 3600.0))
            self._serve(guest)
            return
        if verb == b"check":
            self._reply(guest, b"ok", b"%d" % all(key in values for key in words))
            return
        if verb == b"count":
            self._reply(guest, b"ok", b"%d" % len(values))
            return
        key, *rest = words or (b"",)
        if verb in (b"set", b"lease") and len(rest) == 1:
            values[key] = rest[0]
            if verb == b"lease":
                self._holders[key] = guest
                watch(guest.line)
            self._reply(guest, b"ok")
        elif verb == b"append" and len(rest) == 1:
            values[key] = values.get(key, b"") + rest[0]
            self._reply(guest, b"ok")
        elif verb == b"add" and len(rest) == 1:
            values[key] = b"%d" % (int(values.get(key, b"0")) + int(rest[0]))
            self._reply(guest, b"ok", values[key])
        elif verb == b"delete" and not rest:
            self._reply(guest, b"ok", b"%d" % (values.pop(key, None) is not None))
        elif verb == b"swap" and len(rest) == 2:
            expected, desired = rest
            if values.get(key, b"") == expected:
                values[key] = desired
            self._reply(guest, b"ok", values.get(key, expected))
        else:
            raise auth.AuthError("an unknown word")
        for other in list(self._guests.values()):
            self._serve(other)

    def _serve(self, guest: _Guest) -> None:
        if guest.wanted and all(key in self._values for key in guest.wanted):
            self._reply(guest, b"ok", *(self._values[key] for key in guest.wanted))

    def _reply(self, guest: _Guest, *fields: bytes) -> None:
        guest.wanted, guest.deadline = [], NEVER
        assert guest.seal is not None
        try:
            self._say(guest, guest.seal.wrap(fields))
        except (OSError, ValueError):
            self._drop(guest)

    def _say(self, guest: _Guest, words: bytes) -> None:
        guest.to_send += words
        with contextlib.suppress(BlockingIOError):
            del guest.to_send[: guest.line.send(guest.to_send)]
        if len(guest.to_send) > MAX_WAITING_BYTES:
            raise auth.AuthError("a guest that does not listen")
        more = selectors.EVENT_WRITE if guest.to_send else 0
        self._eyes.modify(guest.line, selectors.EVENT_READ | more)
        if guest.leaving and not guest.to_send:
            guest.line.shutdown(socket.SHUT_WR)  # the guest hangs up, or its deadline does


def _serve(address: str, port: int) -> socket.socket:
    """A port may be some connection's own end for a moment, and free in the next."""
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
    asked = f"rank 0 could not serve the meeting point {address}:{port} on {socket.gethostname()}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{asked}: another process listens there (`ss -ltnp` names it); end it, or give all ranks another "
            f"MASTER_PORT"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{asked}: that is not an address of this machine; set MASTER_ADDR to one of rank 0's, on every rank"
    return f"{asked} ({error.strerror or error}); give all ranks another MASTER_ADDR or MASTER_PORT"
