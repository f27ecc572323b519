"""Every node's codec state (error-feedback residuals): gathered for a checkpoint, redistributed on resume.

*Cost*: N - 1 messages to rank 0, one node after the other; with error feedback, each is as large as the gradient.
*Invariants*: on as many nodes each gets its own state back, bit for bit; else the sum of the residuals is preserved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state_tree import pack, unpack
from paceline.checkpoint.tensor_file import as_bytes
from paceline.contract import Codec
from paceline.engine.compute.batch import mapped
from paceline.errors import LinkError
from paceline.transport import Control, Link

MAX_ATTEMPTS = 16  # gathers that node failures may interrupt, before the call fails


def collect(control: Control, link: Callable[[], Link] | None, memory: Any) -> list[Any]:
    """Every node's codec state, in the process that holds rank 0's link; elsewhere an empty list. Collective.

    ``link``: returns the current link, in the process that holds its node's link. If a node fails meanwhile, the
    survivors gather again. Raises LinkError.
    """
    tensors: dict[str, Tensor] = {}
    tree = pack(memory, "memory", tensors)
    layouts = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    header = json.dumps([tree, layouts]).encode() if link else b""
    for _ in range(MAX_ATTEMPTS):
        headers = [json.loads(reply) for reply in control.all_gather(header) if reply]
        members, found, failed = [control.generation, control.size], list[Any](), False
        try:
            found = _transfer(link(), tensors, memory, headers) if link else []
        except LinkError:
            if not control.tolerates_loss:
                raise
            failed = True
        if not control.tolerates_loss or not any(layouts for _, layouts in headers):
            return found
        # every process receives the same reports, also when a node fails during this all-gather
        own_report = json.dumps([members, failed]).encode() if link else b""
        reports = [json.loads(reply) for reply in control.all_gather(own_report) if reply]
        if all(report == [members, False] for report in reports) and len(reports) == members[1]:
            return found
    raise LinkError(f"the codec state could not be gathered in {MAX_ATTEMPTS} attempts, because nodes kept failing")


def _transfer(link: Link, tensors: dict[str, Tensor], memory: Any, headers: Sequence[Any]) -> list[Any]:
    if link.rank:
        for tensor in tensors.values():
            if tensor.nbytes:
                link.send(as_bytes(tensor), 0).wait()
        return []
    memories = [memory]
    for peer, (peer_tree, peer_layouts) in enumerate(headers[1:], 1):
        peer_tensors = {}
        for name, dtype, shape in peer_layouts:
            buffer = torch.empty(shape, dtype=getattr(torch, dtype))
            if buffer.nbytes:
                link.recv(as_bytes(buffer), peer).wait()
            peer_tensors[name] = buffer
        memories.append(unpack(peer_tree, peer_tensors))
    return memories


def has_residual(memories: Sequence[Any]) -> bool:
    """Whether any node's codec state has a residual that was not sent yet."""
    tensors: dict[str, Tensor] = {}
    pack(list(memories), "memory", tensors)
    return any(bool(tensor.any()) for tensor in tensors.values())


def redistribute(
    codec: Codec, memories: Sequence[dict[int, Any]], node: int, count: int, devices: Mapping[int, torch.device]
) -> Any:
    """This node's part of the gathered state, by bucket index; ``count``: how many nodes there are."""
    return {
        index: mapped(
            codec.redistribute([memory[index] for memory in memories], node, count),
            methodcaller("to", devices[index]),
        )
        for index in memories[0]
    }
