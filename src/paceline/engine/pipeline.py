"""Pipeline of k stages in one process: the model is cut, and stages compute different micro-batches at once.

    each thread    a micro-batch: its forward pass, later its backward pass, on the cores of the stage that it is in
    a cut          before the forward of a named module. There a thread leaves its stage for the next one, and in
                   backward, when the gradient of that module's input is known, for the one before
    a stage        lets one thread in at a time, in the order of the schedule (`stages/schedule.py`)

So the model's own forward runs unchanged, with whatever crosses the cut, and the process has the model, its gradients
and the optimizer's state once: their ``state_dict()`` and checkpoints contain all stages, and `Pace.evaluate` runs the
whole model. Without ``cut`` the first step is computed without a pipeline, and timed: then the cuts divide its passes
evenly (`checks/pass_times.py`). On GPUs each stage has one (`stages/devices.py`): its weights lie there from
the join on, cut evenly by their bytes, and the threads only give the GPUs their work.

*Invariants*: bit-equal to sequential with ``accumulate`` as many micro-batches, whatever the schedule and the cut, if
the update has as many threads (under autocast: where no weight is used twice); one stage is sequential. Dropout masks
are each micro-batch's own.
*Cost*: the activations of the micro-batches in flight; idle time of (k - 1) / (micros + k - 1).
*Source*: Huang et al. 2019 (arXiv 1811.06965), section 2.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from paceline import transport
from paceline.contract import Exchange, Loss
from paceline.engine import sequential
from paceline.engine.compute.forward_state import Moving
from paceline.engine.compute.gradient_hooks import Backward
from paceline.engine.compute.local_step import LocalStep
from paceline.engine.compute.precision import Numerics
from paceline.engine.node import affinity, cgroup_limits
from paceline.engine.stages import devices
from paceline.engine.stages.micro_batches import Pipelined
from paceline.engine.stages.schedule import SCHEDULES
from paceline.registry import PROCESSES

PRESET = "preset"


class Engine(sequential.Engine):
    """Its options are those of `Stages`."""

    defers_updates, composes = False, True
    counts, micros_per_stage = "stage", 4
    turn_s = 0.4e-3  # a thread wakes up; of a model whose step takes 1 ms
    # else OpenMP's threads spin after the update, on the cores that the stages need then
    environment: Mapping[str, str] = {"OMP_WAIT_POLICY": "passive"}

    def __init__(self, num_stages: int = 2, micros: int = 0, schedule: str = "1f1b", cut: str = "", devices: str = ""):
        super().__init__()
        stages = Stages(num_stages, micros, schedule, cut, devices)
        self.local_step = stages if num_stages > 1 else self.local_step

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        if isinstance(self.local_step, Stages):  # threads of the update
            self.num_threads = affinity.share(0, 1, os.sched_getaffinity(0), allowed=cgroup_limits.cores())[1]
        super().open(model, optimizer, loss, metric)

    def close(self) -> None:
        super().close()
        if self.local_step.devices and isinstance(self.local_step, Stages):
            devices.bring(self.model, self.optimizer, self.local_step.home)

    def local_exchange(
        self, exchange: Exchange, control: transport.Control, alone: bool, activity: transport.Waits
    ) -> tuple[Exchange, transport.Control]:
        found = super().local_exchange(exchange, control, alone, activity)
        self.backward.watch()
        return found


class Stages(LocalStep):
    """``micros``: micro-batches of a batch, 4 per stage by default. ``cut``: the names of the modules with which the
    stages after the first begin, separated by semicolons; "preset": those of the model's ``pipeline_cuts``, which has
    them by the number of stages. ``devices``: of each stage, separated by semicolons; of a model on a GPU that one and
    those after it."""

    def __init__(self, num_stages: int, micros: int, schedule: str, cut: str, asked: str):
        for name, value, least in (("k", num_stages, 1), ("micros", micros, 0)):
            if not (isinstance(value, int) and value >= least):
                raise ValueError(f"engine 'pipeline:k' needs a whole number {name} >= {least}, got {value!r}")
        if schedule not in SCHEDULES:
            raise ValueError(f"engine 'pipeline': schedule is one of {', '.join(SCHEDULES)}, got {schedule!r}")
        cuts = [name.strip() for name in str(cut).split(";") if name.strip()]
        if cuts not in ([], [PRESET]) and len(cuts) != num_stages - 1:
            raise ValueError(
                f"engine 'pipeline:{num_stages}' has {num_stages - 1} cuts, cut={cut!r} has {len(cuts)}; name so many "
                f"modules, separated by semicolons, or leave cut out"
            )
        self.num_stages, self.num_micros = num_stages, micros or Engine.micros_per_stage * num_stages
        self.schedule, self.cuts = schedule, cuts
        self.asked = [name.strip() for name in str(asked).split(";") if name.strip()]
        self.backward: Pipelined | None = None
        self.message = ""

    def hooked(self, model: nn.Module, numerics: Numerics, least_bytes: tuple[float, float]) -> Backward:
        cpus, allowed = os.sched_getaffinity(0), -(-cgroup_limits.cores() // self.num_processes)
        parts = [affinity.share(i, self.num_stages, cpus, allowed=allowed) for i in range(self.num_stages)]
        self.backward = Pipelined(model, SCHEDULES[self.schedule], parts, self.cuts, least_bytes, self.devices)
        return self.backward

    def prepare(self, model: nn.Module, optimizer: Optimizer, numerics: Numerics) -> None:
        if numerics.compile:
            raise ValueError("engine 'pipeline' cuts a model between its modules, and a compiled one has none")
        names = dict(model.named_modules())
        if self.cuts == [PRESET] and PRESET not in names:
            presets = getattr(model, "pipeline_cuts", {})
            if self.num_stages not in presets:
                raise ValueError(
                    f"engine 'pipeline:{self.num_stages}': cut={PRESET} takes the model's own pipeline_cuts, and "
                    f"{type(model).__name__} has none for {self.num_stages} stages; name the modules, or leave cut out"
                )
            self.cuts = list(presets[self.num_stages])
        if missing := [name for name in self.cuts if name not in names]:
            close = difflib.get_close_matches(missing[0], names, n=3, cutoff=0.3) or list(filter(None, names))[:8]
            raise ValueError(
                f"engine 'pipeline' is to cut before {missing[0]!r}, which is no module of this model"
                + (f"; its named_modules() has {', '.join(map(repr, close))}" if close else ", which has none inside")
            )
        own = self.home = next(model.parameters()).device
        num_gpus = 0 if own.type == "cpu" and not self.asked else torch.cuda.device_count()
        self.devices = devices.chosen(self.asked, own, self.num_stages, num_gpus)
        if self.devices and self.num_processes > 1:
            raise ValueError(
                f"engine '{PROCESSES}:k/pipeline:m' has its weights in the machine's memory; leave devices= out"
            )
        if self.devices:
            self.cuts = self.cuts or devices.even_cuts(model, self.num_stages)
            self.message = devices.place(model, optimizer, self.cuts, self.devices)

    def check_step(self, moving: Moving) -> None:
        if changed := sorted(moving.found & moving.frozen.keys()):
            raise ValueError(
                f"engine 'pipeline' computes several micro-batches at once, and forward of this model changes "
                f"{changed[0]!r}, which does not train, such as a momentum encoder's weights; use another engine"
            )

    def check_sync_norm(self) -> None:
        raise ValueError("batch_norm='sync' needs all rows of a batch at once, not engine 'pipeline'")

    def found(self) -> str:
        assert self.backward
        text, self.message, self.backward.found = self.message or self.backward.found, "", ""
        return text
