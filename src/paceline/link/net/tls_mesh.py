"""TLS connections between all ranks, for one lane: one from each rank to each other, written at one end alone.

    client -> server:  TLS 1.3; each shows the certificate that it published at the rendezvous
    server -> client:  the token that the server published there, which identifies the lane

A rank listens until all have connected; then it closes its port. OpenSSL does not let two threads read and write one
connection at once, so after that only the client writes. A connection must authenticate within HANDSHAKE_S. At most
MAX_STRANGERS unauthenticated connections are open: one more closes the oldest.

Certificates are published at the rendezvous, which only members can join or change. No authority signs them: a peer is
accepted by the bytes of its certificate, not by names or dates. A key lives as long as its link, in memory only.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from paceline.errors import LinkError
from paceline.link.net.auth import exactly
from paceline.link.net.framing import close_on_fork, closed_on_error
from paceline.link.net.route import Member

HANDSHAKE_S = 5.0
MAX_STRANGERS = 64
PAUSE_S, POLL_S = 0.05, 0.2
TOKEN = 16  # bytes


class Mesh:
    """``out[rank]`` and ``into[rank]``: this rank's connections to the others, and theirs to it. Raises LinkError.

    ``store``: of this lane. ``certificates``: of all ranks.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        identity: Identity,
        certificates: Sequence[bytes],
        store: Any,
        limit_s: float,
    ):
        self.rank, self.members = rank, members
        self.out: dict[int, ssl.SSLSocket] = {}
        self.into: dict[int, ssl.SSLSocket] = {}
        self._certificates = list(certificates)
        self._inside = identity.context(True, certificates)
        self._outside = identity.context(False, certificates)
        self._changed = threading.Condition()
        self._strangers: list[ssl.SSLSocket] = []
        self._closing = False
        self._token = secrets.token_bytes(TOKEN)
        self._end = time.monotonic() + limit_s
        address = members[rank].address
        others = [member for member in members if member.rank != rank]
        if not others:
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=MAX_STRANGERS) as server:
            server.settimeout(POLL_S)
            accepting = threading.Thread(target=self._accept, args=(server,), name="paceline gate", daemon=True)
            accepting.start()
            try:
                store.set(f"gate/{rank}", f"{server.getsockname()[1]} {self._token.hex()}")
                for member in others:
                    port, token = store.get(f"gate/{member.rank}").split()
                    self.out[member.rank] = self._reach(member, int(port), bytes.fromhex(token.decode()))
                self._wait(others)
            except BaseException:
                with self._changed:
                    self._closing = True  # connections that authenticate from now on are closed
                for line in (*self.out.values(), *self.into.values()):
                    line.close()
                raise
            finally:
                self._closing = True
                accepting.join(2 * POLL_S + 1.0)
        for line in (*self.out.values(), *self.into.values()):
            line.settimeout(None)

    def _reach(self, member: Member, port: int, token: bytes) -> ssl.SSLSocket:
        why = ""
        while (left_s := self._end - time.monotonic()) > 0:
            try:
                line = socket.create_connection((member.address, port), min(HANDSHAKE_S, left_s))
                with closed_on_error(line):
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    safe = close_on_fork(self._outside.wrap_socket(line))
                with closed_on_error(safe):
                    if safe.getpeercert(True) != self._certificates[member.rank]:
                        raise ConnectionError("another rank answered")
                    if exactly(safe, TOKEN) != token:
                        raise ConnectionError("another lane answered")
                return safe
            except TimeoutError as error:  # the last attempt has little time; an earlier error says more
                why = why or str(error)
            except OSError as error:  # it may be busy with unauthenticated connections
                why = str(error)
            time.sleep(PAUSE_S)
        raise LinkError(
            f"{self.members[self.rank]} could not open a TLS connection to {member} at port {port}: "
            f"{why or 'no answer'}; look at its output",
            member.rank,
        )

    def _wait(self, others: Sequence[Member]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self.into) == len(others), max(0.0, self._end - time.monotonic()))
            missing = [member for member in others if member.rank not in self.into]
        if missing:
            names, own = ", ".join(map(str, missing)), self.members[self.rank]
            raise LinkError(f"{names} did not open a TLS connection to {own}; look at its output", missing[0].rank)

    def _accept(self, server: socket.socket) -> None:
        while not self._closing:
            try:
                line, _ = server.accept()
                line.settimeout(HANDSHAKE_S)
                with closed_on_error(line):
                    safe = self._inside.wrap_socket(line, server_side=True, do_handshake_on_connect=False)
                    close_on_fork(safe)
            except TimeoutError:
                continue
            except OSError:  # the client has closed it; or no descriptor is free, and accept will be tried again
                time.sleep(PAUSE_S)
                continue
            with self._changed:
                self._strangers.append(safe)
                oldest = self._strangers.pop(0) if len(self._strangers) > MAX_STRANGERS else None
            if oldest:
                _shut_down(oldest)
            threading.Thread(target=self._authenticate, args=(safe,), name="paceline greeting", daemon=True).start()

    def _authenticate(self, safe: ssl.SSLSocket) -> None:
        try:
            with closed_on_error(safe):
                safe.do_handshake()
                peer = self._certificates.index(safe.getpeercert(True) or b"")
                safe.sendall(self._token)
        except (OSError, ValueError):
            return
        finally:
            with self._changed:
                if safe in self._strangers:
                    self._strangers.remove(safe)
        with self._changed:
            superseded: ssl.SSLSocket | None = safe  # closed below, unless a connection is still expected
            if peer != self.rank and not self._closing:
                superseded, self.into[peer] = self.into.get(peer), safe
            self._changed.notify_all()
        if superseded:
            superseded.close()  # the peer has connected again, and uses the new connection alone

    def close(self) -> None:
        """Threads that read or write on a connection get an error, and close it."""
        for line in (*self.out.values(), *self.into.values()):
            _shut_down(line)


def _shut_down(line: socket.socket) -> None:
    """A thread that reads or writes there gets an error."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(line, socket.SHUT_RDWR)


NEEDS = "cryptography"
BEGIN, NEVER = datetime.datetime(1970, 1, 2), datetime.datetime(9999, 12, 31, 23, 59, 59)  # clocks may be wrong


def check() -> None:
    """Raises ValueError where nothing can be encrypted here."""
    if importlib.util.find_spec(NEEDS) is None:
        raise ValueError(
            f"encryption needs the package {NEEDS}, which is not installed here; pip install 'paceline[encrypt]' on "
            f"every node, or leave --encrypt (PACELINE_ENCRYPT) out"
        )


class Identity:
    """A private key and its self-signed ``certificate``, which is published, in DER."""

    def __init__(self) -> None:
        check()
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        # OpenSSL finds a certificate's issuer by name: each has a unique name, and is its own issuer
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, secrets.token_hex(16))])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(BEGIN).not_valid_after(NEVER)
        made = builder.sign(key, hashes.SHA256())
        self.certificate = made.public_bytes(serialization.Encoding.DER)
        self._both = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + made.public_bytes(serialization.Encoding.PEM)

    def context(self, server: bool, certificates: Sequence[bytes]) -> ssl.SSLContext:
        """TLS 1.3 only with peers that have one of these certificates, and its key; for both sides."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=b"".join(certificates))
        if server:
            context.num_tickets = 0  # session tickets would be written by the server, and only the client may write
        memory = os.memfd_create("paceline")  # Python loads keys only from files: this one is in memory
        try:
            os.write(memory, self._both)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context
