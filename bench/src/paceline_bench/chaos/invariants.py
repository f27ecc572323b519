"""What the journals of a training must say, whatever has struck it.

once         the rows of each step's batch were computed for it once, by those of one generation
alone        of two parts of a run, one goes on: all who applied a step did so in one generation
bit-equal    after each step all have the same weights
undisturbed  losses and last weights are those of plain PyTorch in one process, to TOLERANCE
whole        the training has ended
by hand      a start that resumed by itself has, after each step, the bits of one that was resumed by hand from the same
             checkpoint, for as long as the same nodes compute the same rows
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline_bench.chaos import training
from paceline_bench.chaos.journal import Life

TOLERANCE = 1e-9

Breach = tuple[int, int, str]  # launch, step, what


def breaches(lives: Sequence[Life], folder: Path, steps: int, clip: float | None = None) -> list[Breach]:
    """Every law that was broken, in the order of steps. ``folder``: with the weights that processes left."""
    losses, weights = training.undisturbed(steps, clip)
    found: list[Breach] = []
    last = {step: life.launch for life in sorted(lives, key=lambda life: life.launch) for step in life.applied}
    for step, launch in sorted(last.items()):
        found += [(launch, step, what) for what in _of_step(step, [one for one in lives if one.launch == launch])]
        found += [
            (launch, step, f"loss {one.applied[step].loss!r} at step {step}, undisturbed {losses[step]!r}")
            for one in lives
            if step in one.applied and abs(one.applied[step].loss / losses[step] - 1) > TOLERANCE
        ]
    final = max((life.launch for life in lives), default=0)
    if missing := sorted(set(range(steps)) - set(last)):
        found.append((final, missing[0], f"steps {missing[0]} to {missing[-1]} were never applied"))
    return found + [(final, steps, what) for what in _of_weights(sorted(folder.glob("*.pt")), weights)]


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


def _of_step(step: int, lives: Iterable[Life]) -> list[str]:
    """``lives``: of one launch."""
    everyone = list(lives)
    there = [life for life in everyone if step in life.applied]
    generations = {life.last.get(step) for life in there} - {None}  # a process without rows computes nothing
    if len(generations) != 1:
        return [f"step {step} was applied in generations {sorted(map(str, generations))}"]
    (generation,) = generations
    assert generation is not None
    computed = Counter(row for life in everyone for row in life.tried.get((step, generation), ()))
    found = []
    if computed != Counter(training.rows(step)):
        wanted = Counter(training.rows(step))
        found.append(
            f"step {step}: rows {sorted((computed - wanted).elements())} too often, "
            f"{sorted((wanted - computed).elements())} too seldom"
        )
    marks = {life.applied[step].mark for life in there}
    if len(marks) > 1:
        found.append(f"step {step}: {len(marks)} different weights on {len(there)} processes")
    return found


def _of_weights(paths: Sequence[Path], wanted: dict[str, Tensor]) -> list[str]:
    if not paths:
        return ["no process ended the training"]
    found, firsts = list[str](), dict[str, tuple[str, dict[str, Tensor]]]()
    for path in paths:
        state = torch.load(path, weights_only=True)
        # who is killed after the last step, and before it exits, is resumed: perhaps on another number of nodes
        first, others = firsts.setdefault(path.stem.partition(".")[0], (path.stem, state))
        if any(not torch.equal(value, others[name]) for name, value in state.items()):
            found.append(f"{path.stem} ended with other weights than {first}")
        worst = max(_gap(value, wanted[name]) for name, value in state.items() if wanted[name].is_floating_point())
        if worst > TOLERANCE:
            found.append(f"{path.stem} ended {worst:.1e} from the undisturbed weights")
    return found


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-30))
