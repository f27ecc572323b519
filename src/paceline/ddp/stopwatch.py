"""Times the steps of a script under DistributedDataParallel, then ends it: for `paceline plan`."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed
from torch.utils._pytree import tree_leaves

from paceline.ddp import import_hook
from paceline.report.log import log

BEFORE, TIMED = 10, 10  # steps: buckets are made anew after one, and ours tries two forms of them
ALONE = 5  # steps after them in which nothing is sent, the first of which is not timed


class Stopwatch:
    """Every rank of ``group`` has one, and all stop it in the same step. ``alone``: whether to time steps without sums
    as well, which is what no exchange can be faster than."""

    def __init__(self, group: Any, alone: bool):
        self.group, self.last = group, BEFORE + TIMED + (ALONE if alone else 0)
        self.steps, self.seconds, self.begun_s, self.rows = 0, list[float](), 0.0, 0
        self.between_steps = True

    @property
    def alone(self) -> bool:
        """Whether the pass that begins is to send nothing: its weights are not used."""
        return self.steps > BEFORE + TIMED

    def forward(self, inputs: Any, synchronised: bool) -> None:
        """Called as a forward pass begins. A step ends with the first pass whose gradients are ``synchronised``; the
        time until the next pass is the step's, its data included."""
        if self.between_steps:
            now = time.perf_counter()
            if self.steps > BEFORE:
                self.seconds.append(now - self.begun_s)
            if self.steps == self.last:
                self._end()
            self.steps, self.begun_s, self.rows = self.steps + 1, now, 0
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.dim()]
        self.rows += len(tensors[0]) if tensors else 0
        self.between_steps = synchronised

    def _end(self) -> None:
        dist: Any = torch.distributed
        median, alone = statistics.median(self.seconds[:TIMED]), self.seconds[TIMED + 1 :]
        slowest = torch.tensor([median, statistics.median(alone) if alone else 0.0])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        if dist.get_rank(self.group) == 0:
            step_s, alone_s = slowest.tolist()
            said = {"step_s": step_s, "alone_s": alone_s, "rows": self.rows, "ranks": dist.get_world_size(self.group)}
            log.info(import_hook.FOUND + json.dumps(said))
        dist.barrier(self.group)
        sys.stdout.flush()
        os._exit(0)  # the script has an end of its own, which it would save and report


def made(group: Any, alone: bool) -> Stopwatch | None:
    return Stopwatch(group, alone) if os.environ.get(import_hook.TIMED) else None
