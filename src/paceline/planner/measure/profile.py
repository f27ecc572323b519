"""Profile of a job: what it consists of and how long its parts take, measured by the command in a fresh process.

The planner calls `run_profile`, which starts the command with PACELINE_PROFILE set to the path of a request file.
In the command's process, the first `pace.step` passes the job to `profiler.take_profile`, which writes the reply beside
the request and ends the process. All configurations are predicted from this one profile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.child_processes import ScratchFolder
from paceline.launch.machine import Machine
from paceline.planner.candidates import EngineSpec, JobFacts
from paceline.planner.measure import fresh_process
from paceline.planner.methods import MeasuredMethod
from paceline.planner.step_model import StepModel
from paceline.registry import BASELINE
from paceline.report.record import write_whole

START_LIMIT_S = 60.0  # to import torch, build the model, and fetch the first batch
PARTS = (1, 4)  # a step is recorded with the whole batch and with a quarter of it


@dataclass(frozen=True)
class Setting:
    """How layers are timed: ``copies`` at once, each with ``threads`` and ``rows`` samples; precision and layout. The
    ``stages`` of a pipeline are copies, each of which computes a part; timed is a micro-batch of the whole model, whose
    gradients are added to those of another."""

    threads: int
    rows: int
    copies: int = 1
    words: tuple[str, ...] = ()
    factors: bool = False
    stages: int = 1

    @classmethod
    def of(cls, spec: EngineSpec, rows: int, absorbs: bool) -> Setting:
        words = tuple(word for word in spec.words if word in ("bf16", "fp16", "channels_last"))
        return cls(spec.threads, -(-rows // (spec.copies * spec.micros)), spec.at_once, words, absorbs, spec.stages)

    @classmethod
    def parse(cls, key: str) -> Setting:
        threads, rows, copies, words, factors, *stages = key.split("/")
        options = tuple(filter(None, words.split("+"))), factors == "1"
        return cls(int(threads), int(rows), int(copies), *options, *map(int, stages))

    def __str__(self) -> str:
        """As a key of `Profile.layers_s`."""
        stages = (self.stages,) if self.stages > 1 else ()
        options = "+".join(self.words), int(self.factors)
        return "/".join(map(str, (self.threads, self.rows, self.copies, *options, *stages)))


@dataclass(frozen=True)
class Profile:
    """*Units*: seconds and bytes per step of the whole batch, unless stated otherwise.

    ``layers_s``: per setting, forward plus backward of all layers for a micro-batch, each layer timed by itself; with
    stages, of the whole model. ``largest``: by the number of stages, the part of the layers' time in the longest one.
    ``whole_s``: forward plus backward of the whole model, at the setting ``base``. ``update_s``: optimizer alone, by
    "threads", "threads/fused", and "threads/factors".
    """

    facts: JobFacts
    fingerprint: str = ""
    steps: int = 0
    absorbs: bool = False
    base: str = ""
    whole_s: float = 0.0
    layers_s: dict[str, float] = field(default_factory=dict)
    num_calls: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    update_s: dict[str, float] = field(default_factory=dict)
    dense_bytes: int = 0
    copy_per_s: float = 0.0
    message_s: float = 0.0
    input_s: float = 0.0
    start_s: float = 0.0
    spent_s: float = 0.0

    @classmethod
    def of(cls, text: str) -> Profile:
        fields = json.loads(text)
        return cls(**{**fields, "facts": JobFacts(**fields["facts"])})

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self)))


def _request(
    command: Sequence[str], engine: str, budget_s: float, environment: Mapping[str, str], request: Mapping[str, Any]
) -> tuple[str, fresh_process.ProcessResult]:
    """(the reply of the command's first step in a fresh process, empty if none; how the process ended)."""
    with ScratchFolder() as folder:
        request_path = Path(folder) / "profile.json"
        request_path.write_text(json.dumps(request))
        command = [sys.executable, "-m", "paceline", "run", "--engine", engine, *command]
        environment = {"PACELINE_PROFILE": str(request_path), **environment}
        result = fresh_process.run_in_process(command, environment, START_LIMIT_S + 10 * budget_s)
        answer = request_path.with_name("answer.json")
        return answer.read_text() if answer.exists() else "", result


def run_profile(command: Sequence[str], level: str, budget_s: float, machine: Machine) -> tuple[Profile | None, str]:
    """(the profile of ``command``, which follows `paceline run`, or None; the reason if there is none). Raises
    ValueError if the command itself fails, since no candidate could run it."""
    request = {"budget_s": budget_s, "cores": machine.cores, "level": level, "begun": time.time()}
    answer, result = _request(command, BASELINE, budget_s, {"OMP_NUM_THREADS": "1"}, request)
    if answer:
        return Profile.of(answer), ""
    if result.code in fresh_process.KILLED:  # as where memory runs out: another candidate may need less
        return None, result.last_line
    if result.code:
        raise ValueError(f"no candidate could be run: {result.last_line}")
    if result.code is None:
        return None, "the first step was not reached in time"
    return None, result.last_line if "not profiled" in result.last_line else "the script ended without a step"


@dataclass(frozen=True)
class Recording:
    """A step layer by layer, with the whole batch and with a quarter of it; ``methods``: the job's own first."""

    whole: StepModel
    quarter: StepModel
    batch_size: int
    fingerprint: str
    methods: tuple[MeasuredMethod, ...] = ()


def record_step_models(
    command: Sequence[str], engine: str, level: str, budget_s: float, machine: Machine, chosen: str
) -> Recording:
    """``engine``: a configuration of one process, which is recorded; ``chosen``: the one to train with. Raises
    ValueError with the command's error if recording fails."""
    request = {"parts": PARTS, "budget_s": budget_s, "level": level, "begun": time.time(), "chosen": chosen}
    answer, result = _request(command, engine, budget_s, {}, request)
    if not answer:
        own = "its own training loop cannot be profiled"
        why = "it took too long" if result.code is None else result.last_line if result.code else own
        raise ValueError(f"the step could not be recorded layer by layer: {why}; predictions need that")
    found = json.loads(answer)
    methods = tuple(map(MeasuredMethod.of, found["methods"]))
    ways = methods[0].traffic
    whole, quarter = (StepModel.of(line, found["absorbs"], machine.cores, ways) for line in found["lines"])
    return Recording(whole, quarter, found["batch_size"], found["fingerprint"], methods)
