"""Broadcast of parameters that do not train: rank 0's in every process when all join, as those that do.

Some layers keep in them what forward changes, as Keras its moving means: these are rank 0's again, as buffers are,
before all save or evaluate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from paceline.messages import pack_frames, unpack_frames
from paceline.transport import Control


def plant(model: torch.nn.Module, control: Control, own: Control, assignment: tuple[int, int]) -> None:
    """They lie in each process, and not in the memory that a node's processes share. ``own``: what the process that
    holds the link has of ``control``. ``assignment``: (this process, of how many here)."""
    rank, size = assignment
    still = [each.detach() for each in model.parameters() if not each.requires_grad]
    if rank == 0 and still:
        own.broadcast(still)
    for frozen in still if size > 1 else ():
        if frozen.numel():
            here = frozen.cpu().contiguous().reshape(-1)
            message = control.node_broadcast(_bytes(frozen) if rank == 0 else b"")
            if rank:
                frozen.copy_(torch.frombuffer(bytearray(message), dtype=here.dtype).view(frozen.shape))


Marks = Mapping[str, tuple[int, int]]


def marks(model: torch.nn.Module) -> Marks:
    return {name: mark(each) for name, each in model.named_parameters() if not each.requires_grad}


def mark(each: torch.Tensor) -> tuple[int, int]:
    """torch's count of its changes, and where it lies."""
    return (0 if each.is_inference() else each._version, each.data_ptr() if each.layout == torch.strided else 0)


@torch.no_grad()
def spread(model: torch.nn.Module, before: Marks, control: Control, assignment: tuple[int, int]) -> None:
    """Rank 0's of those that changed, in any process, since ``before``. Every process must call it."""
    if not before:
        return
    now = marks(model)
    mine = [name for name, mark in before.items() if now.get(name, mark) != mark]
    everyone = control.all_gather(json.dumps(mine).encode())
    names = sorted({name for names in everyone if names for name in json.loads(names)})
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
