"""Handshake of the ranks as they make a wrapper, over the script's store, before any collective operation of ours."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from paceline.ddp.sums.bucket_sums import checksum
from paceline.ddp.sums.factors import Weight
from paceline.link.net.keepalive import addresses

WAIT = timedelta(seconds=60)  # ranks have just verified their parameters together
ROWS = 8, 64  # of the products that are compared


def message(weights: Sequence[Weight], fused: Sequence[str], *, cpu: bool, shares: bool, sums: bool) -> dict[str, Any]:
    """Of one rank. ``fused``: weights that are left to the optimizer; ``cpu``: where its model is; ``shares``: it may
    sum in shared memory; ``sums``: and whole buckets in a lane of ours."""
    own = {"addresses": addresses(), "weights": [_fingerprint(weight) for weight in weights], "machine": _machine()}
    return {**own, "fused": list(fused), "cpu": cpu, "shares": shares, "sums": sums}


def exchange(store: Any, number: int, rank: int, size: int, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's message; on all ranks none if one sends none within WAIT, as with torch's own class on that rank.
    Raises ValueError where ranks leave other weights to their optimizer."""
    place = f"paceline/ddp/handshake/{number}"
    store.set(f"{place}/{rank}", json.dumps(own))
    keys = [f"{place}/{other}" for other in range(size)]
    try:
        store.wait(keys, WAIT)
        complete = True
    except RuntimeError:
        complete = False
    if store.add(f"{place}/deciding", 1) == 1:  # for all: another may have come a moment later, and found every message
        store.set(f"{place}/complete", str(complete))
    if store.get(f"{place}/complete") != b"True":
        return []
    messages = [json.loads(store.get(key)) for key in keys]
    if unlike := [i for i, one in enumerate(messages) if one["fused"] != own["fused"]]:
        raise ValueError(f"rank {unlike[0]} has another PACELINE_DDP_OPTIMIZER, or another model, than rank {rank}")
    return messages


def machines(messages: Sequence[dict[str, Any]]) -> list[int]:
    """That of each rank, counted from 0 in the order of their first ranks."""
    hosts = [tuple(one["addresses"]) for one in messages]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def alike(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks have the same weights to send as factors, and multiply to the same bits."""
    return bool(messages) and all(one[what] == messages[0][what] for one in messages for what in ("weights", "machine"))


def _machine() -> list[Any]:
    return [platform.machine(), torch.__version__, torch.get_num_threads()]


def _fingerprint(weight: Weight) -> list[Any]:
    generator, found = torch.Generator().manual_seed(1), list[int]()
    for rows in ROWS:
        sides = (
            torch.randn(rows, n, generator=generator, dtype=weight.parameter.dtype) for n in weight.parameter.shape
        )
        left, right = sides
        found.append(checksum(left.T @ right))
    return [weight.name, list(weight.parameter.shape), str(weight.parameter.dtype), *found]
