"""Distributed evaluation: a metric over a dataset, every sample counted once, divided among all processes.

A pair (tensor, None) is added up, such as a confusion matrix; all else becomes a mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline.contract import Engine
from paceline.data import batches
from paceline.data.sampler import Assignment
from paceline.engine.compute.batch import Measured, samples, target
from paceline.exchange.flow.metric_tensors import add_tensors
from paceline.transport import Control


def evaluate(
    model: torch.nn.Module,
    engine: Engine,
    control: Control,
    assignment: Assignment,
    dataset: Any,
    metric: Callable[..., Any],
    rows: int,
    change: Callable[[Any], Any] = lambda rows: rows,
) -> Any:
    """Means by name, or one number where the metric has no names. The model gets batches of ``rows``, after ``change``.
    None, in every process, where nodes failed or joined meanwhile: samples were then left out or counted twice."""
    team = [control.generation, assignment.num_nodes]
    source = batches.as_source(dataset)
    chosen = batches.samples(dataset, source)
    own_rows = assignment.rows(len(chosen))
    own: list[int] = chosen[own_rows.start : own_rows.stop].tolist()
    training = [module for module in model.modules() if module.training]  # some may stay in eval mode (frozen BN)
    measured = Measured()
    moving = getattr(engine, "moving", None)
    model.eval()
    try:
        with torch.no_grad(), moving.unchanged() if moving else nullcontext(), ExitStack() as reading:
            parts = [own[start : start + rows] for start in range(0, len(own), rows)]
            read = reading.enter_context(closing(batches.in_parts(dataset, source, parts)))
            for part, some in zip(parts, read, strict=True):
                batch, output = engine.forward(change(some))
                measured.add(metric(output, target(metric, batch)), batch, samples(batch, len(part)))
    finally:
        for module in training:
            module.training = True
    added: dict[str, Tensor] = {}
    sums = measured.tensors.items()
    lists = {name: [str(each.dtype).removeprefix("torch."), each.tolist()] for name, each in sums}
    received = list(
        map(json.loads, control.all_gather(json.dumps([team, assignment.node, measured.sums, lists]).encode()))
    )
    if any(its != team for its, *_ in received) or len({node for _, node, *_ in received}) < assignment.num_nodes:
        return None
    whole = Measured()
    for _, _, its_sums, its_lists in received:
        whole.add_sums(its_sums)
        add_tensors(
            added, {name: torch.tensor(each, dtype=getattr(torch, kind)) for name, (kind, each) in its_lists.items()}
        )
    means = {name: value / weight if weight else float("nan") for name, (value, weight) in whole.sums.items()}
    both = {**means, **added}
    return both[""] if set(both) == {""} else both
