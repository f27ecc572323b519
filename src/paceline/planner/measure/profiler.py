"""The profiler inside the job: at the first step it takes the job's profile instead of training, and ends the process.

Forked copies first time the settings of several copies; then this process times the others. Settings for which the
budget does not suffice are predicted from the measured ones (`planner.cost_model`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from paceline import contract
from paceline.engine.checks.norm_layers import over_batches
from paceline.engine.checks.pass_times import PassTimes
from paceline.engine.node import affinity
from paceline.launch.machine import Machine, survey
from paceline.planner import plan_cache
from paceline.planner.candidates import (
    RUNTIME_BYTES,
    JobFacts,
    allowed,
    candidates,
    fits_timed,
    fitting_rows,
    planned,
    refusal,
    split,
)
from paceline.planner.measure.forked_copies import ForkedCopies
from paceline.planner.measure.layers import (
    LayerTimer,
    activation_bytes,
    autocast,
    first_samples,
    lower_quartile,
    shapes,
    synced_time,
)
from paceline.planner.measure.micro_batch import MicroBatchTimer
from paceline.planner.measure.profile import Profile, Setting
from paceline.planner.measure.update_timing import Updates, passes
from paceline.registry import BASELINE
from paceline.report.log import log
from paceline.report.record import write_whole

COPY_BYTES = 32 << 20
PINGS = 30
FUSING_PAYS = 0.03  # of a step
STEPS_OF_ONE = 6  # steps that recording a timeline by one pass takes
MAX_PASSES = 7
STAGES_SPENT = 1.5  # of the budget: a micro-batch takes little of it, and nothing else tells its time
MIN_ROWS = 2  # samples that batch norm needs


@dataclass
class ProfiledStep:
    """The job at its first step. ``compute(batch)``: the loss; ``input_s``: seconds to fetch a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: contract.Engine
    compute: Callable[[Any], Tensor]
    batch: Any
    rows: int
    batch_size: int
    steps: int = 0
    clip: float | None = None
    input_s: float = 0.0
    division: str = ""
    record: Callable[[Any, int], dict[str, Any]] | None = None  # (samples, passes) -> a timeline
    accumulate: int = 1
    precision: str | None = None
    batch_norm: str = "local"
    methods: Callable[[str], list[dict[str, Any]]] = lambda _: []  # a configuration -> the fields of each method
    cuts: bool = True  # whether samples lie along the first dimension, so that the batch can be cut

    def few(self, rows: int, most: int) -> int:
        """``rows``, but at least two and at most ``most``; ``most`` if the batch cannot be cut."""
        return min(most, max(MIN_ROWS, rows)) if self.cuts else most

    def first_samples(self, rows: int, words: Sequence[str] = ()) -> Any:
        """The first ``rows`` samples of the batch, or all of a batch that cannot be cut."""
        return first_samples(self.batch, rows if self.cuts else sys.maxsize, words)


def take_profile(request_path: Path, job: ProfiledStep) -> None:
    """Writes the profile beside the request; nothing if the model cannot be profiled. Raises SystemExit."""
    request, answer = json.loads(request_path.read_text()), request_path.with_name("answer.json")
    if "parts" in request:
        write_whole(answer, json.dumps(_record_timelines(job, request)))
        raise SystemExit(0)
    start_s = time.time() - request["begun"]
    torch.set_num_threads(1)
    try:
        profiler = _Profiler(job, request["cores"], request["level"], request["budget_s"])
        profiler.profile(start_s).write(answer)
    except Exception as error:  # a model may raise anything; trials show whether it trains
        log.warning(f"not profiled: {type(error).__name__}: {error}")
    raise SystemExit(0)


