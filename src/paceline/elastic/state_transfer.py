"""State transfer: all state that the members share, as a message to a joining node.

Members send it from `catch_up` and `admission`, large state over `bulk_channel`; `joiner` loads it.

    16 bytes   lengths of the tree (padded to 8) and of the tensors
    tree       JSON, as in a checkpoint: nothing in it is evaluated
    tensors    a safetensors file: weights, buffers, the optimizer's state

Node-local state is not sent: the random state, and the codec's error-feedback residual (a new node starts without one).
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
from paceline.elastic import view_change
from paceline.engine.compute import state_store
from paceline.engine.compute.batch import mapped
from paceline.engine.compute.input_snapshot import sparse
from paceline.engine.node.optimizer_shards import SLICES, division
from paceline.step.run_state import RunState

LENGTHS = struct.Struct("<QQ")
PART_BYTES = 1 << 25  # copied at once, between two steps: about 10 ms


class Message:
    """``state`` as it is now, or at `parts`."""

    def __init__(self, state: Any):
        found: dict[str, Tensor] = {}
        tree = json.dumps(pack(state, "state", found), allow_nan=False).encode()
        self._tree, self._tensors = tree + b" " * (-len(tree) % 8), tensor_file.Draft(found)
        self.num_bytes = LENGTHS.size + len(self._tree) + self._tensors.num_bytes

    def parts(self) -> Iterator[bytes | memoryview]:
        yield LENGTHS.pack(len(self._tree), self._tensors.num_bytes)
        yield self._tree
        yield from self._tensors.parts()


def read(message: bytearray) -> Any:
    """The state in a message; its tensors share the message's memory. Raises ValueError."""
    try:
        length, _ = LENGTHS.unpack_from(message)
        start = LENGTHS.size
        tree = json.loads(message[start : start + length])
        return unpack(tree, tensor_file.of_bytes(message, start + length))
    except (LookupError, TypeError, struct.error) as error:
        raise ValueError(f"this is not the state of a run ({error!r})") from None


def full_state(run: RunState) -> dict[str, Any]:
    """The large state: weights and optimizer state. Every process of the node must call it."""
    return {"weights": dict(run.engine.state()), "optimizer": run.engine.optimizer_state()}


Rows = tuple[str, int, int]  # of a name in the model's state: from, to; to 0: all of it


def parts(run: RunState) -> list[list[Rows]]:
    """Divides the model's state into parts of about PART_BYTES, the optimizer's state of each included.

    One empty part stands for `full_state`, if these states cannot be divided.
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
        # otherwise an update of rows rows depends on all of them
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
    """Bytes of the weights and their optimizer state, divided by those of the weights: of this process's parts."""
    its_bytes = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    weights: int = sum(each.nbytes for group in optimizer.param_groups for each in group["params"])
    return 1 + its_bytes / max(1, weights)


def copy_bytes(run: RunState) -> float:
    """The approximate size of `full_state`."""
    num_bytes = sum(
        each.nbytes for each in run.engine.state().values() if isinstance(each, Tensor) and not each.is_sparse
    )
    return _times(run.job.optimizer) * num_bytes


def weights_of(run: RunState, rows: Sequence[Rows]) -> dict[str, Any]:
    """The weights of `state_part`, without the optimizer's state: every process of the node has them."""
    state = run.engine.state()
    if not rows:
        return {"weights": dict(state)}
    return {
        "part": {name: state_store.cut(state[name], state[name].shape, (start, stop)) for name, start, stop in rows},
        "rows": {name: [start, stop] for name, start, stop in rows},
    }


def state_part(run: RunState, rows: Sequence[Rows]) -> dict[str, Any]:
    """The large state of these rows; without rows, all of it. Every process of the node must call it."""
    if not rows:
        return full_state(run)
    windows = {name: (start, stop) for name, start, stop in rows if name in run.engine.optimizer_index}
    return {**weights_of(run, rows), "states": run.engine.optimizer_rows(windows)}


def load_part(run: RunState, message: dict[str, Any]) -> None:
    """Loads a `state_part` of the leader. Updates have changed the parts that did not arrive yet to wrong values, which
    later parts replace.

    Every process of the node must call it.
    """
    weights, windows = run.engine.state(), {name: (start, stop) for name, (start, stop) in message["rows"].items()}
    for name, tensor in message["part"].items():
        whole = not state_store.is_cut(tensor, weights[name].shape, windows[name])
        (weights[name] if whole else weights[name][slice(*windows[name])]).copy_(tensor)
    known = {name: window for name, window in windows.items() if name in run.engine.optimizer_index}
    run.engine.take_optimizer_rows(message["states"], known)
    run.control.node_broadcast(b"")  # no process updates a part that another is still loading


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
        "kept": run.kept.state(),
        "sizes": list(run.world.sizes),
        "shares": list(run.assignment.shares) if run.assignment.shares else None,
        "least": list(run.limits.least),
        "most": list(run.limits.most),
        "minimum": run.world.min_nodes,
    }


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group, such as the learning rate: schedules and scripts change them."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_options(optimizer: Optimizer, given: list[dict[str, Any]]) -> None:
    for group, its in zip(optimizer.param_groups, given, strict=True):
        group.update(its)


def load(run: RunState, state: dict[str, Any]) -> None:
    """Loads the leader's `full_state`. Every process of the node must call it."""
    run_state.load(run.job.model, state["weights"], "of the members")
    run.engine.load_optimizer_state(mapped(state["optimizer"], Tensor.clone))  # optimizers keep these tensors


def adopt(run: RunState, state: dict[str, Any], node: int) -> None:
    """Loads the leader's `small_state`. ``node``: this node's rank. Every process of the node must call it."""
    for mine, its in zip(run.engine.buffers, state["buffers"], strict=True):
        if mine.shape == its.shape:  # else a cache, which stays each node's own
            mine.copy_(its)
    for name, mine in sparse(run.job.model).items():
        mine.copy_(state["sparse"][name])
    set_options(run.job.optimizer, state["groups"])
    if run.job.scheduler and state["schedule"]:
        run.job.scheduler.load_state_dict(state["schedule"])
    vars(run.scaler).update(state["scaler"])
    run.exchange.load({**run.exchange.state(), **state["exchange"]})
    run.cursor.epoch, run.cursor.next_step, run.cursor.began = state["epoch"], state["next_step"], state["began"]
    run.num_steps, run.facts = state["num_steps"], state["facts"]
    run.kept.load(mapped(state["kept"], Tensor.clone))
    limits = Limits(tuple(state["least"]), tuple(state["most"]))
    shares = tuple(state["shares"]) if state["shares"] else None
    assignment = dataclasses.replace(run.assignment, node=node, num_nodes=len(state["sizes"]), shares=shares)
    run.world = dataclasses.replace(run.world, min_nodes=state["minimum"])
    view_change.set_assignment(run, assignment, limits, tuple(state["sizes"]))
    for each in run.observers:
        if each.key in state["observers"]:
            each.load(state["observers"][each.key])
