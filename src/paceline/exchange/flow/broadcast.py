"""Broadcast of frozen parameters (requires_grad=False): at the join every process receives rank 0's.

In some of them forward keeps state, such as Keras its moving means: before every save and evaluation, rank 0's are
broadcast again, as buffers are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from paceline.transport import Control, pack_frames, unpack_frames


def plant(model: torch.nn.Module, control: Control, own: Control, assignment: tuple[int, int]) -> None:
    """Each process has its own copy, outside of the memory that a node's processes share. ``own``: the control between
    nodes, used by local rank 0. ``assignment``: (local rank, number of local ranks)."""
    rank, size = assignment
    frozen = [each.detach() for each in model.parameters() if not each.requires_grad]
    if rank == 0 and frozen:
        own.broadcast(frozen)
    for each in frozen if size > 1 else ():
        if each.numel():
            flat = each.cpu().contiguous().reshape(-1)
            message = control.node_broadcast(_bytes(each) if rank == 0 else b"")
            if rank:
                each.copy_(torch.frombuffer(bytearray(message), dtype=flat.dtype).view(each.shape))


Marks = Mapping[str, tuple[int, int]]


def marks(model: torch.nn.Module) -> Marks:
    return {name: mark(each) for name, each in model.named_parameters() if not each.requires_grad}


def mark(each: torch.Tensor) -> tuple[int, int]:
    """(torch's version counter, the address of the data)."""
    return (0 if each.is_inference() else each._version, each.data_ptr() if each.layout == torch.strided else 0)


@torch.no_grad()
def spread(model: torch.nn.Module, before: Marks, control: Control, assignment: tuple[int, int]) -> None:
    """Broadcasts rank 0's values of those that any process changed since ``before``. Every process must call it."""
    if not before:
        return
    after = marks(model)
    changed = [name for name, mark in before.items() if after.get(name, mark) != mark]
    received = control.all_gather(json.dumps(changed).encode())
    names = sorted({name for names in received if names for name in json.loads(names)})
    if not names:
        return
    first = assignment[0] == 0 and control.rank == 0
    own = {name: each.detach() for name, each in model.named_parameters() if name in names}
    message = pack_frames([_bytes(own[name]) for name in names]) if first else b""
    message = next(filter(None, control.all_gather(message)), message)
    for name, part in zip(names, unpack_frames(message), strict=True) if not first else ():
        if part:
            own[name].copy_(torch.frombuffer(bytearray(part), dtype=own[name].dtype).view(own[name].shape))


def _bytes(values: torch.Tensor) -> bytes:
    return values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