def _record_timelines(job: ProfiledStep, request: Mapping[str, Any]) -> dict[str, Any]:
    """A timeline for each part of the batch, with as many passes as the budget allows. Weights do not change."""
    assert job.record
    parts, level, budget_s = request["parts"], request["level"], request["budget_s"]
    mark = plan_cache.fingerprint(job, level, shapes(job.batch, job.rows))
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    lines = []
    for divisor in parts:
        num_rows = job.few(job.rows // divisor, job.rows)
        rows = job.first_samples(num_rows)
        start = time.perf_counter()
        line = job.record(rows, 1)
        step_s = (time.perf_counter() - start) / STEPS_OF_ONE
        passes = min(MAX_PASSES, int(budget_s / len(parts) / step_s / 2) - 2)
        # replaced, since a timeline counts what the loss divides by, such as tokens
        lines.append({**(job.record(rows, passes) if passes > 1 else line), "rows": num_rows})
    absorbs = job.engine.optimizer_takes_factors
    methods = job.methods(request["chosen"])
    return {"lines": lines, "absorbs": absorbs, "batch_size": job.batch_size, "methods": methods, "fingerprint": mark}


@dataclass
class _Profiler:
    job: ProfiledStep
    cores: int
    level: str
    budget_s: float
    layers_s: dict[str, float] = field(default_factory=dict)
    layers: LayerTimer | MicroBatchTimer | None = None
    num_calls: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    taken: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        job, self.runtime_bytes = self.job, psutil.Process().memory_info().rss
        self.parameters = dict(job.model.named_parameters())
        self.device = next(iter(self.parameters.values())).device.type
        self.rows = -(-job.rows // max(1, job.accumulate))  # per micro-batch: more may exceed the memory
        few = job.few(self.rows // 8, self.rows)
        seen = LayerTimer(job.model, lambda: job.compute(job.first_samples(few)), (), set())
        self.activation_bytes = self._activations(few)
        rows = {name: seen.rows.get(id(p), 0) * job.rows // few for name, p in self.parameters.items()}
        self.updates = Updates(job.engine, job.optimizer, self.parameters, rows, job.clip)
        self.optimizer_takes_factors = self.updates.optimizer_takes_factors

    def _activations(self, rows: int) -> int:
        """What forward keeps of a micro-batch, by a line through two sizes: casts of weights do not grow with rows."""
        tensors = [*self.parameters.values(), *self.job.model.buffers()]
        fewer = self.job.few(rows // 2, rows)
        sizes = dict.fromkeys((rows, fewer))
        kept = {n: activation_bytes(lambda n=n: self.job.compute(self.job.first_samples(n)), tensors) for n in sizes}  # type: ignore[misc]
        each = (kept[rows] - kept[fewer]) / (rows - fewer) if rows > fewer else 0.0
        return kept[rows] + max(0, round(each * (self.rows - rows)))

    @property
    def spent(self) -> float:
        return (time.monotonic() - self.start) / self.budget_s

    def profile(self, start_s: float) -> Profile:
        job = self.job
        facts = self._facts()
        machine = survey()
        settings = self._settings(facts, machine)
        most, cores = max((one.copies for one in settings), default=1), sorted(os.sched_getaffinity(0))
        copies = ForkedCopies(most if most > 1 else 0, self._work, cores, self.start + 10 * self.budget_s)
        whole_s, base = self._base(
            settings[0].factors, fitting_rows(facts, machine), {one.stages for one in settings if one.stages > 1}
        )
        # the ratio of options, if no other setting with them is timed; last of those that may only be shown
        options = dict.fromkeys(replace(base, words=one.words) for one in settings if one.words)
        for one in options:
            if allowed("+".join((BASELINE, *one.words)), self.level):
                self._alone(one)
        copy_per_s = message_s = 0.0
        try:
            if copies.pids:
                affinity.release()  # the copies need it
                copy_per_s = min(copies.request(most, "copy"))
                message_s = self._message_s(copies, most)
                self.layers = None  # whose inputs need memory
                several = [one for one in settings if one.copies > 1]
                # else all are predicted
                if all(fits_timed(one.copies, one.rows, facts, machine, one.stages > 1) for one in several):
                    self._together(copies, several)
        except (RuntimeError, TimeoutError) as error:  # predictions then do without them
            log.warning(f"copies not timed: {error}")
        finally:
            copies.close()
        for one in options:
            self._alone(one)
        for one in settings:
            scaled = one.threads == 1 and not one.words  # `cost_model` scales the base setting to it
            if one.copies == 1 and not scaled and self.spent < 1:
                self._alone(one)
        update_s = self._update_s(facts)
        return Profile(
            replace(facts, can_fuse=facts.can_fuse and self._fusing_pays(update_s)),
            plan_cache.fingerprint(job, self.level, shapes(job.batch, job.rows)),
            job.steps,
            self.optimizer_takes_factors,
            str(base),
            whole_s,
            self.layers_s,
            self.num_calls,
            self.largest,
            update_s,
            self.updates.dense_bytes(),
            copy_per_s,
            message_s,
            job.input_s,
            start_s,
            time.monotonic() - self.start,
        )

    def _facts(self) -> JobFacts:
        job = self.job
        gradients = sum(p.nbytes for p in self.parameters.values() if p.requires_grad)
        tensors = [*self.parameters.values(), *job.model.buffers()]
        states = 0 if type(job.optimizer) is torch.optim.SGD else 1
        groups = job.optimizer.param_groups
        states += any(group.get("momentum") for group in groups) or "betas" in groups[0]
        return JobFacts(
            job.rows,
            self.device,
            any(isinstance(module, nn.Conv2d) for module in job.model.modules()),
            job.batch_norm == "local" and bool(over_batches(job.model)),
            self.updates.can_fuse(),
            sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided),
            gradients,
            states * gradients,
            self.activation_bytes,
            job.division,
            -(-job.rows // self.rows),
            max(RUNTIME_BYTES, self.runtime_bytes - sum(tensor.nbytes for tensor in tensors)),
            *self._stages(),
        )

    def _stages(self) -> tuple[int, str]:
        """How many stages a pipeline may have, and why not more."""
        if self.job.batch_norm == "sync":
            return 1, "batch_norm='sync' needs all rows of a batch at once"
        times, rows = PassTimes(), self.job.first_samples(self.job.few(1, self.rows))
        with times.of(self.job.model):
            self.job.compute(rows)
        count = len(times.places())
        return count + 1, f"forward has {count} {'place' if count == 1 else 'places'} where it can be cut"

    def _settings(self, facts: JobFacts, machine: Machine) -> list[Setting]:
        """The distinct settings of all candidates that fit into memory: without options first, then those on all cores,
        by importance."""
        found: dict[Setting, None] = {}
        listed = candidates(self.level, machine, facts, planned())
        for candidate in [each for each in listed if not refusal(each, facts, machine)] or listed[:1]:
            setting = Setting.of(split(candidate, self.cores), facts.part_rows, self.optimizer_takes_factors)
            if setting.copies == 1 or self.job.cuts:
                found[setting] = None
        return sorted(found, key=lambda one: (bool(one.words), one.threads * one.copies < self.cores))

    def _absorbed(self, setting: Setting) -> set[int]:
        return {id(self.parameters[name]) for name in self.updates.factored()} if setting.factors else set()

    def _forward(self, setting: Setting) -> Callable[[], Tensor]:
        torch.set_num_threads(setting.threads)
        batch = self.job.first_samples(setting.rows, setting.words)

        def forward() -> Tensor:
            with autocast(setting.words, list(self.parameters.values())[:1]):
                return self.job.compute(batch)

        self.layers = None  # before the next one
        return forward

    def _record(self, setting: Setting) -> LayerTimer:
        layers = LayerTimer(self.job.model, self._forward(setting), setting.words, self._absorbed(setting))
        self.layers, self.num_calls = layers, layers.num_calls
        return layers

    def _alone(self, setting: Setting) -> None:
        if str(setting) in self.layers_s:
            return
        layers = self._record(setting)
        self.layers_s[str(setting)] = layers.total_s(passes(layers.time, self.budget_s / 12))

    def _together(self, copies: ForkedCopies, settings: Sequence[Setting]) -> None:
        """Times settings of several copies: each pass starts on all copies at once, and the slowest copy counts."""
        for one in settings:
            if self.spent > (STAGES_SPENT if one.stages > 1 else 0.6):
                continue
            copies.request(one.copies, "record", setting=vars(one))
            taken = passes(lambda one=one: copies.request(one.copies, "time"), self.budget_s / 12)  # type: ignore[misc]
            self.layers_s[str(one)] = max(copies.request(one.copies, "total", last=len(taken)))

    def _work(self, what: str, options: dict[str, Any]) -> Any:
        """Runs in a forked copy."""
        if what == "record":
            setting = Setting(**{**options["setting"], "words": tuple(options["setting"]["words"])})
            if setting.stages > 1:
                weights = [weight for weight in self.parameters.values() if weight.requires_grad]
                self.layers = MicroBatchTimer(self._forward(setting), weights, self._absorbed(setting))
            else:
                self._record(setting)
            self.taken = []
        if what == "time" and self.layers:
            self.taken.append(self.layers.time())
        if what == "total" and self.layers:
            return self.layers.total_s(self.taken[-options["last"] :])
        return _copy_per_s() if what == "copy" else None

    def _message_s(self, copies: ForkedCopies, most: int) -> float:
        start = time.perf_counter()
        for _ in range(PINGS):
            copies.request(most, "ping")
        return (time.perf_counter() - start) / PINGS / 2

    def _base(self, factors: bool, most: int, stages: Collection[int]) -> tuple[float, Setting]:
        """Times the whole model and its layers, interleaved, at one thread; on part of the batch if a step is long, and
        on at most so many rows. Then it is known how evenly the model can be cut into so many ``stages``."""
        few_rows = self.job.few(self.rows // 8, self.rows)
        self._step(few_rows, factors)
        about_s = self._step(few_rows, factors) * self.rows / few_rows
        # beside a forward and its gradients all layers' inputs are kept: up to twice what a forward keeps
        most = max(1, most // 4) if most < self.rows else most
        small = self.rows <= most and (about_s < self.budget_s / 15 or self.rows < 8)
        whole = small or not self.job.cuts
        rows = self.rows if whole else self.job.few(min(most, self.rows // 4), self.rows)
        base = Setting(1, rows, factors=factors)
        layers = self._record(base)
        taken = passes(lambda: (self._step(base.rows, factors), layers.time()), self.budget_s / 5)
        layers_s = [one for _, one in taken]
        self.layers_s[str(base)] = layers.total_s(layers_s)
        self.largest = {str(k): layers.largest(layers_s, k) for k in stages}
        if not whole:  # a second size for the extrapolation
            self._alone(Setting(1, self.job.few(base.rows // 2, base.rows), factors=factors))
        return lower_quartile([one for one, _ in taken]), base

    def _step(self, rows: int, factors: bool) -> float:
        """Seconds of forward and backward at one thread, without the gradients that the update makes from factors."""
        torch.set_num_threads(1)
        weights = [p for p in self.parameters.values() if p.requires_grad]
        absorbed = self._absorbed(Setting(1, rows, factors=factors))
        batch = self.job.first_samples(rows)
        for p in weights:
            p.requires_grad_(id(p) not in absorbed)
        try:
            start = synced_time(weights)
            trainable = [p for p in weights if p.requires_grad]
            torch.autograd.grad(self.job.compute(batch), trainable, allow_unused=True)
            return synced_time(weights) - start
        finally:
            for p in weights:
                p.requires_grad_(True)

    def _update_s(self, facts: JobFacts) -> dict[str, float]:
        rounds = any(key.endswith("/0") for key in self.layers_s)  # in reduced precision the optimizer takes no factors
        takes = self.optimizer_takes_factors
        kinds = ["factors"] * takes + [""] * (rounds or not takes) + ["fused"] * facts.can_fuse
        return {
            f"{threads}/{kind}" if kind else str(threads): self.updates.seconds(threads, kind, self.budget_s / 40)
            for threads in sorted({1, self.cores})
            for kind in kinds
        }

    def _fusing_pays(self, update_s: dict[str, float]) -> bool:
        """Whether a fused optimizer saves more than the resolution of measurements for any setting."""
        plain_s = update_s.get(f"{self.cores}/factors", update_s.get(str(self.cores), 0.0))
        return plain_s - update_s[f"{self.cores}/fused"] > FUSING_PAYS * min(self.layers_s.values())


def _copy_per_s() -> float:
    """Bytes copied per second, from memory to memory."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    taken = []
    for _ in range(8):
        start = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - start)
    return COPY_BYTES / statistics.median(taken)
