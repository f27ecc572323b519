"""State transfer: all state that the members share, as a message to a joining node.

    16 bytes   lengths of the tree (padded to 8) and of the tensors
    tree       JSON, as in a checkpoint: nothing in it is evaluated
    tensors    a safetensors file: weights, buffers, the optimizer's state

What is each node's own stays so: random numbers, and what its codec owes (a new node owes nothing).
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint import run_state, tensor_file
from paceline.checkpoint.state_tree import pack, unpack
from paceline.data.load_balance import Limits
from paceline.elastic import roles
from paceline.engine.compute import state_store
from paceline.engine.compute.batch import mapped
from paceline.engine.compute.input_snapshot import sparse
from paceline.engine.node.optimizer_shards import SLICES, division
from paceline.step.run_state import RunState

LENGTHS = struct.Struct("<QQ")
PART_BYTES = 1 << 25  # copied at once, between two steps: some 10 ms


class Message:
    """``said`` as it is now, or at `parts`."""

    def __init__(self, said: Any):
        found: dict[str, Tensor] = {}
        tree = json.dumps(pack(said, "state", found), allow_nan=False).encode()
        self._tree, self._tensors = tree + b" " * (-len(tree) % 8), tensor_file.Draft(found)
        self.num_bytes = LENGTHS.size + len(self._tree) + self._tensors.num_bytes

    def parts(self) -> Iterator[bytes | memoryview]:
        yield LENGTHS.pack(len(self._tree), self._tensors.num_bytes)
        yield self._tree
        yield from self._tensors.parts()


def read(message: bytearray) -> Any:
    """What was said; its tensors lie in the message. Raises ValueError."""
    try:
        length, _ = LENGTHS.unpack_from(message)
        start = LENGTHS.size
        tree = json.loads(message[start : start + length])
        return unpack(tree, tensor_file.of_bytes(message, start + length))
    except (LookupError, TypeError, struct.error) as error:
        raise ValueError(f"this is no state of a run ({error!r})") from None


def full_state(run: RunState) -> dict[str, Any]:
    """What is large. Every process of the node must call it."""
    return {"weights": dict(run.engine.state()), "optimizer": run.engine.optimizer_state()}


Rows = tuple[str, int, int]  # of a name in the model's state: from, to; to 0: all of it


def parts(run: RunState) -> list[list[Rows]]:
    """What goes together of the model's state: about PART_BYTES, the optimizer's state of it included.

    One list of none stands for `full_state`, where something in these states has no part of its own.
    """
    weights, optimizer, numbers = run.engine.state(), run.job.optimizer, run.engine.optimizer_index
    plain = all(isinstance(each, Tensor) and not each.is_sparse for each in weights.values())
    if not plain or not numbers or numbers.keys() - weights.keys():
        return [[]]
    times = _times(optimizer)
    found: list[list[Rows]] = [[]]
    num_bytes = 0
    for name, weight in weights.items():
        its_bytes = int(weight.nbytes * (times if name in numbers else 1))
        # elsewhere an update of some rows depends on all of them
        cut = its_bytes > PART_BYTES and weight.dim() > 0 and division(optimizer) == SLICES
        stride = max(1, PART_BYTES * len(weight) // its_bytes) if cut else 0
        for start in range(0, len(weight), stride) if cut else [0]:
            size = min(its_bytes, PART_BYTES) if cut else its_bytes
            if found[-1] and num_bytes + size > PART_BYTES:
                found.append([])
                num_bytes = 0
            found[-1].append((name, start, min(len(weight), start + stride) if cut else 0))
            num_bytes += size
    return found


def _times(optimizer: Optimizer) -> float:
    """A weight and what the optimizer keeps of it, over the weight alone: of the parts in this process."""
    kept = sum(each.nbytes for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor))
    weights: int = sum(each.nbytes for group in optimizer.param_groups for each in group["params"])
    return 1 + kept / max(1, weights)


def copy_bytes(run: RunState) -> float:
    """About those of `full_state`."""
    num_bytes = sum(
        each.nbytes for each in run.engine.state().values() if isinstance(each, Tensor) and not each.is_sparse
    )
    return _times(run.job.optimizer) * num_bytes


def weights_of(run: RunState, some: Sequence[Rows]) -> dict[str, Any]:
    """Of `state_part`, what every process of the node sees."""
    state = run.engine.state()
    if not some:
        return {"weights": dict(state)}
    return {
        "part": {name: state_store.cut(state[name], state[name].shape, (start, stop)) for name, start, stop in some},
        "rows": {name: [start, stop] for name, start, stop in some},
    }


def state_part(run: RunState, some: Sequence[Rows]) -> dict[str, Any]:
    """What is large, of these; without any, all of it. Every process of the node must call it."""
    if not some:
        return full_state(run)
    windows = {name: (start, stop) for name, start, stop in some if name in run.engine.optimizer_index}
    return {**weights_of(run, some), "states": run.engine.optimizer_rows(windows)}


def take_part(run: RunState, said: dict[str, Any]) -> None:
    """What `state_part` gave elsewhere; of what did not come yet, updates have made nonsense, which it will replace.

    Every process of the node must call it.
    """
    weights, windows = run.engine.state(), {name: (start, stop) for name, (start, stop) in said["rows"].items()}
    for name, tensor in said["part"].items():
        whole = not state_store.is_cut(tensor, weights[name].shape, windows[name])
        (weights[name] if whole else weights[name][slice(*windows[name])]).copy_(tensor)
    known = {name: window for name, window in windows.items() if name in run.engine.optimizer_index}
    run.engine.take_optimizer_rows(said["states"], known)
    run.control.node_broadcast(b"")  # nobody updates what another still takes


def small_state(run: RunState) -> dict[str, Any]:
    exchange = run.exchange.state() if run.world.local_rank == 0 else {}
    exchange.pop("memory", None)
    return {
        "buffers": list(run.engine.buffers),
        "sparse": sparse(run.job.model),
        "groups": options(run.job.optimizer),
        "schedule": run.job.scheduler.state_dict() if run.job.scheduler else None,
        "scaler": dict(vars(run.scaler)),
        "exchange": exchange,
        "observers": {each.key: each.state() for each in run.observers if each.key},
        "epoch": run.cursor.epoch,
        "next_step": run.cursor.next_step,
        "began": run.cursor.began,
        "num_steps": run.num_steps,
        "facts": run.facts,
        "sizes": list(run.world.sizes),
        "shares": list(run.assignment.shares) if run.assignment.shares else None,
        "least": list(run.limits.least),
        "most": list(run.limits.most),
        "minimum": run.world.min_nodes,
    }


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group, as the learning rate, which schedules and scripts change."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_options(optimizer: Optimizer, given: list[dict[str, Any]]) -> None:
    for group, its in zip(optimizer.param_groups, given, strict=True):
        group.update(its)


def load(run: RunState, said: dict[str, Any]) -> None:
    """What `full_state` gave elsewhere. Every process of the node must call it."""
    run_state.load(run.job.model, said["weights"], "of those who train")
    run.engine.load_optimizer_state(mapped(said["optimizer"], Tensor.clone))  # optimizers keep what they are given


def adopt(run: RunState, said: dict[str, Any], node: int) -> None:
    """What `small_state` gave elsewhere: this node, which has this rank, is a member. Every process of it must call
    it."""
    for mine, its in zip(run.engine.buffers, said["buffers"], strict=True):
        if mine.shape == its.shape:  # else a cache, which each node has of its own
            mine.copy_(its)
    for name, mine in sparse(run.job.model).items():
        mine.copy_(said["sparse"][name])
    set_options(run.job.optimizer, said["groups"])
    if run.job.scheduler and said["schedule"]:
        run.job.scheduler.load_state_dict(said["schedule"])
    vars(run.scaler).update(said["scaler"])
    run.exchange.load({**run.exchange.state(), **said["exchange"]})
    run.cursor.epoch, run.cursor.next_step, run.cursor.began = said["epoch"], said["next_step"], said["began"]
    run.num_steps, run.facts = said["num_steps"], said["facts"]
    limits = Limits(tuple(said["least"]), tuple(said["most"]))
    shares = tuple(said["shares"]) if said["shares"] else None
    assignment = dataclasses.replace(run.assignment, node=node, num_nodes=len(said["sizes"]), shares=shares)
    run.world = dataclasses.replace(run.world, min_nodes=said["minimum"])
    roles.assume(run, assignment, limits, tuple(said["sizes"]))
    for each in run.observers:
        if each.key in said["observers"]:
            each.load(said["observers"][each.key])
