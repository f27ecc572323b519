"""Routes to the peers: this node's own address, and whether every node reaches every other.

Each rank listens on its address, and sends to every connection a token that it published at the rendezvous. It reads
nothing from these connections.
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
CONNECT_S = 5.0  # TCP retransmits a lost SYN after 1 and 3 s
TOKEN = 16  # bytes


def resolve(host: str, patience_s: float = REACH_S / 2) -> str:
    """The address of MASTER_ADDR, resolved on this machine, IPv4 first. Raises LinkError where it is a loopback one."""
    end = time.monotonic() + patience_s
    found: list[Any] = []
    why: list[str] = []

    def query() -> None:
        while not found and time.monotonic() < end:
            try:
                found.extend(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
            except OSError as error:
                why.append(error.strerror or str(error))
                time.sleep(0.2)  # in a cluster that is starting, names appear with their machines

    # a name server that does not answer blocks getaddrinfo without a limit: hence the thread
    thread = threading.Thread(target=query, name="paceline resolve", daemon=True)
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
    """(variable, interface name) of GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME if that is no pattern; else empty."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        name = os.environ.get(variable, "").removeprefix("=")
        if name and (variable == "GLOO_SOCKET_IFNAME" or name in psutil.net_if_addrs()):
            return variable, name
    return "", ""


def own_address(used: str) -> str:
    """The address of the `interface` if one is named, else ``used``, the local one on the route to rank 0."""
    variable, name = interface()
    if name:
        interfaces = psutil.net_if_addrs()
        for family in (socket.AF_INET, socket.AF_INET6):
            for card in interfaces.get(name, ()):
                if card.family == family:
                    return str(card.address)
        raise LinkError(
            f"{variable}={name!r} is no interface of {socket.gethostname()} with an address; there are: "
            f"{', '.join(sorted(interfaces))}; name one of these, or unset it"
        )
    return used


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses() -> str:
    own = (card.address for cards in psutil.net_if_addrs().values() for card in cards if card.family == socket.AF_INET)
    return ", ".join(address for address in own if not is_loopback(address)) or "none"


@dataclass(frozen=True)
class Member:
    """A rank's address, as published at the rendezvous."""

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
    """Sends this rank's token to every connection, until closed."""

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
        self._thread = threading.Thread(target=self._run, name="paceline reachability", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(OSError):
                line, _ = self._server.accept()
                with line:
                    line.send(self.member.token)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)
        self._server.close()


def complaint(own: Member, members: Sequence[Member], limit_s: float = CONNECT_S) -> str:
    """Why ``own`` cannot train with these: an error text for the first that it does not reach. Empty where none."""
    for member in members:
        if is_loopback(member.address) and not is_loopback(own.address):
            return (
                f"{member} published a loopback address, which only its own machine reaches; let it reach rank 0 by an "
                f"address in the network: check its GLOO_SOCKET_IFNAME, and its MASTER_ADDR"
            )
    others = [member for member in members if member.rank != own.rank]
    if not others:
        return ""
    with ThreadPoolExecutor(min(32, len(others))) as pool:
        found = pool.map(lambda member: _reach(own, member, limit_s), others)
        return next(filter(None, found), "")


def _reach(own: Member, peer: Member, limit_s: float) -> str:
    end = time.monotonic() + limit_s
    why, received = f"no answer within {limit_s:.0f} s", b""
    try:
        with socket.create_connection((peer.address, peer.port), limit_s, (own.address, 0)) as line:
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
        f"{own} does not reach {peer} at port {peer.port}: {why}; a firewall that lets only one direction through? All "
        f"ports that the system gives out must be open among the nodes, both ways"
    )
