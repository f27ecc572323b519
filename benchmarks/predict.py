"""Predicted against measured seconds per step: every row of every model, rows predicted before any of them is run.

python benchmarks/predict.py                              all models, every row, a table and predict.json
python benchmarks/predict.py small:64 residual:4 --rows sequential,threads:2 --budget 5 --timed 0.6

Prints, per row: predicted, measured with spread, and the error; then the median and the 90th percentile of the errors
(targets: 10 % and 25 %). Run it on an idle machine. "residual" is a narrow residual network of this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from paceline.plan import ENGINES
from paceline.probe.predict import predicted_s
from paceline.probe.profile import take
from paceline.probe.rows import candidates
from paceline.probe.survey import survey
from paceline.probe.trial import measure

JOBS = ("small:64", "alexnet:32", "vgg16:8", "resnet50v2:8")
CLASSES = 3


def train(name: str, batch_size: int) -> None:
    """The job itself: random images, so that nothing but the step is timed."""
    import torch

    import paceline

    model, shape = residual() if name == "residual" else named(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    images, labels = torch.randn(batch_size, *shape), torch.randint(0, CLASSES, (batch_size,))
    dataset = torch.utils.data.TensorDataset(images, labels)
    with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=batch_size) as pace:
        for batch in pace.batches(dataset, epochs=1000):
            pace.step(batch)


def named(name: str) -> tuple[Any, tuple[int, ...]]:
    from paceline import find

    network = find.module("models", name)
    return network.build(CLASSES), network.INPUT


def residual(blocks: int = 6, width: int = 64) -> tuple[Any, tuple[int, ...]]:
    from torch import Tensor, nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.norm2, self.second = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(functional.relu(self.norm(x)))
            return x + self.second(functional.relu(self.norm2(y)))

    stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    return nn.Sequential(stem, *(Block() for _ in range(blocks)), *head), (3, 112, 112)


def compare(job: str, budget_s: float, timed_s: float, wanted: list[str]) -> list[dict[str, Any]]:
    command, machine = [__file__, "--job", job], survey()
    profile, unknown = take(command, "rounded", budget_s, machine)
    if profile is None:
        raise SystemExit(f"{job}: {unknown}")
    rows = wanted or candidates("rounded", machine, profile.facts, ENGINES)
    print(f"\n{job}: profiled in {profile.spent_s:.1f} s")
    found = []
    for row in rows:
        predicted = predicted_s(row, profile, machine.cores)
        trial = measure(command, row, timed_s=timed_s)
        if trial.error or predicted is None:
            print(f"{row:36} {trial.error or 'not predicted'}")
            continue
        error = predicted / trial.step_s - 1
        print(f"{row:36}{predicted:10.4f}{trial.step_s:10.4f} ± {trial.spread_s:.4f}{error:+9.1%}", flush=True)
        found.append({"job": job, "row": row, "predicted_s": predicted, "measured_s": trial.step_s, "error": error})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=JOBS, help="MODEL:BATCH_SIZE")
    parser.add_argument("--rows", default="", help="these instead of all, separated by commas")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for one profile")
    parser.add_argument("--timed", type=float, default=2.5, help="seconds of timed steps per row")
    parser.add_argument("--out", type=Path, default=Path("predict.json"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        name, _, size = asked.job.partition(":")
        train(name, int(size))
        return
    wanted = [row for row in asked.rows.split(",") if row]
    found = [one for job in asked.jobs for one in compare(job, asked.budget, asked.timed, wanted)]
    errors = sorted(abs(one["error"]) for one in found)
    if not errors:
        sys.exit("no row could be compared")
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    print(f"\n{len(errors)} rows: median error {statistics.median(errors):.1%}, p90 {p90:.1%}, worst {errors[-1]:.1%}")
    asked.out.write_text(json.dumps({"machine": str(survey()), "rows": found}, indent=2))


if __name__ == "__main__":
    main()
