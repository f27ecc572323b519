"""The profile of a job, in its process or a fresh one; rows that were never run are predicted from its sum."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import paceline
from paceline.data import batches
from paceline.data.sampler import Assignment
from paceline.engine import sequential
from paceline.engine.compute.timeline import record
from paceline.job import Job
from paceline.launch.machine import Machine, survey
from paceline.messages import ExchangeTraffic
from paceline.planner import plan_cache, planner
from paceline.planner.candidates import BF16_FLAGS, RUNTIME_BYTES, candidates, fits_timed, fitting_rows, refusal
from paceline.planner.cost_model import MESSAGES, STEP_S, predicted_s
from paceline.planner.measure import methods, profile, profiler
from paceline.planner.measure import profile_job as looking
from paceline.planner.measure.fresh_process import ProcessResult
from paceline.planner.measure.profile import Setting, record_step_models, run_profile
from paceline.planner.measure.profiler import COPY_BYTES, PINGS, ProfiledStep, _Profiler, _record_timelines

# Inside of a job.


def examined(model, batch, **more):
    engine, optimizer = sequential.Engine(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine.open(model, optimizer, F.cross_entropy)

    def compute(rows):
        return F.cross_entropy(model(rows[0]), rows[1])

    def recorded(rows, passes):
        return json.loads(record(engine, model, rows, passes).to_json())

    size = len(batch[1])
    return ProfiledStep(model, optimizer, engine, compute, batch, size, size, record=recorded, **more)


ASKED = {"parts": (1, 4), "level": "exact", "budget_s": 1e-6, "chosen": "sequential"}


@pytest.mark.parametrize("size", [2, 3, 6, 9])
def test_no_part_of_a_batch_is_less_than_batch_norm_needs(size):
    """Story: small batches were not profiled, and no plan over hosts was made of them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    job = examined(model, (torch.randn(size, 4), torch.arange(size) % 3))
    assert [line["rows"] for line in _record_timelines(job, ASKED)["lines"]] == [size, 2]
    examination = _Profiler(job, 2, "exact", 1e-6)
    assert examination._facts().rows == size
    examination._base(False, size, ())


def test_a_setting_that_cannot_be_computed_takes_no_other_away():
    """A micro-batch of one row has no batch norm."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    found = _Profiler(examined(model, (torch.randn(8, 4), torch.arange(8) % 3)), 2, "exact", 60.0).profile(0.0)
    assert f"1/4/2//{found.absorbs:d}" in found.layers_s
    assert not any(Setting.parse(key).stages > 1 for key in found.layers_s)


def test_a_micro_batch_is_timed_with_options_even_where_the_budget_is_nearly_spent():
    """Story: pipelines with bf16 were predicted at half of their time, by what bf16 gains on a whole batch."""

    class Copies:
        def request(self, count, what, **options):
            return [1.0] * count

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    job = examined(model, (torch.randn(16, 4), torch.arange(16) % 3))
    examination = _Profiler(job, 2, "exact", 1e4)
    examination.start -= 0.7e4
    words = ("bf16",)
    copies = [Setting(1, 8, 2), Setting(1, 8, 2, words)]
    stages = [Setting(1, 2, 2, stages=2), Setting(1, 2, 2, words, stages=2)]
    examination._together(Copies(), [*copies, *stages])
    assert set(examination.layers_s) == set(map(str, stages))


@pytest.mark.parametrize("level", ["exact", "rounded"])
def test_what_may_only_be_shown_is_timed_after_what_may_be_chosen(level, monkeypatch):
    """Story: bf16 alone spent the time in which two copies with channels_last would have been timed, and these were
    predicted a third too fast."""
    some = dataclasses.replace(survey(), cores=2, flags=tuple(BF16_FLAGS))
    monkeypatch.setattr(profiler, "survey", lambda: some)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3))
    job = examined(model, (torch.randn(16, 3, 8, 8), torch.arange(16) % 3))
    order = [Setting.parse(key) for key in _Profiler(job, 2, level, 60.0).profile(0.0).layers_s]
    copies = [place for place, one in enumerate(order) if one.copies == 2 and one.words == ("channels_last",)]
    half = [place for place, one in enumerate(order) if one.copies == 1 and "bf16" in one.words]
    assert copies
    assert half
    assert (min(half) > max(copies)) == (level == "exact")


def test_a_model_that_calls_no_module_is_profiled():
    model = nn.Sequential(nn.Linear(4, 3))
    job = examined(model, (torch.randn(16, 4), torch.arange(16) % 3))
    job.compute = lambda rows: F.cross_entropy(F.linear(rows[0], model[0].weight, model[0].bias), rows[1])
    found = _Profiler(job, 2, "exact", 1.0).profile(0.0)
    assert (found.largest, found.facts.max_stages) == ({}, 1)


class Twice(nn.Module):
    """Three layers, of which one is called twice: a pipeline can be cut before the block and before the head."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
        self.block, self.head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(self.twice(self.twice(self.first(x)))))


