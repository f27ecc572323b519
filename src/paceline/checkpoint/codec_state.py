"""Every node's codec state (error-feedback residuals): gathered for a checkpoint, redistributed on resume.

*Cost*: N - 1 messages to rank 0, one node's after the other's: with error feedback, each as large as the gradient.
*Laws*: among as many nodes each gets its own back, bit for bit; among others the sum of what is owed stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state_tree import pack, unpack
from paceline.checkpoint.tensor_file import as_bytes
from paceline.contract import Codec
from paceline.engine.compute.batch import mapped
from paceline.errors import LinkError
from paceline.transport import Control, Link

MAX_LOSSES = 16  # while they are brought together, before something else is to blame


def collect(control: Control, link: Callable[[], Link] | None, memory: Any) -> list[Any]:
    """Every node's, in the process that holds rank 0's link; elsewhere nothing. Every process must call it.

    ``link``: the present one, where this process holds its node's. Where a node is lost meanwhile, once more, by those
    who are left. Raises LinkError.
    """
    tensors: dict[str, Tensor] = {}
    tree = pack(memory, "memory", tensors)
    forms = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    words = json.dumps([tree, forms]).encode() if link else b""
    for _ in range(MAX_LOSSES):
        heard = [json.loads(each) for each in control.all_gather(words) if each]
        team, found, lost = [control.generation, control.size], list[Any](), False
        try:
            found = _carry(link(), tensors, memory, heard) if link else []
        except LinkError:
            if not control.tolerates_loss:
                raise
            lost = True
        if not control.tolerates_loss or not any(forms for _, forms in heard):
            return found
        # everyone is told the same, also of whoever was lost in this very operation
        ended = json.dumps([team, lost]).encode() if link else b""
        ends = [json.loads(each) for each in control.all_gather(ended) if each]
        if all(end == [team, False] for end in ends) and len(ends) == team[1]:
            return found
    raise LinkError(f"what the codec remembers could not be brought together in {MAX_LOSSES} attempts")


def _carry(link: Link, tensors: dict[str, Tensor], memory: Any, heard: Sequence[Any]) -> list[Any]:
    if link.rank:
        for tensor in tensors.values():
            if tensor.nbytes:
                link.send(as_bytes(tensor), 0).wait()
        return []
    memories = [memory]
    for peer, (its_tree, its_forms) in enumerate(heard[1:], 1):
        its_tensors = {}
        for name, dtype, shape in its_forms:
            place = torch.empty(shape, dtype=getattr(torch, dtype))
            if place.nbytes:
                link.recv(as_bytes(place), peer).wait()
            its_tensors[name] = place
        memories.append(unpack(its_tree, its_tensors))
    return memories


def owes(memories: Sequence[Any]) -> bool:
    """Whether anything is left in them that has not been sent."""
    tensors: dict[str, Tensor] = {}
    pack(list(memories), "memory", tensors)
    return any(bool(tensor.any()) for tensor in tensors.values())


def redistribute(
    codec: Codec, memories: Sequence[dict[int, Any]], node: int, num_nodes: int, device: torch.device
) -> Any:
    """This node's part, by spec."""
    return {
        index: mapped(
            codec.redistribute([memory[index] for memory in memories], node, num_nodes),
            lambda tensor: tensor.to(device),
        )
        for index in memories[0]
    }
