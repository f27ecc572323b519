"""A model's buffers before everyone saves or evaluates: rank 0's, everywhere.

A buffer that forward makes anew, as a cache that grows with its inputs, may have another shape on each node: then it
stays each node's own.
"""

from __future__ import annotations

import json

import torch

from paceline.contract import Engine, Exchange


def spread(model: torch.nn.Module, engine: Engine, exchange: Exchange) -> None:
    """Every process must call it. Raises ValueError, in all, for a buffer of unlike shapes that is saved, or shared."""
    if not engine.buffers:
        return
    buffers, names = engine.buffers, saved(model)
    mine = json.dumps([engine.seat[1], [(list(each.shape), str(each.dtype)) for each in buffers]]).encode()
    said = [json.loads(words) for words in exchange.gather(mine) if words]  # who was lost meanwhile says nothing
    sizes, tables = zip(*said, strict=True)
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
    exchange.spread([buffer for buffer, same in zip(buffers, alike, strict=True) if same])


def saved(model: torch.nn.Module) -> dict[str, bool]:
    """Of each buffer, whether ``state_dict`` has it; in the order of ``model.buffers()``."""
    found: dict[str, bool] = {}
    for where, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            found[f"{where}.{name}".lstrip(".")] = name not in module._non_persistent_buffers_set
    return {name: found[name] for name, _ in model.named_buffers()}
