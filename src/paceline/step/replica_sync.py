"""Replica divergence: rank 0's weights and optimizer state are re-broadcast, a part per step, where last bits differ.

Gradients are added up to the same bits everywhere, but what each node makes of them is not the same where processors,
libraries or numbers of threads differ: the product of a layer's factors, the momentum, the update itself. So as soon as
the vote's hashes differ, each step ends with a broadcast of the next part, until no hash has differed for
``quiet_steps`` steps.

*Cost*: one broadcast of 1 / ``period`` of the weights and their optimizer state per step.
*Laws*: a weight is never further from rank 0's than ``period`` steps can bring it; on like hardware one period makes
replicas bit-equal again, optimizer state included; bytes counted are the broadcast's cost.
Where a node has several processes weights alone go round: optimizer state is divided there, and its own decay
bounds it. Buffers are each node's own, as batch statistics are.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from paceline.engine.compute.state_store import Part, in_parts, read, states
from paceline.engine.node.optimizer_shards import SLICES, division
from paceline.messages import StepOutcome, Target, Update
from paceline.report.activity import REPAIR
from paceline.report.log import log
from paceline.report.step_observer import StepObserver
from paceline.step.run_state import RunState

PERIOD = 256  # steps in which everything has gone round
MIN_VALUES = 1 << 14  # of weights in a part
QUIET_STEPS = 1280  # longer than the hash needs to look at everything, and a period

NOTHING = torch.empty(0)


class ReplicaSync(StepObserver):
    """Of every process. Where a node has several, none of them holds the whole state of the optimizer."""

    key = "drift"

    def __init__(
        self, run: RunState, period: int = PERIOD, quiet_steps: int = QUIET_STEPS, min_values: int = MIN_VALUES
    ):
        self.run, self.engine, self.control = run, run.engine, run.control
        self.period, self.quiet_steps, self.min_values = period, quiet_steps, min_values
        self.parts: list[Part] = []
        self._left = self._turn = self._sent_bytes = 0
        self._divergence, self._said = 0.0, False

    def state(self) -> dict[str, Any]:
        """Where it is: alike everywhere but for the divergence."""
        return {"left": self._left, "turn": self._turn, "sent_bytes": self._sent_bytes}

    def load(self, state: Any) -> None:
        self._left, self._turn, self._sent_bytes = state["left"], state["turn"], state["sent_bytes"]
        self.parts = self._cut()

    def updated(self, outcome: StepOutcome) -> None:
        step = self.run.num_steps
        if outcome.drift:
            if not self._left:
                self._begin(step)
            self._left = self.quiet_steps
        elif not self._left:
            return
        with self.run.activity.at(REPAIR):
            self._repair(step)

    def _repair(self, step: int) -> None:
        self.engine.wait_pending()
        before = self.run.link.sent_bytes
        self._spread(self.parts[self._turn])
        self._sent_bytes += self.run.link.sent_bytes - before
        self._turn += 1
        if self._turn == len(self.parts):
            self._report(step)
        self._left -= 1
        if not self._left:
            self.run.record.write("drift", step=step, over=True)

    def _begin(self, step: int) -> None:
        self.parts = self._cut()
        self._turn, self._sent_bytes, self._divergence = 0, 0, 0.0
        self.run.record.write("drift", step=step, parts=len(self.parts))
        if not self.run.leader or self._said:
            return
        self._said = True
        text = (
            f"the nodes' weights differ since step {step}, as they do where processors, libraries or numbers of "
            f"threads are not alike; from now on rank 0's weights and optimizer state go round, all of them in "
            f"{len(self.parts)} steps"
        )
        log.warning(text)
        self.run.record.write("hint", text=text)

    def _cut(self) -> list[Part]:
        numels = [weight.numel() for weight in self.engine.weights]
        each = max(self.min_values, -(-sum(numels) // self.period))
        # where a tensor's update looks at all of it, half of it mended would spoil that half again
        return in_parts(numels, each, whole=division(self.engine.optimizer) != SLICES)

    def _report(self, step: int) -> None:
        """At the end of a period: how far the nodes were apart, and what it took to bring them together."""
        said = [json.loads(words) for words in self.control.all_gather(json.dumps(self._divergence).encode())]
        self.run.record.write("drift", step=step, parts=len(self.parts), gap=max(said), sent_bytes=self._sent_bytes)
        self._turn, self._sent_bytes, self._divergence = 0, 0, 0.0

    def _spread(self, part: Part) -> None:
        """Rank 0's values of this part into everyone's."""
        views = self._views(part)
        packed = torch.cat([values.contiguous().view(torch.uint8) for _, values in views])
        self.control.broadcast([packed])
        targets, start = [], 0
        for target, before in views:
            end = start + before.numel() * before.itemsize
            # a copy begins where any type may
            new = packed[start:end].clone().view(before.dtype).to(before.device)
            targets.append(dataclasses.replace(target, values=new))
            start = end
            if not target.key:
                own, others = before.double(), new.double()
                apart = float((own - others).norm() / others.norm().clamp_min(1e-30))
                self._divergence = max(self._divergence, apart)
        self.engine.apply(Update(targets=targets))

    def _views(self, part: Part) -> list[tuple[Target, Tensor]]:
        """What goes round of these weights, and where it belongs; of the optimizer's tensors too where all are here."""
        weights, found = self.engine.weights, []
        kept = {} if max(self.run.world.sizes) > 1 else states(weights, self.engine.optimizer)
        for index, first, last in part:
            found.append((index, weights[index], first, last, ""))
            for key, value in kept.get(index, {}).items():
                if value.shape == weights[index].shape:
                    found.append((index, value, first, last, key))
                elif first == 0:
                    found.append((index, value, 0, value.numel(), key))
        return [(Target(i, NOTHING, first, key), read(each, first, last)) for i, each, first, last, key in found]