@pytest.mark.dear
def test_no_row_is_of_more_stages_than_the_model_has():
    machine = Machine(cores=4, physical_cores=4, memory_bytes=1 << 40)
    job = examined(Twice(), (torch.randn(16, 4), torch.arange(16) % 3))
    profile = _Profiler(job, 4, "exact", 1.0).profile(0.0)
    assert profile.facts.max_stages == 3
    found = candidates("rounded", machine, profile.facts, ("processes",))
    refused = {row: refusal(row, profile.facts, machine) for row in found if "pipeline" in row}
    assert refused.pop("pipeline:4") == "refused: forward has 2 places where it can be cut"
    assert refused
    assert not any(refused.values())
    assert predicted_s("pipeline:4", profile, 4) is None
    assert all(predicted_s(row, profile, 4) for row in refused)


def test_no_pipeline_where_batch_norm_is_over_everyone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    facts = _Profiler(
        examined(model, (torch.randn(8, 4), torch.arange(8) % 3), batch_norm="sync"), 2, "exact", 1.0
    )._facts()
    why = refusal("processes:2/pipeline:2", facts, Machine(cores=4, physical_cores=4, memory_bytes=1 << 40))
    assert why == "refused: batch_norm='sync' needs all rows of a batch at once"


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_batch_norm_over_everyone_makes_no_row_local(batch_norm):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    job = examined(model, (torch.randn(8, 4), torch.arange(8) % 3), batch_norm=batch_norm)
    assert _Profiler(job, 2, "exact", 1.0)._facts().batch_norm == (batch_norm == "local")


def test_a_job_says_how_it_would_travel():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6), nn.BatchNorm1d(6))
    options = {"batch_size": 8, "batch_norm": "sync", "codec": "feedback/topk"}
    with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, **options) as pace:
        ways = methods.of_run(pace.run)
    assert (ways.loses, ways.norm_sums, ways.norm_numel) == (True, 2 * 2 + 1, 4 * (8 + 6))
    assert ways.coding_s > 0


class Mean(nn.Linear):
    """Over time, which comes first."""

    def forward(self, x):
        return super().forward(x.mean(0))


@pytest.mark.parametrize("time", [5, 100])
def test_a_batch_whose_samples_do_not_come_first_is_computed_whole(time):
    """Story: the whole step was recorded as that of a quarter of its rows."""
    batch = torch.randn(time, 16, 4), torch.arange(16) % 3
    job = examined(Mean(4, 3), batch, cuts=False)
    first, second = _record_timelines(job, ASKED)["lines"]
    assert (first["rows"], second["rows"]) == (16, 16)
    examination = _Profiler(job, 2, "exact", 1e-6)
    facts = examination._facts()
    # the layer's input, the logarithms of the probabilities, the targets, and how many they are
    assert facts.activation_bytes == 16 * 4 * 4 + 16 * 3 * 4 + 16 * 8 + 4
    settings = examination._settings(facts, survey())
    assert settings
    assert {(one.rows, one.copies) for one in settings} == {(16, 1)}
    _, base = examination._base(False, 16, ())
    assert base.rows == 16


