"""`paceline verify` in one process: the nodes are threads, and their link is memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from nodes import ONE_AT_A_TIME
from paceline.elastic.membership import Members
from paceline.environment import LaunchEnvironment
from paceline.job import Job
from paceline.pace import Pace
from paceline.planner.diagnose import equivalence
from paceline.planner.diagnose.equivalence import Comparison, EquivalenceRun
from paceline.registry import BASELINE, CODEC, EXCHANGE, parse
from paceline.report.activity import Activity
from paceline.training import Training
from ranks import run

ROWS, STEPS, BATCH, IN, HIDDEN, OUT = 48, 3, 12, 6, 8, 3


class Rows(Dataset[Any]):
    """What ``item`` makes of the i-th input and label."""

    def __init__(self, item: Callable[[Tensor, Tensor, int], Any]):
        dice = torch.Generator().manual_seed(3)
        self.x = torch.randn(ROWS, IN, generator=dice)
        self.y = torch.randint(0, OUT, (ROWS,), generator=dice)
        self.item = item

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        return self.item(self.x[i], self.y[i], i)


@dataclass
class Script:
    """A training as a user would write it."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Any] | None = F.cross_entropy
    item: Callable[[Tensor, Tensor, int], Any] = lambda x, y, i: (x, y)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)
    prepare: Callable[[nn.Module], Any] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    data: Callable[[Dataset[Any]], Any] = lambda rows: rows
    engine: str = BASELINE  # of the nodes; one process is the baseline
    exchange: str = EXCHANGE
    codec: str = CODEC
    own: Callable[[Any, nn.Module, Any], Any] | None = None  # a loop of one's own: (pace, model, its samples)
    rate: Callable[[], float] | None = None
    between: Callable[[Any, nn.Module], Any] = lambda pace, model: None

    def train(self, link: Any, told: EquivalenceRun, monkeypatch: Any) -> None:
        """As one node of ``link``'s, or alone."""
        _here.rank, _here.size = told.simulated or ((link.rank, link.size) if link else (0, 1))
        with ONE_AT_A_TIME:  # nodes are threads, and draw from one generator
            torch.manual_seed(0)
            numpy.random.seed(0)
            model, loss = self.model(), copy.deepcopy(self.loss)
            self.prepare(model)
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        if self.rate:
            optimizer.param_groups[0]["lr"] = self.rate()
        job = Job(model, optimizer, loss, BATCH, shares="equal", **self.options)
        world = LaunchEnvironment(node=link.rank, num_nodes=link.size) if link else LaunchEnvironment()
        engine = parse("engine", self.engine if link else BASELINE)
        parts = engine, parse("exchange", self.exchange), parse("codec", self.codec)
        engine.accumulate = job.accumulate
        _here.witness = told
        try:
            pace = Pace(Training(job, *parts, link and Members(link, Activity()), world, None))
            for batch in pace.batches(self.data(Rows(self.item)), epochs=9, shuffle=False):
                if self.own:
                    rows = pace.rows(batch)
                    if rows is not None:
                        pace.backward(self.own(pace, model, rows))
                    pace.update()
                else:
                    pace.step(batch)
                self.between(pace, model)
        except SystemExit:
            return


_here = threading.local()


def rank() -> int:
    """What a script would read from RANK."""
    return int(_here.rank)


def size() -> int:
    """Likewise from WORLD_SIZE."""
    return int(_here.size)


def verified(script: Script, folder: Path, monkeypatch: Any, nodes: int = 2, looks: bool = False) -> Comparison:
    """``looks``: for causes, even where both runs are the same."""
    monkeypatch.setattr(EquivalenceRun, "of_environment", classmethod(lambda cls: _here.witness))
    many, one, again = (folder / name for name in ("many", "one", "again"))
    join = "join0"

    def told(where: Path, **more: Any) -> EquivalenceRun:
        return EquivalenceRun(where / join, STEPS, "float64", **more)

    run(nodes, lambda link: script.train(link, told(many), monkeypatch))
    start = str(many / join)
    script.train(None, told(one, start=start), monkeypatch)
    compared = equivalence.compare(many, one, "float64")
    if compared.close and not looks:
        return compared
    script.train(None, told(again, start=start, examines=str(many / join)), monkeypatch)
    others = [folder / f"told{number}" for number in (0, nodes - 1)]
    for other, number in zip(others, (0, nodes - 1), strict=True):
        script.train(None, told(other, start=start, simulated=(number, nodes)), monkeypatch)
    return equivalence.explain(compared, many, one, again, others)


def kinds(compared: Comparison) -> set[str]:
    return {cause.kind for cause in compared.causes}
