"""Broadcast of a model's buffers before all processes save or evaluate: rank 0's, to every rank.

A buffer that forward replaces, such as a cache that grows with its inputs, may have another shape on each node. Such a
buffer is not broadcast.
"""

from __future__ import annotations

import json

import torch

from paceline.contract import Engine
from paceline.engine.compute.input_snapshot import sparse
from paceline.exchange.flow import broadcast
from paceline.transport import Control, pack_frames, unpack_frames


def broadcast_buffers(model: torch.nn.Module, engine: Engine, control: Control) -> None:
    """Every process must call it. Raises ValueError, in all, if a saved or shared buffer has unlike shapes."""
    broadcast_sparse(model, engine, control)
    broadcast.spread(model, engine.still, control, engine.local_place)
    if not engine.buffers:
        return
    buffers, names = engine.buffers, saved(model)
    mine = json.dumps([engine.local_place[1], [(list(each.shape), str(each.dtype)) for each in buffers]]).encode()
    reports = [json.loads(text) for text in control.all_gather(mine) if text]  # none from a node that has failed
    sizes, tables = zip(*reports, strict=True)
    if len({len(table) for table in tables}) > 1:
        raise ValueError("the nodes' models have unlike numbers of buffers now; register all of them before join()")
    alike = [all(shape == shapes[0] for shape in shapes) for shapes in zip(*tables, strict=True)]
    shared = max(sizes) > 1  # by the processes of a node
    if unlike := [name for name, same in zip(names, alike, strict=True) if not same and (shared or names[name])]:
        raise ValueError(
            f"buffer {unlike[0]!r} has another shape or type in another process, and is saved with the model, or "
            f"shared by the processes of a node: keep its shape, or register it with persistent=False and use one "
            f"process per node"
        )
    control.broadcast([buffer for buffer, same in zip(buffers, alike, strict=True) if same])


@torch.no_grad()
def broadcast_sparse(model: torch.nn.Module, engine: Engine, control: Control) -> None:
    """Rank 0's sparse buffers, which may have other numbers of values elsewhere. Every process must call it."""
    if not (mine := sparse(model)):
        return
    first = engine.local_place[0] == 0 and control.rank == 0
    packed = pack_frames([_packed(each) for each in mine.values()]) if first else b""
    received = next(filter(None, control.all_gather(packed)), packed)
    for buffer, part in zip(mine.values(), unpack_frames(received), strict=True) if not first else ():
        buffer.copy_(_unpacked(part, buffer))


def _packed(buffer: torch.Tensor) -> bytes:
    on_cpu = buffer.detach().cpu()
    values = on_cpu._values().contiguous()
    head = json.dumps([list(values.shape), on_cpu.is_coalesced()]).encode()
    octets = bytes(values.reshape(-1).view(torch.uint8).numpy())
    return pack_frames([head, on_cpu._indices().contiguous().numpy().tobytes(), octets])


def _unpacked(packed: bytes, like: torch.Tensor) -> torch.Tensor:
    head, indices, values = unpack_frames(packed)
    shape, coalesced = json.loads(head)
    indexes = torch.frombuffer(bytearray(indices), dtype=torch.int64) if indices else torch.zeros(0, dtype=torch.int64)
    numbers = torch.frombuffer(bytearray(values), dtype=like.dtype) if values else torch.zeros(0, dtype=like.dtype)
    indexes, numbers = indexes.view(like.sparse_dim(), -1), numbers.view(shape)
    tensor = torch.sparse_coo_tensor(indexes, numbers, like.shape, is_coalesced=coalesced, check_invariants=True)
    return tensor.to(like.device)


def saved(model: torch.nn.Module) -> dict[str, bool]:
    """Of each dense buffer, whether ``state_dict`` has it; in the order of ``model.buffers()``."""
    found: dict[str, bool] = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            found[f"{prefix}.{name}".lstrip(".")] = name not in module._non_persistent_buffers_set
    return {name: found[name] for name, each in model.named_buffers() if each.layout == torch.strided}
