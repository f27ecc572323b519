"""What must hold where nodes train alone and average their weights, whatever has struck.

its own steps     what a rank brings to an average is what plain PyTorch makes of its rows since the last one
the same average  on all who go on, bit for bit: DiLoCo's outer step over those who took part, by their samples;
                  whoever finishes has applied each that it was not alone in
no sample twice   in a step; none is left out as long as nobody is lost
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline_bench.simulated.rank import OUTER_BETA, OUTER_LR, Attempt, Part, Rank
from paceline_bench.simulated.scenarios import CLOSE, given, optimizer, windows
from paceline_bench.simulated.schedule import Schedule


def broken(schedule: Schedule, ranks: Sequence[Rank]) -> Iterator[str]:
    yield from _rows(schedule, ranks)
    yield from _applied(schedule, [rank for rank in ranks if rank.finished])
    alone = {rank.id: _Alone(schedule.how.momentum) for rank in ranks}
    anchor = [weight.detach().clone() for weight in given()[0].parameters()]
    momentum = [torch.zeros_like(weight) for weight in anchor]
    for step in sorted({attempt[0] for rank in ranks for attempt, _ in rank.averages}):
        said = {rank.id: each for rank in ranks for each in rank.averages if each[0][0] == step}
        attempts = {attempt for attempt, _ in said.values()}
        if len(attempts) > 1:
            yield f"the average after step {step} is of different attempts: {attempts}"
        attempt, weights = next(iter(said.values()))
        if any(not torch.equal(a, b) for _, other in said.values() for a, b in zip(weights, other, strict=True)):
            yield f"replicas differ after the average of step {step}"
        inside = {rank.id: rank.entered[attempt] for rank in ranks if attempt in rank.entered}
        for rank in ranks:
            if rank.id in inside:
                yield from alone[rank.id].broken(rank, step, inside[rank.id])
        deltas = _deltas(anchor, list(inside.values()))
        momentum = [OUTER_BETA * old + delta for old, delta in zip(momentum, deltas, strict=True)]
        anchor = [
            old - OUTER_LR * (delta + OUTER_BETA * speed)
            for old, delta, speed in zip(anchor, deltas, momentum, strict=True)
        ]
        if not _near(weights, anchor):
            yield f"the average of step {step} is not that of ranks {sorted(inside)}"
        for each in said:
            alone[each].load(weights, step)


def _rows(schedule: Schedule, ranks: Sequence[Rank]) -> Iterator[str]:
    by_attempt: dict[Attempt, list[list[int]]] = {}
    for rank in ranks:
        for attempt, rows in rank.taken.items():
            by_attempt.setdefault(attempt, []).append(rows)
    for (step, generation), taken in by_attempt.items():
        rows, wanted = sorted(row for each in taken for row in each), windows(schedule.samples)[step].tolist()
        whole = len(taken) == schedule.size
        if len(set(rows)) < len(rows) or not set(rows) <= set(wanted) or (whole and rows != sorted(wanted)):
            yield f"step {step} of generation {generation} used samples {rows}, its global batch is {sorted(wanted)}"


def _applied(schedule: Schedule, finished: Sequence[Rank]) -> Iterator[str]:
    for rank in finished:
        newest = {step: part for (step, _), part in sorted(rank.entered.items())}
        wanted = {step for step in range(schedule.steps) if _is_due(schedule, step)}
        if newest.keys() != wanted:
            yield f"rank {rank.id} finished, and averaged after steps {sorted(newest)}, not {sorted(wanted)}"
        applied = {step for (step, _), _ in rank.averages}
        if left_out := {step for step, part in newest.items() if part.size > 1} - applied:
            yield f"rank {rank.id} finished without the averages of steps {sorted(left_out)}"
    if len({tuple(attempt for attempt, _ in rank.averages) for rank in finished}) > 1:
        yield f"ranks {[rank.id for rank in finished]} finished and applied unlike averages"


def _is_due(schedule: Schedule, step: int) -> bool:
    return (step + 1) % schedule.how.period == 0 or step + 1 == schedule.steps


def _deltas(anchor: Sequence[Tensor], inside: Sequence[Part]) -> list[Tensor]:
    whole = sum(part.samples for part in inside)
    shares = [part.samples / whole if whole else 1 / len(inside) for part in inside]
    return [
        sum(
            ((old - part.weights[i]) * share for part, share in zip(inside, shares, strict=True)), torch.zeros_like(old)
        )
        for i, old in enumerate(anchor)
    ]


def _near(weights: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    starts = given()[0].parameters()
    return all(
        float((a - b).norm()) <= CLOSE * float((b - start).detach().norm())
        for a, b, start in zip(weights, wanted, starts, strict=True)
    )


class _Alone:
    """One rank by plain PyTorch: its own steps since the last average."""

    def __init__(self, momentum: float):
        model, self.x, self.y = given()
        self.model: nn.Module = copy.deepcopy(model)
        self.optimizer, self.step, self.samples = optimizer(self.model, momentum), 0, 0

    def broken(self, rank: Rank, last: int, part: Part) -> Iterator[str]:
        """Its steps up to ``last``, against what it brought to the average."""
        taken = {step: rows for (step, _), rows in rank.taken.items()}
        for step in range(self.step, last + 1):
            if rows := taken.get(step):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(self.x[rows]), self.y[rows]).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.samples += len(rows)
        if not _near(part.weights, [weight.detach() for weight in self.model.parameters()]):
            yield f"rank {rank.id} brought other weights to the average of step {last} than its own rows give"
        if part.samples != self.samples:
            yield f"rank {rank.id} said {part.samples} samples at step {last}, and had {self.samples}"

    def load(self, weights: Sequence[Tensor], last: int) -> None:
        with torch.no_grad():
            for mine, its in zip(self.model.parameters(), weights, strict=True):
                mine.copy_(its)
        self.step, self.samples = last + 1, 0
