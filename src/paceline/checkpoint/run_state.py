"""All that a run is, as values: to be kept in a checkpoint, and to go on from. ``pace`` is `session.Pace`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.checkpoint import codec_state
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.engine.compute import rng
from paceline.exchange.flow import buffer_broadcast

MEMORIES = "state['memories']"  # where they lie in a checkpoint: values that nobody changes
CHOSEN = ("forms", "never", "seen", "groups", "most", "total")  # of an exchange, for its nodes and their engines


def state(pace: Any) -> dict[str, Any]:
    """Everything but the weights. Every process must call it."""
    mine = json.dumps(rng.to_json(rng.state())).encode()
    exchange = pace.exchange.state()
    memory = exchange.pop("memory", None)
    return {
        "epoch": pace.epoch,
        "next_step": pace.next_step,
        "began": pace.began,
        "call": pace.calls + pace.between,
        "between": pace.between,
        "join": pace.number,
        "seed": pace.job.seed,
        "batch_size": pace.job.batch_size,
        "shares": list(pace.shares),
        "optimizer_kind": type(pace.job.optimizer).__name__,
        "optimizer": pace.engine.optimizer_state(),
        "schedule": pace.job.scheduler.state_dict() if pace.job.scheduler else None,
        "scaler": dict(vars(pace.loop.scaler)),
        "exchange": exchange,
        "specs": _names(pace),
        "random": [json.loads(words) for words in pace.exchange.gather(mine)],
        "memories": codec_state.collect(pace.exchange, pace.world.local_rank == 0, memory),
        "methods": pace.methods,
        "plan": pace.row,
        "facts": pace.facts,
    }


def restore(pace: Any, kept: Checkpoint) -> None:
    """Every process must call it. Raises ValueError for a checkpoint of another model or job."""
    said, job = kept.state, pace.job
    mine = {"seed": job.seed, "batch_size": job.batch_size, "optimizer_kind": type(job.optimizer).__name__}
    if different := [name for name, value in mine.items() if said[name] != value]:
        faults = ", ".join(f"{name.removesuffix('_kind')} {said[name]} (here {mine[name]})" for name in different)
        raise ValueError(
            f"the checkpoint {kept.path} was made with {faults}; give the same, or "
            f"begin from the weights alone: model.load_state_dict(safetensors.torch.load_file(...))"
        )
    load(job.model, kept.weights, str(kept.path))
    try:
        pace.engine.load_optimizer_state(said["optimizer"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"the checkpoint {kept.path} is of another optimizer: {error}") from None
    if job.scheduler and said["schedule"]:
        job.scheduler.load_state_dict(said["schedule"])
    if pace.loop.scaler.moves and said["scaler"]["moves"]:
        vars(pace.loop.scaler).update(said["scaler"])
    if exchange := _exchange(pace, said):
        pace.exchange.load(exchange)
    if len(said["random"]) == pace.world.size:
        rng.set_state(rng.of_json(said["random"][pace.world.rank]))
    pace.epoch, pace.next_step, pace.began = said["epoch"], said["next_step"], said["began"]
    pace.loop.num_steps, pace.facts = kept.step, said["facts"]
    shares = tuple(said.get("shares", ()))
    if pace.loop.balance and pace.loop.balance.allows(shares):
        pace.loop.seat = dataclasses.replace(pace.loop.seat, shares=shares)
    pace.exchange.spread(pace.engine.weights)
    buffer_broadcast.spread(job.model, pace.engine, pace.exchange)


def _exchange(pace: Any, said: dict[str, Any]) -> dict[str, Any]:
    """What this node's exchange goes on from: its choices on the same nodes and plan, its codec's memory on any."""
    # nodes may have rows of their own, but the forms and the order of pieces are everyone's: the leader decides
    same = json.loads(pace.exchange.gather(json.dumps(said["plan"] == pace.row).encode())[0])
    methods, world, exchange = said.get("methods", pace.methods), pace.world, dict(said["exchange"])
    remembered = said.get("memories") or [exchange.get("memory")]
    exchange.pop("memory", None)
    if pace.leader and methods != pace.methods and codec_state.owes(remembered):
        here = pace.methods
        _tell_left_out(pace, [f"{k} {was!r} (here {here[k]!r})" for k, was in methods.items() if was != here[k]])
    if methods["exchange"] != pace.methods["exchange"]:
        return {}
    if "specs" in said and said["specs"] != (mine := _names(pace)):  # other layers train, or are compiled
        if pace.leader and codec_state.owes(remembered):
            _tell_left_out(pace, [f"{len(said['specs'])} pieces of other parameters (here {len(mine)})"])
        return {name: value for name, value in exchange.items() if name not in (*CHOSEN, "owing")}
    alike = methods["codec"] == pace.methods["codec"]
    if not same or not alike or len(said.get("shares", pace.shares)) != world.num_nodes:
        exchange = {name: value for name, value in exchange.items() if name not in CHOSEN}
    if not alike:
        exchange.pop("owing", None)
    if alike and remembered[0] and exchange:
        device = pace.engine.weights[0].device
        exchange["memory"] = codec_state.deal(pace.codec, remembered, world.node, world.num_nodes, device)
    return exchange


def _names(pace: Any) -> list[list[str]]:
    """What its pieces are of."""
    return [list(spec.names) for spec in pace.engine.specs]


def _tell_left_out(pace: Any, other: Sequence[str]) -> None:
    text = (
        f"the checkpoint was made with {' and '.join(other)}: what its codec still owed is left out, which the same "
        f"would go on with"
    )
    sys.stderr.write(f"paceline: {text}\n")
    pace.record.write("hint", text=text)


def load(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Raises ValueError naming what differs."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        what = " ".join(line.strip() for line in str(error).splitlines()[1:4])
        raise ValueError(
            f"the checkpoint {source} is of another model: {what}; build the model that it was made with, or give "
            f"another folder"
        ) from None
