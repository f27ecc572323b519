"""Rendezvous: the ranks of a run find each other at an endpoint, and check that every node reaches every other."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from paceline.environment import rendezvous_timeout_s
from paceline.errors import LinkError
from paceline.link.net import route
from paceline.link.net.auth import EncryptionKey, secret_of_environment
from paceline.link.net.framing import closed_on_error
from paceline.link.net.route import Member, ReachabilityServer
from paceline.link.net.store_client import StoreClient
from paceline.link.net.store_server import RendezvousStore
from paceline.report.log import log

dist: Any = torch.distributed  # its stubs leave out what we use

LONGER = "; where some need longer to prepare, give all PACELINE_RENDEZVOUS_TIMEOUT_S, in seconds"


class Unreached(LinkError):
    """Some ranks do not reach each other. ``peer``: the highest rank that reports this; the others may train on."""


_points: dict[tuple[str, int, bool], RendezvousStore] = {}  # of this process: a run may join more than once


def join(
    rank: int,
    size: int,
    host: str,
    port: int,
    generation: int = 0,
    patience_s: float | None = None,
    secret: bytes | None = None,
) -> tuple[StoreClient, Any, list[Member]]:
    """(the store, its part for this generation, every rank's address). Raises LinkError on every rank.

    ``secret``: PACELINE_SECRET where none is given. ``patience_s``: `rendezvous_timeout_s` where none is given.
    """
    patience_s = rendezvous_timeout_s() if patience_s is None else patience_s
    secret = secret_of_environment() if secret is None else secret
    point, place, number = _place(rank, size, host, port, secret, patience_s)
    meeting = StoreClient(place, number, secret, rank, size, patience_s, point, LONGER)
    with closed_on_error(meeting):
        store = dist.PrefixStore(f"paceline/{generation}", meeting)
        members = introduce(meeting, store)
        meeting.advice = ""
        return meeting, store, members


def _place(
    rank: int, size: int, host: str, port: int, secret: bytes, patience_s: float
) -> tuple[RendezvousStore | None, str, int]:
    """(rank 0's server, address, port): MASTER_PORT, or a free port, published in torch's store, which has that one."""
    here = f"rank {rank} of {size} on {socket.gethostname()}"
    patience = timedelta(seconds=patience_s)
    board = _board(here, size, host, port, patience)
    hides = isinstance(secret, EncryptionKey)
    key = "meeting, hidden" if hides else "meeting"
    if rank == 0:
        if (host, port, hides) not in _points:
            point = RendezvousStore(route.resolve(host), 0 if board else port, secret)
            atexit.register(point.close)
            _points[host, port, hides] = point
            if not secret and not route.is_loopback(point.address):
                log.warning(
                    f"this run has no secret: any process that reaches {point.address}:{point.port} may join; start "
                    f"all ranks with the same PACELINE_SECRET"
                )
        point = _points[host, port, hides]
        if board:
            board.set(key, f"{point.address} {point.port}")
        return point, point.address, point.port
    if not board:
        return None, route.resolve(host), port
    try:
        board.wait([key], patience)
        place, number = board.get(key).decode().split()
    except (RuntimeError, ValueError) as error:
        raise LinkError(
            f"{here}: rank 0 did not publish its rendezvous endpoint within {patience_s:.0f} s; look at its "
            f"output{LONGER}"
        ) from error
    return None, place, int(number)


def _board(here: str, size: int, host: str, port: int, patience: timedelta) -> Any:
    """The store of torchrun's agent, or of the script's default process group; None where there is neither."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if dist.is_initialized():
        return dist.PrefixStore(f"paceline/{restart}", dist.distributed_c10d._get_default_store())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        store = dist.TCPStore(host, port, size, False, patience, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise LinkError(
            f"{here} could not reach torchrun's store at {host}:{port} within {patience.total_seconds():.0f} s; check "
            f"MASTER_ADDR, MASTER_PORT, the firewall, and that torchrun is running there"
        ) from error
    return dist.PrefixStore(f"paceline/{restart}", store)


def introduce(meeting: StoreClient, store: Any, limit_s: float = route.CONNECT_S) -> list[Member]:
    """Every rank's address. All must reach each other within ``limit_s``. Raises LinkError, or `Unreached`."""
    rank, ranks = meeting.rank, range(meeting.size)
    if store.add(f"came/{rank}", 1) != 1:
        raise LinkError(
            f"{meeting.here}: another process has already come to {meeting.place} as rank {rank}; give each its own "
            f"RANK, and each run its own MASTER_PORT"
        )
    name = os.environ.get("PACELINE_HOST", socket.gethostname())
    server = ReachabilityServer(rank, name, route.own_address(meeting.address))
    try:
        store.set(f"member/{rank}", server.member.write())
        found = store.multi_get([f"member/{r}" for r in ranks])
        members = [Member.read(r, text) for r, text in enumerate(found)]
        store.set(f"reached/{rank}", route.complaint(server.member, members, limit_s))
        complaints = [text.decode() for text in store.multi_get([f"reached/{r}" for r in ranks])]
    finally:
        server.close()
    if first := next(filter(None, complaints), ""):
        raise Unreached(first, max(r for r in ranks if complaints[r]))
    return members
