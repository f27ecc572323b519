"""Routes to the peers: this node's own address, and whether every node reaches every other.

Each rank listens on its address, and says a token that only the meeting point knows to whoever connects. It reads
nothing from them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from paceline.errors import LinkError

REACH_S = 10.0
KNOCK_S = 5.0  # a first packet that is lost is sent again after 1 and 3 s
TOKEN = 16  # bytes


def resolve(host: str, patience_s: float = REACH_S / 2) -> str:
    """The address of MASTER_ADDR as this machine sees it, IPv4 first. Raises LinkError for the loopback trap."""
    end = time.monotonic() + patience_s
    found: list[Any] = []
    why: list[str] = []

    def ask() -> None:
        while not found and time.monotonic() < end:
            try:
                found.extend(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
            except OSError as error:
                why.append(error.strerror or str(error))
                time.sleep(0.2)  # in a young cluster names come up with their machines

    # a server of names that is silent would hold this thread for as long as it likes
    thread = threading.Thread(target=ask, name="paceline resolve", daemon=True)
    thread.start()
    thread.join(patience_s + 0.5)
    if not found:
        raise LinkError(
            f"MASTER_ADDR={host!r} is no name that {socket.gethostname()} knows "
            f"({why[-1] if why else 'no answer'}); give rank 0's address"
        )
    address = str(min(found, key=lambda way: way[0] != socket.AF_INET)[4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise LinkError(f"MASTER_ADDR={host!r} is every address of a machine; give one (here: {_addresses()})")
    if is_loopback(address) and address != host and host != "localhost":
        raise LinkError(
            f"MASTER_ADDR={host!r} is {address} on {socket.gethostname()}, which no other machine reaches: a name that "
            f"resolves to loopback; set MASTER_ADDR to rank 0's address in the network (here: {_addresses()}), or to "
            f"127.0.0.1 where all ranks are on this machine"
        )
    return address


def interface() -> tuple[str, str]:
    """(the variable that names one, the name): gloo's, or NCCL's where that is one name and no pattern; else empty."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        name = os.environ.get(variable, "").removeprefix("=")
        if name and (variable == "GLOO_SOCKET_IFNAME" or name in psutil.net_if_addrs()):
            return variable, name
    return "", ""


def own_address(used: str) -> str:
    """The address of the `interface` if one is named, else the one ``used`` on the way to rank 0."""
    variable, name = interface()
    if name:
        cards = psutil.net_if_addrs()
        for family in (socket.AF_INET, socket.AF_INET6):
            for card in cards.get(name, ()):
                if card.family == family:
                    return str(card.address)
        raise LinkError(
            f"{variable}={name!r} is no interface of {socket.gethostname()} with an address; there are: "
            f"{', '.join(sorted(cards))}; name one of these, or unset it"
        )
    return used


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses() -> str:
    own = (card.address for cards in psutil.net_if_addrs().values() for card in cards if card.family == socket.AF_INET)
    return ", ".join(address for address in own if not is_loopback(address)) or "none"


@dataclass(frozen=True)
class Member:
    """Where a rank is: what it tells the others at the meeting point."""

    rank: int
    host: str
    address: str
    port: int
    token: bytes

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.address})"

    def write(self) -> bytes:
        return f"{self.address} {self.port} {self.token.hex()} {self.host}".encode()

    @classmethod
    def read(cls, rank: int, text: bytes) -> Member:
        address, port, token, host = text.decode().split(" ", 3)
        return cls(rank, host, address, int(port), bytes.fromhex(token))


class ReachabilityServer:
    """Says this rank's token to all who connect, until closed."""

    def __init__(self, rank: int, host: str, address: str):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._server = socket.create_server((address, 0), family=family, backlog=128)
        except OSError as error:
            raise LinkError(
                f"rank {rank} on {host} cannot listen on {address} ({error.strerror or error}); check "
                f"GLOO_SOCKET_IFNAME and the addresses of this machine ({_addresses()})"
            ) from error
        self._server.settimeout(0.2)
        self.member = Member(rank, host, address, self._server.getsockname()[1], secrets.token_bytes(TOKEN))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline door", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(OSError):
                guest, _ = self._server.accept()
                with guest:
                    guest.send(self.member.token)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)
        self._server.close()


def complaint(me: Member, members: Sequence[Member], limit_s: float = KNOCK_S) -> str:
    """Why ``me`` cannot train with these: the first that it does not reach. Empty where all is well."""
    for member in members:
        if is_loopback(member.address) and not is_loopback(me.address):
            return (
                f"{member} tells the others an address where only its own machine comes; let it reach rank 0 by an "
                f"address in the network: check its GLOO_SOCKET_IFNAME, and its MASTER_ADDR"
            )
    others = [member for member in members if member.rank != me.rank]
    if not others:
        return ""
    with ThreadPoolExecutor(min(32, len(others))) as crowd:
        found = crowd.map(lambda member: _knock(me, member, limit_s), others)
        return next(filter(None, found), "")


def _knock(me: Member, peer: Member, limit_s: float) -> str:
    end = time.monotonic() + limit_s
    why, received = f"no answer within {limit_s:.0f} s", b""
    try:
        with socket.create_connection((peer.address, peer.port), limit_s, (me.address, 0)) as line:
            while len(received) < TOKEN and (left_s := end - time.monotonic()) > 0:
                line.settimeout(left_s)
                if not (more := line.recv(TOKEN - len(received))):
                    break
                received += more
    except TimeoutError:
        pass
    except OSError as error:
        why = error.strerror or str(error)
    if received == peer.token:
        return ""
    if len(received) == TOKEN:
        why = "another process answered"
    return (
        f"{me} does not reach {peer} at port {peer.port}: {why}; a firewall that lets only one direction through? All "
        f"ports that the system gives out must be open among the nodes, both ways"
    )
