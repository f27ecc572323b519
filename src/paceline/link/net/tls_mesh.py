"""TLS connections between all ranks, for one lane: one from each rank to each other, written at one end alone.

    guest -> gate:  TLS 1.3; both show the certificate that they published at the rendezvous
    gate -> guest:  the token that the gate published there, so that no lane is taken for another

A rank listens until all have come; then its port is closed. OpenSSL does not let a line be read and written at once by
two threads, so after that only the guest writes. Unauthenticated connections have HANDSHAKE_S, and are never more than
MAX_STRANGERS: the oldest is closed.

Certificates are published at the rendezvous, which only members can join or change; no authority signs them, and only
their own bytes count: neither names nor dates. A key lives as long as its link, and is never written to a disk.
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
from paceline.link.net.framing import alone, closed_on_error
from paceline.link.net.route import Member

HANDSHAKE_S = 5.0
MAX_STRANGERS = 64
PAUSE_S, POLL_S = 0.05, 0.2
TOKEN = 16  # bytes


class Mesh:
    """``out[rank]`` and ``into[rank]``: this rank's lines to the others, and theirs to it. Raises LinkError.

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
            welcoming = threading.Thread(target=self._welcome, args=(server,), name="paceline gate", daemon=True)
            welcoming.start()
            try:
                store.set(f"gate/{rank}", f"{server.getsockname()[1]} {self._token.hex()}")
                for member in others:
                    port, token = store.get(f"gate/{member.rank}").split()
                    self.out[member.rank] = self._reach(member, int(port), bytes.fromhex(token.decode()))
                self._wait(others)
            except BaseException:
                with self._changed:
                    self._closing = True  # who is greeted from now on is hung up on
                for line in (*self.out.values(), *self.into.values()):
                    line.close()
                raise
            finally:
                self._closing = True
                welcoming.join(2 * POLL_S + 1.0)
        for line in (*self.out.values(), *self.into.values()):
            line.settimeout(None)

    def _reach(self, member: Member, port: int, token: bytes) -> ssl.SSLSocket:
        why = ""
        while (left_s := self._end - time.monotonic()) > 0:
            try:
                line = socket.create_connection((member.address, port), min(HANDSHAKE_S, left_s))
                with closed_on_error(line):
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    safe = alone(self._outside.wrap_socket(line))
                with closed_on_error(safe):
                    if safe.getpeercert(True) != self._certificates[member.rank]:
                        raise ConnectionError("another rank answered")
                    if exactly(safe, TOKEN) != token:
                        raise ConnectionError("another lane answered")
                return safe
            except TimeoutError as error:  # the last try has little time, and says less than those before
                why = why or str(error)
            except OSError as error:  # it may be busy with strangers
                why = str(error)
            time.sleep(PAUSE_S)
        raise LinkError(
            f"{self.members[self.rank]} could not begin to talk with {member} at port {port}: {why or 'no answer'}; "
            f"look at what it says",
            member.rank,
        )

    def _wait(self, others: Sequence[Member]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self.into) == len(others), max(0.0, self._end - time.monotonic()))
            missing = [member for member in others if member.rank not in self.into]
        if missing:
            who = ", ".join(map(str, missing))
            raise LinkError(f"{who} did not begin to talk with {self.members[self.rank]}; look there", missing[0].rank)

    def _welcome(self, server: socket.socket) -> None:
        while not self._closing:
            try:
                line, _ = server.accept()
                line.settimeout(HANDSHAKE_S)
                with closed_on_error(line):
                    safe = alone(self._inside.wrap_socket(line, server_side=True, do_handshake_on_connect=False))
            except TimeoutError:
                continue
            except OSError:  # it has left again; or no descriptor is free, and it stays ready to be accepted
                time.sleep(PAUSE_S)
                continue
            with self._changed:
                self._strangers.append(safe)
                oldest = self._strangers.pop(0) if len(self._strangers) > MAX_STRANGERS else None
            if oldest:
                _hang_up(oldest)
            threading.Thread(target=self._greet, args=(safe,), name="paceline greeting", daemon=True).start()

    def _greet(self, safe: ssl.SSLSocket) -> None:
        try:
            with closed_on_error(safe):
                safe.do_handshake()
                guest = self._certificates.index(safe.getpeercert(True) or b"")
                safe.sendall(self._token)
        except (OSError, ValueError):
            return
        finally:
            with self._changed:
                if safe in self._strangers:
                    self._strangers.remove(safe)
        with self._changed:
            before: ssl.SSLSocket | None = safe  # nobody is waited for any more
            if guest != self.rank and not self._closing:
                before, self.into[guest] = self.into.get(guest), safe
            self._changed.notify_all()
        if before:
            before.close()  # it tried again, and knows of one line alone

    def close(self) -> None:
        """Whoever reads or writes on a line is told, and closes it."""
        for line in (*self.out.values(), *self.into.values()):
            _hang_up(line)


def _hang_up(line: socket.socket) -> None:
    """Whoever reads or writes there, in whatever thread, is told."""
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
    """``certificate``: what the others are told, in DER."""

    def __init__(self) -> None:
        check()
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        # OpenSSL looks for who vouches for a certificate by name: each has its own, and vouches for itself
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, secrets.token_hex(16))])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(BEGIN).not_valid_after(NEVER)
        made = builder.sign(key, hashes.SHA256())
        self.certificate = made.public_bytes(serialization.Encoding.DER)
        self._both = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + made.public_bytes(serialization.Encoding.PEM)

    def context(self, server: bool, certificates: Sequence[bytes]) -> ssl.SSLContext:
        """TLS 1.3 with whoever has one of these certificates, and its key; with nobody else, on either side."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=b"".join(certificates))
        if server:
            context.num_tickets = 0  # nothing may be said on a line that only one side writes
        memory = os.memfd_create("paceline")  # Python takes keys from files alone: this one is on no disk
        try:
            os.write(memory, self._both)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context
