"""Replica divergence: rank 0's weights and optimizer state are re-broadcast, a part per step, where last bits differ.

The sums of gradients have the same bits on all nodes. What each node computes from them may differ if processors,
libraries or numbers of threads differ: the product of a layer's factors, the momentum, the update itself. As soon as
the vote's hashes differ, each step ends with a broadcast of the next part, until no hash has differed for
``quiet_steps`` steps.

*Cost*: one broadcast of 1 / ``period`` of the weights and their optimizer state per step.
*Invariants*: a weight diverges from rank 0's by at most what ``period`` steps can change; on like hardware one period
makes replicas bit-equal again, optimizer state included; bytes counted are the broadcast's cost.
If a node has several processes, only weights are broadcast: optimizer state is divided there, and its own decay bounds
its divergence. Buffers stay each node's own, as batch statistics do.
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

PERIOD = 256  # steps in which everything is broadcast once
MIN_VALUES = 1 << 14  # weights in a part, at least
QUIET_STEPS = 1280  # more than the hash needs to cover all weights, and more than a period

NOTHING = torch.empty(0)


class ReplicaSync(StepObserver):
    """In every process. Of several processes of a node, none holds the whole optimizer state."""

    key = "drift"

    def __init__(
        self, run: RunState, period: int = PERIOD, quiet_steps: int = QUIET_STEPS, min_values: int = MIN_VALUES
    ):
        self.run, self.engine, self.control = run, run.engine, run.control
        self.period, self.quiet_steps, self.min_values = period, quiet_steps, min_values
        self.parts: list[Part] = []
        self._steps_left = self._next_part = self._sent_bytes = 0
        self._divergence, self._logged = 0.0, False

    def state(self) -> dict[str, Any]:
        """Its progress, which is the same in all processes, without the divergence."""
        return {"left": self._steps_left, "turn": self._next_part, "sent_bytes": self._sent_bytes}

    def load(self, state: Any) -> None:
        self._steps_left, self._next_part, self._sent_bytes = state["left"], state["turn"], state["sent_bytes"]
        self.parts = self._cut()

    def updated(self, outcome: StepOutcome) -> None:
        step = self.run.num_steps
        if outcome.drift:
            if not self._steps_left:
                self._begin(step)
            self._steps_left = self.quiet_steps
        elif not self._steps_left:
            return
        with self.run.activity.at(REPAIR):
            self._repair(step)

    def _repair(self, step: int) -> None:
        self.engine.wait_pending()
        before = self.run.link.sent_bytes
        self._broadcast(self.parts[self._next_part])
        self._sent_bytes += self.run.link.sent_bytes - before
        self._next_part += 1
        if self._next_part == len(self.parts):
            self._report(step)
        self._steps_left -= 1
        if not self._steps_left:
            self.run.record.write("drift", step=step, over=True)

    def _begin(self, step: int) -> None:
        self.parts = self._cut()
        self._next_part, self._sent_bytes, self._divergence = 0, 0, 0.0
        self.run.record.write("drift", step=step, parts=len(self.parts))
        if not self.run.leader or self._logged:
            return
        self._logged = True
        text = (
            f"the nodes' weights differ since step {step}, as they do where processors, libraries or numbers of "
            f"threads differ; from now on rank 0's weights and optimizer state are broadcast, all of them in "
            f"{len(self.parts)} steps"
        )
        log.warning(text)
        self.run.record.write("hint", text=text)

    def _cut(self) -> list[Part]:
        numels = [weight.numel() for weight in self.engine.weights]
        each = max(self.min_values, -(-sum(numels) // self.period))
        # if a tensor's update depends on all of it, a repaired half would be wrong again after the next update
        return in_parts(numels, each, whole=division(self.engine.optimizer) != SLICES)

    def _report(self, step: int) -> None:
        """At the end of a period: the largest divergence of a node, and the bytes sent to end it."""
        reports = [json.loads(text) for text in self.control.all_gather(json.dumps(self._divergence).encode())]
        self.run.record.write("drift", step=step, parts=len(self.parts), gap=max(reports), sent_bytes=self._sent_bytes)
        self._next_part, self._sent_bytes, self._divergence = 0, 0, 0.0

    def _broadcast(self, part: Part) -> None:
        """Copies rank 0's values of this part to all processes."""
        views = self._views(part)
        device = views[0][1].device  # of a weight; beside weights on a GPU, Adam counts its steps on the CPU
        packed = torch.cat([values.contiguous().view(torch.uint8).to(device) for _, values in views])
        self.control.broadcast([packed])
        targets, start = [], 0
        for target, before in views:
            end = start + before.numel() * before.itemsize
            # a copy is aligned for any type
            new = packed[start:end].clone().view(before.dtype).to(before.device)
            targets.append(dataclasses.replace(target, values=new))
            start = end
            if not target.key:
                own, others = before.double(), new.double()
                difference = float((own - others).norm() / others.norm().clamp_min(1e-30))
                self._divergence = max(self._divergence, difference)
        self.engine.apply(Update(targets=targets))

    def _views(self, part: Part) -> list[tuple[Target, Tensor]]:
        """These values of the weights, and of the optimizer's tensors if this process holds all, with their targets."""
        weights, found = self.engine.weights, []
        divided = max(self.run.world.sizes) > 1 or self.run.exchange.divides_optimizer
        optimizer_states = {} if divided else states(weights, self.engine.optimizer)
        for index, first, last in part:
            found.append((index, weights[index], first, last, ""))
            for key, value in optimizer_states.get(index, {}).items():
                if value.shape == weights[index].shape:
                    found.append((index, value, first, last, key))
                elif first == 0:
                    found.append((index, value, 0, value.numel(), key))
        return [(Target(i, NOTHING, first, key), read(each, first, last)) for i, each, first, last, key in found]