def test_what_is_timed_fits_into_the_memory():
    """Story: in a container with little memory the profile itself was killed, and nothing was planned."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    job = examined(nn.Sequential(*layers, nn.Linear(64, 3)), (torch.randn(64, 64), torch.arange(64) % 3))
    examination = _Profiler(job, 2, "exact", 1e3)
    facts = examination._facts()
    # the output of a tanh is the input of the next layer, and is kept once
    assert facts.activation_bytes == pytest.approx(64 * (5 * 64 + 3 + 2) * 4, rel=0.01)
    facts = dataclasses.replace(facts, activation_bytes=800 << 20, runtime_bytes=RUNTIME_BYTES)
    machine = dataclasses.replace(survey(), cores=2, memory_bytes=(RUNTIME_BYTES + (500 << 20)) * 10 // 9)
    assert refusal("sequential", facts, machine)
    assert not refusal("pipeline:2", facts, machine)
    assert fitting_rows(facts, machine) in (39, 40)
    assert {(one.rows, one.copies) for one in examination._settings(facts, machine)} == {(8, 2)}
    # what trains may not be timed: two more processes, each with inputs of layers and a forward of an eighth
    extra = 2 * (RUNTIME_BYTES + (200 << 20)) - (500 << 20)
    larger = dataclasses.replace(machine, memory_bytes=machine.memory_bytes + (extra + (1 << 20)) * 10 // 9)
    assert not fits_timed(2, 8, facts, machine)
    assert fits_timed(2, 8, facts, larger)
    assert not fits_timed(2, 9, facts, larger)
    assert not fits_timed(2, 8, dataclasses.replace(facts, gradient_bytes=2 << 20), larger, added=True)
    assert fits_timed(2, 8, dataclasses.replace(facts, gradient_bytes=100 << 10), larger, added=True)
    _, base = examination._base(False, 12, {2})
    assert 0.5 <= examination.largest["2"] < 1
    assert base.rows == 3  # each layer's input twice, where its own function keeps none, a forward, and its gradients
    assert not refusal("sequential", dataclasses.replace(facts, device="cuda"), machine), (
        "nobody knows what a GPU's memory holds"
    )


@pytest.mark.parametrize("code", [137, -9])
def test_a_profile_that_is_killed_leaves_the_trials(code, monkeypatch):
    killed = ProcessResult(code, f"exit code {code}: killed, as where memory runs out")
    monkeypatch.setattr(profile, "_request", lambda *_: ("", killed))
    assert run_profile(["train.py"], "exact", 1.0, survey()) == (None, killed.last_line)
    monkeypatch.setattr(profile, "_request", lambda *_: ("", ProcessResult(1, "no such file")))
    with pytest.raises(ValueError, match="no candidate could be run: no such file"):
        run_profile(["train.py"], "exact", 1.0, survey())


class Gated(nn.Module):
    """Halves of one tensor, both kept; and a cast of the weight, which does not grow with rows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        with torch.autocast("cpu", torch.bfloat16):
            out = self.inner(a * b)
        return out.float()[:, :3]


def test_what_forward_keeps_is_extrapolated_from_what_grows_with_rows():
    rows = 4096
    job = examined(Gated(), (torch.randn(rows, 128, requires_grad=True), torch.arange(rows) % 3))
    kept = _Profiler(job, 2, "exact", 1e3).activation_bytes
    # both halves, the layer's input and weight in 16 bits, what cross-entropy keeps
    assert kept == pytest.approx(rows * (128 * 4 + 64 * 2 + 3 * 4 + 8) + 64 * 64 * 2, rel=0.02)


def time_first(samples):
    rows, targets = zip(*samples, strict=True)
    return torch.stack(rows, 1), torch.stack(targets)


@pytest.mark.parametrize(("collate", "cut"), [(default_collate, True), (time_first, False)])
def test_a_trial_takes_a_part_of_a_batch_where_that_has_parts(collate, cut):
    data = TensorDataset(torch.randn(16, 5, 4), torch.arange(16) % 3)
    assignment = Assignment(0, 1)
    (batch,) = batches.batches(DataLoader(data, batch_size=16, collate_fn=collate), 16, 1, 0, assignment)
    watch = SimpleNamespace(part=lambda rows: rows // 4)
    few = looking.ProfileJob(SimpleNamespace(assignment=assignment), watch, None).takes(batch, own=False)
    assert few.weight == len(few.share(assignment)[1]) == (4 if cut else 16)


def test_factors_are_as_long_as_those_of_a_step():
    """Story: layers that see every token were timed as if they saw every sample."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Flatten(), nn.Linear(2560, 32))
    job = examined(model, (torch.randn(8, 20, 128), torch.arange(8) % 3))
    updates = _Profiler(job, 2, "exact", 1.0).updates
    line = record(job.engine, model, job.batch, 1)
    linear = {spec.names[0]: rows for spec, rows in zip(line.buckets, line.factor_rows, strict=True) if spec.linear}
    assert {name: updates.rows[name] for name in linear} == linear == {"0.weight": 160, "2.weight": 8}
    assert updates.factored() == {"2.weight"}


# Of a command, in a fresh process.

JOB = """
import sys, torch, paceline
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(320, 256), torch.randint(0, 10, (320,)))
with paceline.join(model, optimizer, nn.functional.cross_entropy, batch_size=64) as pace:
    for batch in pace.batches(data, epochs=4):
        pace.step(batch)
        open(sys.argv[1], "w").write("a step was taken")
