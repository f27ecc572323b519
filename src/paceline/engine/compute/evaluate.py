"""Distributed evaluation: a metric over a dataset, every sample counted once, divided among all processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from paceline.contract import Engine
from paceline.data import batches
from paceline.data.sampler import Assignment
from paceline.engine.compute.batch import counted, samples, target
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
    sums: dict[str, tuple[float, float]] = {}
    moving = getattr(engine, "moving", None)
    model.eval()
    try:
        with torch.no_grad(), moving.unchanged() if moving else nullcontext():
            for start in range(0, len(own), rows):
                some = own[start : start + rows]
                batch, output = engine.forward(change(source.fetch(some, 0)))
                _add(sums, counted(metric(output, target(metric, batch)), batch, samples(batch, len(some))))
    finally:
        for module in training:
            module.training = True
    whole: dict[str, tuple[float, float]] = {}
    received = list(map(json.loads, control.all_gather(json.dumps([team, assignment.node, sums]).encode())))
    if any(its != team for its, _, _ in received) or len({node for _, node, _ in received}) < assignment.num_nodes:
        return None
    for _, _, its_sums in received:
        _add(whole, its_sums)
    means = {name: value / weight if weight else float("nan") for name, (value, weight) in whole.items()}
    return means[""] if set(means) == {""} else means


def _add(sums: dict[str, tuple[float, float]], more: Any) -> None:
    for name, (value, weight) in more.items():
        old = sums.get(name, (0.0, 0.0))
        sums[name] = old[0] + value, old[1] + weight
