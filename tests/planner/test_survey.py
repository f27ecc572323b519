"""The machine is what this process may use of it, and rows are what such a machine could do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.cli.plan import _words
from paceline.cli.prepare import check_configuration
from paceline.engine.node import cgroup_limits as quota_
from paceline.launch.machine import Machine, memory_bytes, survey
from paceline.planner.candidates import (
    BASELINE,
    EngineSpec,
    JobFacts,
    allowed,
    candidates,
    check,
    fidelity,
    needed_bytes,
    split,
)
from paceline.planner.plan_file import Plan

ENGINES = ("sequential", "threads", "replicas", "processes")
IMAGES = JobFacts(rows=32, images=True, can_fuse=True)


def test_a_survey_is_plausible_and_repeatable():
    machine = survey()
    assert 1 <= machine.physical_cores <= machine.cores <= os.cpu_count()
    assert 64 << 20 < machine.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert survey().digest() == machine.digest()
    assert str(machine.cores) in str(machine)


def test_only_cores_that_may_be_used_count():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
    code += "from paceline.launch.machine import survey; print(survey().cores)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 0), ("150000 100000", 2), ("50000 100000", 1), ("400000 100000", 4)]
)
def test_a_containers_limits_count(tmp_path, monkeypatch, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "memory.max").write_text(str(1 << 30))
    monkeypatch.setattr(quota_, "cgroups", lambda: [tmp_path])
    assert quota_.cores() == cores
    assert memory_bytes() == 1 << 30


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_several_limits_the_least_counts(tmp_path, monkeypatch, order):
    folders = [tmp_path / "own", tmp_path / "above"]
    for folder, quota in zip(folders, ("400000 100000", "200000 100000"), strict=True):
        folder.mkdir()
        (folder / "cpu.max").write_text(quota)
    monkeypatch.setattr(quota_, "cgroups", lambda: [folders[i] for i in order])
    assert quota_.cores() == 2


@pytest.mark.parametrize(
    ("row", "way"),
    [
        ("sequential", EngineSpec("sequential", 1, 1, ())),
        ("threads", EngineSpec("threads", 1, 8, ())),
        ("threads:2+bf16+channels_last", EngineSpec("threads", 1, 2, ("bf16", "channels_last"))),
        ("processes:8", EngineSpec("processes", 8, 1, ())),
        ("processes:4+fused", EngineSpec("processes", 4, 2, ("fused",))),
        ("replicas:16", EngineSpec("replicas", 16, 1, ())),
        ("pipeline:2", EngineSpec("pipeline", 1, 4, (), 2, 8, 0.4e-3)),
        ("processes:2/pipeline:2+fused", EngineSpec("processes", 2, 2, ("fused",), 2, 8, 0.4e-3)),
    ],
)
def test_a_row_is_taken_apart(row, way):
    assert split(row, 8) == way


@pytest.mark.parametrize(
    "row", ["", "+bf16", "threads:0", "threads:two", "threads:2+", "threads:2+half", "a b", "processes:2/threads:2"]
)
def test_what_is_no_row_is_told_the_words(row):
    with pytest.raises(ValueError, match=r"not of the form ENGINE.*options after a \+: bf16"):
        split(row, 8)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 64])
def test_candidates_begin_with_the_baseline_and_fit_the_cores(cores):
    machine = Machine(cores=cores, physical_cores=max(1, cores // 2), flags=("avx512_bf16",))
    found = candidates("rounded", machine, IMAGES, ENGINES)
    assert found[0] == BASELINE
    assert len(set(found)) == len(found)
    assert any(row.startswith("threads") for row in found) == (cores > 1)
    for way in (split(row, cores) for row in found):
        assert way.copies * way.threads <= cores
        assert way.copies <= IMAGES.rows


@pytest.mark.parametrize(
    ("row", "has"),
    [
        ("pipeline:2,micros=3", (1, 2, 3)),
        ("pipeline:2,schedule=gpipe,cut=features.3", (1, 2, 8)),
        ("pipeline:2,devices=cuda:0;cuda:2", (1, 2, 8)),
        ("processes:2/pipeline:2,micros=6+bf16", (2, 2, 6)),
        ("paceline.engine.threads:Engine:2", (1, 1, 1)),
    ],
)
def test_a_row_may_have_options_of_its_engine_or_be_a_class(row, has):
    """Story: training started with them, and a plan file, a run's folder and `paceline train` refused them."""
    spec = split(row, 4)
    assert (spec.copies, spec.stages, spec.micros) == has
    assert Plan.from_toml(Plan(row).to_toml()).chosen == row
    assert check_configuration(row) == row


