"""Checks of the arguments of `join` before the rendezvous: all faults at once, each in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from paceline import contract
from paceline.data import load_balance
from paceline.engine.checks import wrapped_models
from paceline.engine.compute import deferred_update
from paceline.engine.compute.precision import parse_row
from paceline.environment import LaunchEnvironment
from paceline.registry import CODEC, EXCHANGE, FIXED_ORDER, ONE_PROCESS, PROCESSES, head, made, parse, says

MAX_SHARES = 256


def faults(model: Any, optimizer: Any, arguments: Mapping[str, Any], joined: Iterable[nn.Module] = ()) -> list[str]:
    """All faults that can be found before a job is made. ``arguments``: those of `join` by name. ``joined``: the models
    that this process trains already."""
    found = wrapped_models.faults(model, optimizer) if isinstance(model, nn.Module) else []
    taken = {id(each) for other in joined for each in other.parameters() if each.requires_grad}
    if isinstance(model, nn.Module) and (twice := [n for n, p in model.named_parameters() if id(p) in taken]):
        found.append(
            f"parameter {twice[0]!r} is trained by another join() that is not closed; close that first (pace.close(), "
            f"or the end of its with block), or give all losses to one: pace.backward(loss) may be called several times"
        )

    def note(check: Callable[..., Any], *given: Any) -> None:
        try:
            check(*given)
        except ValueError as error:
            found.append(str(error).removeprefix("join: "))

    for name in ("engine", "exchange", "codec"):
        value = arguments[name] or (os.environ.get("PACELINE_ENGINE") if name == "engine" else None)
        if isinstance(value, str) and name == "engine":
            note(lambda row: parse("engine", parse_row(row)[0]), value)
        elif value is not None:
            note(made, name, value)
    note(load_balance.parse_shares, arguments["shares"])
    note(deferred_update.given, arguments["overlap"])
    keep, reproducible, encrypt, folder = (arguments[name] for name in ("keep", "reproducible", "encrypt", "folder"))
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        found.append(f"keep is how many checkpoints stay, an int >= 1, got {keep!r}")
    if not isinstance(reproducible, int) or not 0 <= reproducible <= MAX_SHARES:
        found.append(f"reproducible is True, False or a number of shares up to {MAX_SHARES}, got {reproducible!r}")
    if encrypt not in (None, True, False):
        found.append(f"encrypt is True, False or None (PACELINE_ENCRYPT), got {encrypt!r}")
    if folder is not None and not isinstance(folder, str | os.PathLike):
        found.append(f"folder is a path or None, got {folder!r}")
    return found


def clashes(
    world: LaunchEnvironment,
    chosen: str,
    precision: str,
    agreeing: contract.Exchange,
    exchange: str,
    codec: str,
    encoding: contract.Codec,
    buffers: str = "own",
    num_shares: int = 0,
    batch_norm: str = "local",
) -> list[str]:
    """The combinations that are not supported. ``chosen``: the engine's name, and ``num_shares`` its virtual shares;
    ``agreeing``: the exchange named ``exchange``; ``encoding``: the codec named ``codec``."""
    found: list[str] = []
    name, count = head(chosen)
    if world.local_size > 1 and (not says("engine", name, "starts_processes") or count != str(world.local_size)):
        found.append(
            f"{world.local_size} processes were started on this node (LOCAL_WORLD_SIZE), but the engine is {chosen!r}; "
            f"use '{PROCESSES}:{world.local_size}', or start one process per node"
        )
    if codec != CODEC and not agreeing.uses_codec:
        what = "gradients" if agreeing.consensus == "step" else "weights"
        found.append(f"exchange {exchange!r} sends {what} as they are and takes no codec, got {codec!r}; use {CODEC!r}")
    if num_shares and agreeing.consensus == "step" and not agreeing.fixed_order:
        found.append(
            f"engine {chosen!r} makes sums that are the same bits for any number of nodes, and exchange {exchange!r} "
            f"adds them up in another order; use exchange={FIXED_ORDER!r}, or leave it out"
        )
    if agreeing.divides_optimizer and says("engine", name, "starts_processes"):
        found.append(
            f"exchange {exchange!r} divides the optimizer's work between nodes, and engine {chosen!r} divides it among "
            f"the processes of a node; use {ONE_PROCESS}, or exchange={EXCHANGE!r}"
        )
    if world.min_nodes and agreeing.overlap == "forward":
        found.append(
            f"nodes may be lost here (PACELINE_NODES), and a step that may be retried must apply all updates at once: "
            f"use overlap='backward', got {agreeing.overlap!r}"
        )
    if world.min_nodes and batch_norm == "sync" and agreeing.consensus != "step":
        found.append(
            f"nodes may be lost here (PACELINE_NODES), and with batch_norm='sync' all nodes take part in each step: "
            f"use an exchange that votes on each step, such as {EXCHANGE}, or batch_norm='local'; got {exchange!r}"
        )
    if buffers == "broadcast" and agreeing.consensus != "step":
        found.append(
            f"buffers='broadcast' runs after each step, and with exchange {exchange!r} nodes communicate less often; "
            f"use {EXCHANGE}, or buffers='own'"
        )
    if precision == "fp16" and not encoding.scaled:
        found.append(
            f"fp16 scales gradients and skips steps, which the state of codec {codec!r} does not support; use bf16, or "
            f"codec {CODEC!r}"
        )
    return found