"""

INPUTS = [("torch.float32", (256,)), ("torch.int64", ())]


def own_job(precision=None):
    """That of JOB."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-3), None, 64, precision=precision)


FEW = """
class Few(nn.Linear):
    def forward(self, x):
        assert len(x) <= 13, f"{len(x)} rows at once"
        return nn.functional.linear(x, self.weight, self.bias)
"""


UNSPENT = """
import time, types
from paceline.planner.measure import profiler
begun = time.monotonic() + 60
profiler.time = types.SimpleNamespace(monotonic=lambda: begun, perf_counter=time.perf_counter, time=time.time)
"""


def test_a_command_is_profiled_without_taking_a_step(tmp_path):
    """A busy machine leaves no setting out: the budget's clock stands still. Nothing is held against seconds."""
    (tmp_path / "job.py").write_text(UNSPENT + JOB)
    machine, start = survey(), time.monotonic()
    profile, _ = run_profile([str(tmp_path / "job.py"), str(tmp_path / "log")], "exact", 2.0, machine)
    whole_s = time.monotonic() - start
    assert not (tmp_path / "log").exists()
    assert profile.facts.rows == 64
    assert profile.steps == 20
    assert profile.num_calls == 3
    assert f"{machine.cores}/fused" in profile.update_s
    assert not profile.facts.images
    assert profile.facts.weight_bytes == 4 * (256 * 512 + 512 + 512 * 10 + 10)
    assert profile.facts.state_bytes == 2 * profile.facts.gradient_bytes
    assert profile.fingerprint == plan_cache.fingerprint(own_job(), "exact", INPUTS)
    # all that was timed passed between the beginning and the end
    found = [profile.whole_s, *profile.layers_s.values(), *profile.update_s.values()]
    assert min(found) > 0
    assert profile.start_s + profile.input_s + sum(found) < whole_s
    # one core takes the step that was timed whole, with as many rows as that had, or more in proportion at most
    base_rows = int(profile.base.split("/")[1])
    passes_s = predicted_s("sequential", profile, machine.cores) - profile.update_s["1"] - profile.input_s - STEP_S
    assert 0.999 < passes_s / profile.whole_s < 1.001 * 64 / base_rows
    # several cores take it as many times faster as their layers were
    per_layer = profile.whole_s / profile.layers_s[profile.base]
    row, update_s = f"threads:{machine.cores}", profile.update_s[f"{machine.cores}"]
    rest_s = update_s + profile.input_s + STEP_S
    if machine.cores > 1:
        layers_s = profile.layers_s[f"{machine.cores}/64/1//0"]
        assert predicted_s(row, profile, machine.cores) == pytest.approx(layers_s * per_layer + rest_s)
        layers_s = profile.layers_s[f"1/{-(-64 // machine.cores)}/{machine.cores}//0"]
        processes_s = predicted_s(f"processes:{machine.cores}", profile, machine.cores)
        assert processes_s > layers_s * per_layer + update_s + MESSAGES * profile.message_s + STEP_S
        assert 0 < 2 * PINGS * profile.message_s < whole_s
        assert 4 * COPY_BYTES / profile.copy_per_s < whole_s  # half of the copies took the median at least


def test_settings_are_timed_until_the_budget_is_spent(monkeypatch):
    """Of a batch that cannot be cut: one thread is timed in any case, two while there is time."""

    def timed(seconds_per_look):
        looks = itertools.count()
        clock = SimpleNamespace(
            monotonic=lambda: seconds_per_look * next(looks), perf_counter=time.perf_counter, time=time.time
        )
        monkeypatch.setattr(profiler, "time", clock)
        job = examined(Mean(4, 3), (torch.randn(5, 16, 4), torch.arange(16) % 3), cuts=False)
        return set(_Profiler(job, 2, "exact", 0.1).profile(0.0).layers_s)

    words = ["", *(["bf16"] if BF16_FLAGS & set(survey().flags) else [])]
    one, two = ({f"{threads}/16/1/{each}/1" for each in words} for threads in (1, 2))
    assert timed(0.0) == one | two
    assert timed(0.2) == one