def test_rows_are_divided_between_and_not_within_them():
    assert _words("sequential, pipeline:2,micros=4,cut=1 threads:2,processes:2") == [
        *("sequential", "pipeline:2,micros=4,cut=1", "threads:2", "processes:2")
    ]


def test_an_unknown_engine_is_no_row_of_a_plan():
    with pytest.raises(ValueError, match=r"no engine named 'pipelin'; known: .*did you mean 'pipeline'"):
        split("pipelin:2", 2)


def test_words_are_offered_only_where_they_can_matter():
    plain = Machine(cores=2, physical_cores=2)
    words = {word for row in candidates("rounded", plain, JobFacts(rows=8), ENGINES) for word in split(row, 2).words}
    assert words == set()
    words = {word for row in candidates("rounded", plain, IMAGES, ENGINES) for word in split(row, 2).words}
    assert words == {"channels_last", "fused"}
    able = Machine(cores=2, physical_cores=2, flags=("avx512_bf16",), compiler=True)
    words = {word for row in candidates("exact", able, IMAGES, ENGINES, True) for word in split(row, 2).words}
    assert words == {"channels_last", "fused", "bf16", "compile"}


def test_rows_beyond_the_fidelity_come_last_and_are_not_allowed():
    machine = Machine(cores=2, physical_cores=2, flags=("amx_bf16",))
    found = candidates("exact", machine, IMAGES, ENGINES)
    may = [allowed(row, "exact") for row in found]
    assert may == sorted(may, reverse=True)
    assert not all(may)
    assert all(allowed(row, "approximate") for row in found)
    with pytest.raises(ValueError, match="fidelity must be one of exact, rounded, approximate, got 'good'"):
        check("good")


def test_engines_that_do_not_exist_and_more_copies_than_rows_are_no_candidates():
    machine = Machine(cores=4, physical_cores=4)
    assert candidates("exact", machine, JobFacts(rows=8), ("threads",)) == ["sequential", "threads:4"]
    assert candidates("exact", machine, JobFacts(rows=3), ("processes",)) == ["sequential", "threads:4", "processes:2"]
    found = candidates("exact", machine, JobFacts(rows=16), ("processes",))
    assert found == ["sequential", "threads:4", "processes:4", "processes:2", "pipeline:4", "processes:2/pipeline:2"]
    on_gpu = candidates("exact", machine, JobFacts(rows=8, device="cuda"), ENGINES)
    assert on_gpu == ["sequential", "sequential+bf16", "sequential+fp16"]


def test_fidelity_names_batch_statistics():
    normed = JobFacts(batch_norm=True)
    assert fidelity("sequential", normed) == fidelity("processes:2") == "exact"
    assert fidelity("processes:2", normed) == "exact, local BN"
    assert fidelity("replicas:2+bf16", normed) == "rounded, local BN"


def test_memory_grows_with_copies():
    facts = JobFacts(weight_bytes=1 << 30, gradient_bytes=1 << 30, state_bytes=1 << 30)
    needs = [needed_bytes(row, facts, 8) for row in ("sequential", "threads:8", "replicas:4", "processes:4")]
    assert needs[0] == needs[1] < needs[2] < needs[3] < 8 << 30


def test_micro_batches_hold_only_their_own_activations():
    """In two stages those of three micro-batches of eight: two in flight, and that which was timed before the cut."""
    facts = JobFacts(activation_bytes=8 << 30)
    needs = {
        row: needed_bytes(row, facts, 4) for row in ("sequential", "pipeline:2", "processes:2/pipeline:2", "pipeline:1")
    }
    runtime = needs["sequential"] - (8 << 30)
    assert needs["pipeline:1"] == needs["sequential"]
    assert needs["pipeline:2"] == runtime + (3 << 30)
    assert needs["processes:2/pipeline:2"] == 2 * runtime + (3 << 30)
