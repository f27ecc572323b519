"""What the journals of a training must say, whatever has struck it.

once         the rows of each step's batch were computed for it once, by those of one generation
alone        of two parts of a run, one goes on: all who applied a step did so in one generation
bit-equal    after each step all have the same weights
undisturbed  losses and last weights are those of plain PyTorch in one process, to TOLERANCE
whole        the training has ended
dropped      where weights are averaged every few steps (a way's ``period``), only this: no row was computed twice, all
             are bit-equal after an average and in the end, and the last epoch's loss is less than the first's
by hand      a start that resumed by itself has, after each step, the bits of one that was resumed by hand from the same
             checkpoint, for as long as the same nodes compute the same rows
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline_bench.chaos import training
from paceline_bench.chaos.journal import Life
from paceline_bench.chaos.ways import ALLREDUCE, WAYS, Way

TOLERANCE = 1e-9

Breach = tuple[int, int, str]  # launch, step, what


def breaches(
    lives: Sequence[Life], folder: Path, steps: int, clip: float | None = None, way: Way = WAYS[ALLREDUCE]
) -> list[Breach]:
    """Every law that was broken, in the order of steps. ``folder``: with the weights that processes left."""
    losses, weights = training.undisturbed(steps, clip, way.norm)
    found: list[Breach] = []
    last = {step: life.launch for life in sorted(lives, key=lambda life: life.launch) for step in life.applied}
    for step, launch in sorted(last.items()):
        found += [(launch, step, what) for what in _of_step(step, [one for one in lives if one.launch == launch], way)]
        # what was dropped is made good by more steps, so that there is no undisturbed one to each
        want, allowed = (losses[step], TOLERANCE) if way.period == 1 else (losses[0], math.inf)
        found += [
            (launch, step, f"loss {one.applied[step].loss!r} at step {step}, undisturbed {want!r}")
            for one in lives
            if step in one.applied and not abs(one.applied[step].loss / want - 1) <= allowed
        ]
    final = max((life.launch for life in lives), default=0)
    if missing := sorted(set(range(steps)) - set(last)):
        found.append((final, missing[0], f"steps {missing[0]} to {missing[-1]} were never applied"))
    if way.period > 1 and last:
        applied, some = sorted(last), min(training.STEPS, len(last) // 2)
        first, newest = _mean_loss(lives, applied[:some]), _mean_loss(lives, applied[-some:])
        if not newest < first:
            found.append((final, steps, f"the loss of the last epoch is {newest!r}, that of the first was {first!r}"))
    paths = sorted(folder.glob("*.pt"))
    return found + [(final, steps, what) for what in _of_weights(paths, weights if way.period == 1 else {})]


def _mean_loss(lives: Iterable[Life], steps: Iterable[int]) -> float:
    """Of all processes that applied one of these steps; each says its own node's."""
    return statistics.fmean(life.applied[step].loss for step in steps for life in lives if step in life.applied)


def unlike(lives: Iterable[Life], by_hand: Iterable[Life]) -> tuple[int, str]:
    """(steps that can be compared, what differs first) of two starts from the same checkpoint."""
    one, other = _course(lives), _course(by_hand)
    count = 0
    for step in sorted(one.keys() | other.keys()):
        if step not in one or step not in other:
            return count, f"step {step} was applied by one of them alone"
        (shares, marks), (shares_by_hand, marks_by_hand) = one[step], other[step]
        if shares != shares_by_hand:
            break
        count += 1
        if marks != marks_by_hand:
            return count, f"step {step} ended with other weights than resumed by hand"
    return count, ""


def _course(lives: Iterable[Life]) -> dict[int, tuple[list[tuple[int, list[int]]], set[int]]]:
    """Of each step (whose rows, in the order of nodes; the weights after it)."""
    found: dict[int, tuple[list[tuple[int, list[int]]], set[int]]] = {}
    for life in sorted(lives, key=lambda life: life.node):
        for step, applied in life.applied.items():
            shares, marks = found.setdefault(step, ([], set()))
            rows = life.tried.get((step, life.last.get(step, -1)), [])
            shares.append((life.node, rows))
            marks.add(applied.mark)
    return found


def _of_step(step: int, lives: Iterable[Life], way: Way) -> list[str]:
    """``lives``: of one launch."""
    everyone = list(lives)
    there = [life for life in everyone if step in life.applied]
    generations = {life.last.get(step) for life in there} - {None}  # a process without rows computes nothing
    if len(generations) != 1:
        return [f"step {step} was applied in generations {sorted(map(str, generations))}"]
    (generation,) = generations
    assert generation is not None
    computed = Counter(row for life in everyone for row in life.tried.get((step, generation), ()))
    found, wanted = [], Counter(training.rows(step) if way.period == 1 else set(computed))
    if computed != wanted:
        found.append(
            f"step {step}: rows {sorted((computed - wanted).elements())} too often, "
            f"{sorted((wanted - computed).elements())} too seldom"
        )
    marks = {life.applied[step].mark for life in there} - ({0} if way.period > 1 else set())
    if len(marks) > 1:
        found.append(f"step {step}: {len(marks)} different weights on {len(there)} processes")
    return found


def _of_weights(paths: Sequence[Path], wanted: dict[str, Tensor]) -> list[str]:
    """``wanted``: none where a lost node's work is dropped."""
    if not paths:
        return ["no process ended the training"]
    found, firsts = list[str](), dict[str, tuple[str, dict[str, Tensor]]]()
    for path in paths:
        state = torch.load(path, weights_only=True)
        # who is killed after the last step, and before it exits, is resumed: perhaps on another number of nodes
        first, others = firsts.setdefault(path.stem.partition(".")[0], (path.stem, state))
        if any(not torch.equal(value, others[name]) for name, value in state.items()):
            found.append(f"{path.stem} ended with other weights than {first}")
        compared = [name for name, value in wanted.items() if value.is_floating_point()]
        worst = max((_gap(state[name], wanted[name]) for name in compared), default=0.0)
        if worst > TOLERANCE:
            found.append(f"{path.stem} ended {worst:.1e} from the undisturbed weights")
    return found


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-30))