@pytest.mark.parametrize(
    ("text", "told"), [("raise OSError('no data')", "OSError: no data"), ("1 / 0", "ZeroDivision")]
)
def test_a_command_that_fails_is_told(tmp_path, text, told):
    (tmp_path / "job.py").write_text(text)
    with pytest.raises(ValueError, match=f"no candidate could be run: {told}"):
        run_profile([str(tmp_path / "job.py")], "exact", 1.0, survey())


@pytest.mark.dear
def test_no_more_rows_are_profiled_at_once_than_a_step_computes(tmp_path):
    """Micro-batches are for what does not fit."""
    job = JOB.replace("nn.Linear(256, 512), nn.ReLU()", "Few(256, 512), nn.ReLU()")
    job = job.replace("batch_size=64", "batch_size=64, accumulate=5").replace("torch.manual_seed(0)", FEW)
    (tmp_path / "job.py").write_text(job)
    profile, why = run_profile([str(tmp_path / "job.py"), str(tmp_path / "log")], "exact", 1.0, survey())
    assert profile, why
    assert (profile.facts.rows, profile.facts.parts, profile.facts.part_rows) == (64, 5, 13)
    assert max(int(setting.split("/")[1]) for setting in profile.layers_s) == 13


@pytest.mark.dear
@pytest.mark.parametrize(
    ("words", "ways"),
    [
        ('codec="half", overlap="forward"', ExchangeTraffic(True, 2.0, 4, forward=True)),
        ('exchange="local_sgd:4", precision="bf16"', ExchangeTraffic(False, 0.0, 2, every=4)),
        ('exchange="ordered"', ExchangeTraffic(False, 0.0, 4, gathers=True)),
    ],
)
def test_a_recorded_step_says_how_it_would_travel(tmp_path, words, ways):
    (tmp_path / "job.py").write_text(JOB.replace("batch_size=64", f"batch_size=64, {words}"))
    command = [str(tmp_path / "job.py"), str(tmp_path / "log")]
    found = record_step_models(command, "threads:1+fused", "exact", 1.0, survey(), "threads:1+fused")
    assert found.whole.ways == found.quarter.ways == found.methods[0].traffic
    assert dataclasses.replace(found.whole.ways, coding_s=0.0) == ways
    precision = "bf16" if "bf16" in words else None
    assert found.fingerprint == plan_cache.fingerprint(own_job(precision), "exact", INPUTS)


def test_a_command_that_takes_no_step_has_no_profile(tmp_path):
    (tmp_path / "job.py").write_text("print('nothing to train')")
    assert run_profile([str(tmp_path / "job.py")], "exact", 1.0, survey()) == (
        None,
        "the script ended without a step",
    )


def test_a_model_that_cannot_be_taken_apart_is_told_why(tmp_path):
    (tmp_path / "job.py").write_text(JOB.replace("nn.functional.cross_entropy", "lambda *_: 1 / 0"))
    profile, why = run_profile([str(tmp_path / "job.py"), str(tmp_path / "log")], "exact", 1.0, survey())
    assert profile is None
    assert why == "paceline: not profiled: ZeroDivisionError: division by zero"


@pytest.mark.dear
def test_a_named_budget_is_spent_where_nothing_could_be_tried_before(tmp_path):
    """Story: a plan from a minute in which the machine was busy was answered for ever."""
    (tmp_path / "job.py").write_text(JOB)
    command = [str(tmp_path / "job.py"), str(tmp_path / "log")]
    first = planner.make(command, budget_s=0.1)
    assert not any(row.measured_s for row in first.rows)
    assert planner.make(command).reason == f"{first.reason} (as before; `paceline plan` measures)"
    second = planner.make(command, budget_s=25.0)
    assert any(row.measured_s for row in second.rows)
    assert planner.make(command, budget_s=25.0).reason == f"{second.reason} (measured before)"
