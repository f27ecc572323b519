"""The complete state of a run as values, to be saved in a checkpoint and restored from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.checkpoint import codec_state
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.state_tree import pack
from paceline.engine.compute import rng, state_store
from paceline.engine.node.several_optimizers import kind_of
from paceline.registry import current
from paceline.report.log import log
from paceline.step import buffer_broadcast
from paceline.step.run_state import RunState

CONSTANT_PATH = "state['memories']"  # the gathered codec state in a checkpoint: its tensors never change
AUTOTUNED = ("forms", "never", "seen", "groups", "most", "total")  # choices that hold for the same nodes and engines


def state(run: RunState) -> dict[str, Any]:
    """Everything except the weights. Collective: every process must call it."""
    own = json.dumps(rng.to_json(rng.state())).encode()
    exchange = run.exchange.state()
    memory, optimizer = exchange.pop("memory", None), run.engine.optimizer_state()
    link = (lambda: run.link) if run.world.local_rank == 0 else None
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
        "optimizer_kind": kind_of(run.job.optimizer),
        "optimizer": optimizer,
        # of the nodes after the first, whose own momentum an exchange keeps that averages weights
        "other_optimizers": []
        if run.exchange.consensus == "step"
        else codec_state.collect(run.control, link, optimizer)[1:],
        "schedule": run.job.scheduler.state_dict() if run.job.scheduler else None,
        "scaler": dict(vars(run.scaler)),
        "exchange": exchange,
        "specs": _names(run),
        "random": [json.loads(message) for message in run.control.all_gather(own)],
        "memories": codec_state.collect(run.control, link, memory),
        "methods": run.methods,
        "plan": run.row,
        "facts": run.facts,
        "kept": run.kept.state(),
        "again": list(run.cursor.again),
    }


def keep(run: RunState, name: str, thing: Any) -> None:
    """Raises ValueError for what cannot be saved."""
    run.kept.add(name, thing, lambda state: pack(state, f"the state of keep({name}=...)", {}))


def restore(run: RunState, checkpoint: Checkpoint) -> None:
    """Collective: every process must call it. Raises ValueError for a checkpoint of another model or job."""
    saved, job = checkpoint.state, run.job
    own = {"seed": job.seed, "batch_size": job.batch_size, "optimizer_kind": kind_of(job.optimizer)}
    if different := [name for name, value in own.items() if saved[name] != value]:
        differences = ", ".join(f"{name.removesuffix('_kind')} {saved[name]} (here {own[name]})" for name in different)
        raise ValueError(
            f"the checkpoint {checkpoint.path} was made with {differences}; give the same, or "
            f"begin from the weights alone: model.load_state_dict(safetensors.torch.load_file(...))"
        )
    load(job.model, checkpoint.weights, str(checkpoint.path))
    try:
        optimizers = [saved["optimizer"], *saved.get("other_optimizers", ())]
        same_nodes = len(optimizers) == run.world.num_nodes
        run.engine.load_optimizer_state(optimizers[run.world.node if same_nodes else 0])
    except (ValueError, KeyError) as error:
        raise ValueError(f"the checkpoint {checkpoint.path} is of another optimizer: {error}") from None
    if job.scheduler and saved["schedule"]:
        was, now = _num_schedulers(saved["schedule"]), _num_schedulers(job.scheduler.state_dict())
        if was != now:
            raise ValueError(
                f"the checkpoint {checkpoint.path} has the state of {was} scheduler(s), and join was given {now}; give "
                f"it those that the run began with"
            )
        job.scheduler.load_state_dict(saved["schedule"])
    if run.scaler.moves and saved["scaler"]["moves"]:
        vars(run.scaler).update(saved["scaler"])
    if exchange := _exchange(run, saved):
        run.exchange.load(exchange)
    if without := run.kept.load(saved.get("kept", {})):
        text = f"the checkpoint {checkpoint.path} has no state of {', '.join(without)}, which stay as they are"
        if run.leader:
            log.warning(text)
        run.record.write("hint", text=text)
    if len(saved["random"]) == run.world.world_size:
        rng.set_state(rng.of_json(saved["random"][run.world.rank]))
    run.cursor.epoch, run.cursor.next_step, run.cursor.began = saved["epoch"], saved["next_step"], saved["began"]
    run.num_steps, run.facts = checkpoint.step, saved["facts"]
    run.cursor.again[:] = saved.get("again", [])
    shares = tuple(saved.get("shares", ()))
    if run.balance and run.balance.allows(shares):
        run.assignment = dataclasses.replace(run.assignment, shares=shares)
    run.control.broadcast(run.engine.weights)
    buffer_broadcast.broadcast_buffers(job.model, run.engine, run.control)


def _exchange(run: RunState, saved: dict[str, Any]) -> dict[str, Any]:
    """The exchange's state here: autotuned choices for the same nodes and plan, residuals for the same codec."""
    # nodes may have different configurations, but encodings and bucket order are common to all: the leader decides
    same_plan = json.loads(run.control.all_gather(json.dumps(current("engine", saved["plan"]) == run.row).encode())[0])
    methods, world, exchange = dict(saved.get("methods", run.methods)), run.world, dict(saved["exchange"])
    methods["exchange"] = current("exchange", methods["exchange"])
    memories = saved.get("memories") or [exchange.get("memory")]
    exchange.pop("memory", None)
    if run.leader and methods != run.methods and codec_state.has_residual(memories):
        changed = [(kind, old, run.methods[kind]) for kind, old in methods.items() if old != run.methods[kind]]
        _warn_residuals_dropped(run, [f"{kind} {old!r} (here {new!r})" for kind, old, new in changed])
    if methods["exchange"] != run.methods["exchange"]:
        return {}
    if "specs" in saved and saved["specs"] != (own := _names(run)):  # other layers are trained or compiled
        if run.leader and codec_state.has_residual(memories):
            _warn_residuals_dropped(run, [f"{len(saved['specs'])} buckets of other parameters (here {len(own)})"])
        return {name: value for name, value in exchange.items() if name not in (*AUTOTUNED, "owing")}
    same_codec = methods["codec"] == run.methods["codec"]
    if not same_plan or not same_codec or len(saved.get("shares", run.shares)) != world.num_nodes:
        exchange = {name: value for name, value in exchange.items() if name not in AUTOTUNED}
    if not same_codec:
        exchange.pop("owing", None)
    if same_codec and memories[0] and exchange:
        devices = state_store.bucket_devices(run.engine)
        exchange["memory"] = codec_state.redistribute(run.codec, memories, world.node, world.num_nodes, devices)
    return exchange


def _names(run: RunState) -> list[list[str]]:
    """The names of the parameters in each bucket."""
    return [list(bucket.names) for bucket in run.engine.buckets]


def _warn_residuals_dropped(run: RunState, other: Sequence[str]) -> None:
    text = (
        f"the checkpoint was made with {' and '.join(other)}: its error-feedback residuals are dropped; resume with "
        f"the same to keep them"
    )
    log.warning(text)
    run.record.write("hint", text=text)


def load(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Loads the model's weights. Raises ValueError with the parameters that differ."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        what = " ".join(line.strip() for line in str(error).splitlines()[1:4])
        raise ValueError(
            f"the checkpoint {source} is of another model: {what}; build the model that it was made with, or give "
            f"another folder"
        ) from None


def _num_schedulers(state: Any) -> int:
    return len(state["schedulers"]) if isinstance(state, dict) and "schedulers" in state else 1
