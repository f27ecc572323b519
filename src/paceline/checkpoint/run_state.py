"""The whole state of a run as values, to be saved in a checkpoint and resumed from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.checkpoint import codec_state
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.engine.compute import rng
from paceline.registry import current
from paceline.report.log import log
from paceline.step import buffer_broadcast
from paceline.step.run_state import RunState

MEMORIES = "state['memories']"  # where they lie in a checkpoint: values that nobody changes
CHOSEN = ("forms", "never", "seen", "groups", "most", "total")  # of an exchange, for its nodes and their engines


def state(run: RunState) -> dict[str, Any]:
    """Everything but the weights. Every process must call it."""
    mine = json.dumps(rng.to_json(rng.state())).encode()
    exchange = run.exchange.state()
    memory = exchange.pop("memory", None)
    return {
        "epoch": run.cursor.epoch,
        "next_step": run.cursor.next_step,
        "began": run.cursor.began,
        "call": run.cursor.calls + run.cursor.between,
        "between": run.cursor.between,
        "join": run.number,
        "seed": run.job.seed,
        "batch_size": run.job.batch_size,
        "shares": list(run.shares),
        "optimizer_kind": type(run.job.optimizer).__name__,
        "optimizer": run.engine.optimizer_state(),
        "schedule": run.job.scheduler.state_dict() if run.job.scheduler else None,
        "scaler": dict(vars(run.scaler)),
        "exchange": exchange,
        "specs": _names(run),
        "random": [json.loads(words) for words in run.control.all_gather(mine)],
        "memories": codec_state.collect(run.control, (lambda: run.link) if run.world.local_rank == 0 else None, memory),
        "methods": run.methods,
        "plan": run.row,
        "facts": run.facts,
        "again": list(run.cursor.again),
    }


def restore(run: RunState, kept: Checkpoint) -> None:
    """Every process must call it. Raises ValueError for a checkpoint of another model or job."""
    said, job = kept.state, run.job
    mine = {"seed": job.seed, "batch_size": job.batch_size, "optimizer_kind": type(job.optimizer).__name__}
    if different := [name for name, value in mine.items() if said[name] != value]:
        faults = ", ".join(f"{name.removesuffix('_kind')} {said[name]} (here {mine[name]})" for name in different)
        raise ValueError(
            f"the checkpoint {kept.path} was made with {faults}; give the same, or "
            f"begin from the weights alone: model.load_state_dict(safetensors.torch.load_file(...))"
        )
    load(job.model, kept.weights, str(kept.path))
    try:
        run.engine.load_optimizer_state(said["optimizer"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"the checkpoint {kept.path} is of another optimizer: {error}") from None
    if job.scheduler and said["schedule"]:
        job.scheduler.load_state_dict(said["schedule"])
    if run.scaler.moves and said["scaler"]["moves"]:
        vars(run.scaler).update(said["scaler"])
    if exchange := _exchange(run, said):
        run.exchange.load(exchange)
    if len(said["random"]) == run.world.world_size:
        rng.set_state(rng.of_json(said["random"][run.world.rank]))
    run.cursor.epoch, run.cursor.next_step, run.cursor.began = said["epoch"], said["next_step"], said["began"]
    run.num_steps, run.facts = kept.step, said["facts"]
    run.cursor.again[:] = said.get("again", [])
    shares = tuple(said.get("shares", ()))
    if run.balance and run.balance.allows(shares):
        run.assignment = dataclasses.replace(run.assignment, shares=shares)
    run.control.broadcast(run.engine.weights)
    buffer_broadcast.broadcast_buffers(job.model, run.engine, run.control)


def _exchange(run: RunState, said: dict[str, Any]) -> dict[str, Any]:
    """What this node's exchange goes on from: its choices on the same nodes and plan, its codec's memory on any."""
    # nodes may have rows of their own, but the forms and the order of pieces are everyone's: the leader decides
    same = json.loads(run.control.all_gather(json.dumps(current("engine", said["plan"]) == run.row).encode())[0])
    methods, world, exchange = dict(said.get("methods", run.methods)), run.world, dict(said["exchange"])
    methods["exchange"] = current("exchange", methods["exchange"])
    remembered = said.get("memories") or [exchange.get("memory")]
    exchange.pop("memory", None)
    if run.leader and methods != run.methods and codec_state.owes(remembered):
        here = run.methods
        _tell_left_out(run, [f"{k} {was!r} (here {here[k]!r})" for k, was in methods.items() if was != here[k]])
    if methods["exchange"] != run.methods["exchange"]:
        return {}
    if "specs" in said and said["specs"] != (mine := _names(run)):  # other layers train, or are compiled
        if run.leader and codec_state.owes(remembered):
            _tell_left_out(run, [f"{len(said['specs'])} pieces of other parameters (here {len(mine)})"])
        return {name: value for name, value in exchange.items() if name not in (*CHOSEN, "owing")}
    alike = methods["codec"] == run.methods["codec"]
    if not same or not alike or len(said.get("shares", run.shares)) != world.num_nodes:
        exchange = {name: value for name, value in exchange.items() if name not in CHOSEN}
    if not alike:
        exchange.pop("owing", None)
    if alike and remembered[0] and exchange:
        device = run.engine.weights[0].device
        exchange["memory"] = codec_state.redistribute(run.codec, remembered, world.node, world.num_nodes, device)
    return exchange


def _names(run: RunState) -> list[list[str]]:
    """What its pieces are of."""
    return [list(bucket.names) for bucket in run.engine.buckets]


def _tell_left_out(run: RunState, other: Sequence[str]) -> None:
    text = (
        f"the checkpoint was made with {' and '.join(other)}: what its codec still owed is left out, which the same "
        f"would go on with"
    )
    log.warning(text)
    run.record.write("hint", text=text)


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
