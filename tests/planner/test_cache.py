"""A plan is made once per job and machine, found again without the model, and never used where it no longer fits."""

from __future__ import annotations

import dataclasses
import multiprocessing
import stat

import pytest
import torch
from torch import nn

from paceline.engine.compute.precision import Numerics
from paceline.job import Job
from paceline.launch.machine import Machine
from paceline.planner import plan_cache
from paceline.planner.measure import layers
from paceline.planner.plan_file import Plan

MACHINE = Machine("host", "cpu", 2, 2, memory_bytes=8 << 30)
PLAN = Plan("threads:2", "because", fingerprint="feed")
IMAGES, LARGER = [("torch.float32", (3, 8, 8))], [("torch.float32", (3, 9, 9))]


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text("print()")
    return [str(tmp_path / "train.py"), "--lr", "0.1"]


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def job(network=None, optimizer=torch.optim.SGD, batch_size=8, how=None, **options):
    network = network or model()
    return Job(network, optimizer(network.parameters(), lr=0.1, **options), None, batch_size, **(how or {}))


def mark(network=None, fidelity="exact", inputs=None, **more):
    return plan_cache.fingerprint(job(network, **more), fidelity, inputs)


def test_what_is_stored_is_found_by_command_and_by_fingerprint(command):
    assert plan_cache.cached(command, "exact", MACHINE) == (None, "")
    plan_cache.store(PLAN, command, MACHINE)
    assert plan_cache.cached(command, "exact", MACHINE) == (PLAN, "")
    assert plan_cache.by_fingerprint("feed", MACHINE) == PLAN
    assert plan_cache.by_fingerprint("food", MACHINE) is None
    assert plan_cache.cached([*command, "--more"], "exact", MACHINE) == (None, "")
    assert plan_cache.cached(command, "rounded", MACHINE) == (None, "")


def test_only_its_owner_may_look(command):
    plan_cache.store(PLAN, command, MACHINE)
    assert stat.S_IMODE(plan_cache.folder().stat().st_mode) == 0o700


def test_another_machine_is_noticed_and_another_name_or_kernel_is_none(command):
    plan_cache.store(PLAN, command, MACHINE)
    assert plan_cache.cached(command, "exact", dataclasses.replace(MACHINE, name="x", kernel="y"))[0] == PLAN
    plan, why = plan_cache.cached(command, "exact", dataclasses.replace(MACHINE, cores=4))
    assert plan is None
    assert "another machine, or with other cores or memory" in why


def test_another_version_is_noticed_by_name(command, monkeypatch):
    plan_cache.store(PLAN, command, MACHINE)
    now = plan_cache.versions()
    monkeypatch.setattr(plan_cache, "versions", lambda: {**now, "torch": "9.9"})
    assert plan_cache.cached(command, "exact", MACHINE) == (
        None,
        f"the cached plan is stale: torch {now['torch']} is now 9.9",
    )
    assert plan_cache.by_fingerprint("feed", MACHINE) is None


def test_another_script_is_noticed(command, tmp_path):
    plan_cache.store(PLAN, command, MACHINE)
    (tmp_path / "train.py").write_text("print(1)")
    assert plan_cache.cached(command, "exact", MACHINE) == (None, "the cached plan is stale: the script has changed")


@pytest.mark.parametrize("how", [{"accumulate": 2}, {"precision": "bf16"}, {"clip": 1.0}, {"batch_norm": "sync"}])
def test_another_job_is_noticed_and_the_entry_forgotten(command, monkeypatch, how):
    assert plan_cache.confirm(job()) == "", "nothing was promised"
    plan = dataclasses.replace(PLAN, fingerprint=mark(inputs=IMAGES))
    plan_cache.store(plan, command, MACHINE)
    for name, value in plan_cache.promise(plan, command).items():
        monkeypatch.setenv(name, value)
    assert plan_cache.confirm(job()) == "", "no inputs have been seen yet"
    assert plan_cache.cached(command, "exact", MACHINE) == (plan, "")
    assert "another model, optimizer, batch size, precision" in plan_cache.confirm(job(how=how))
    assert plan_cache.cached(command, "exact", MACHINE) == (None, "")


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"fingerprint": 1}', "\x00\xff", '{"a": "'])
def test_a_broken_file_counts_as_none_and_is_written_anew(command, broken):
    plan_cache.store(PLAN, command, MACHINE)
    for path in plan_cache.folder().rglob("*.*"):
        path.write_text(broken)
    assert plan_cache.cached(command, "exact", MACHINE)[0] is None
    assert plan_cache.by_fingerprint("feed", MACHINE) is None
    plan_cache.store(PLAN, command, MACHINE)
    assert plan_cache.cached(command, "exact", MACHINE) == (PLAN, "")


def test_a_place_where_nothing_can_be_written_is_no_reason_to_stop(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    plan_cache.store(PLAN, command, MACHINE)
    assert plan_cache.cached(command, "exact", MACHINE) == (None, "")


def test_no_home_is_no_reason_to_stop(command, monkeypatch):
    """Of a user who is in no list, as in many containers."""

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(plan_cache.Path, "home", nowhere)
    plan_cache.store(PLAN, command, MACHINE)
    assert plan_cache.cached(command, "exact", MACHINE) == (None, "")


def _store_many(command, reason):
    for _ in range(50):
        plan_cache.store(dataclasses.replace(PLAN, reason=reason * 500), command, MACHINE)


def test_planners_at_the_same_time_do_not_harm_each_other(command):
    """Four processes write; whoever reads meanwhile finds one of their plans, whole."""
    plan_cache.store(PLAN, command, MACHINE)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_store_many, args=(command, letter)) for letter in "abcd"]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        plan, _ = plan_cache.cached(command, "exact", MACHINE)
        assert plan is not None
        assert plan.reason == "because" or (len(plan.reason) == 500 and len(set(plan.reason)) == 1)
        seen += 1
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert seen > 3
    left = [path.name for path in plan_cache.folder().rglob("*") if path.is_file()]
    assert len(left) == 2, left


def test_a_fingerprint_is_of_shapes_and_types_not_of_values():
    assert mark() == mark()
    assert mark(how={"clip": 1.0}) == mark(how={"clip": 2.0})
    assert mark(inputs=IMAGES).partition("-")[0] == mark()
    others = [
        mark(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2))),
        mark(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))),
        mark(model().double()),
        mark(batch_size=9),
        mark(fidelity="rounded"),
        mark(optimizer=torch.optim.Adam),
        mark(momentum=0.9),
        mark(how={"accumulate": 2}),
        mark(how={"precision": "bf16"}),
        mark(how={"precision": "fp32"}),
        mark(how={"batch_norm": "sync"}),
        mark(how={"clip": 1.0}),
        mark(inputs=IMAGES),
        mark(inputs=LARGER),
    ]
    assert len({mark(), *others}) == len(others) + 1
    frozen = model()
    frozen[0].weight.requires_grad_(False)
    assert mark(frozen) != mark()


def test_what_a_row_does_to_the_optimizer_makes_no_other_job():
    """Story: every plan of a row with "+fused" was called stale at the next start."""
    one = job(optimizer=torch.optim.AdamW)
    before = plan_cache.fingerprint(one, "exact")
    Numerics(fused=True).prepare(one.model, one.optimizer)
    assert one.optimizer.param_groups[0]["fused"]
    assert plan_cache.fingerprint(one, "exact") == before


def test_the_shape_of_inputs_is_that_of_a_row():
    batch = {"x": torch.zeros(4, 3, 8, 8), "y": [torch.zeros(4, dtype=torch.int64), "words", torch.tensor(1.0)]}
    more = {"x": torch.zeros(6, 3, 8, 8), "y": [torch.zeros(6, dtype=torch.int64), "other", torch.tensor(2.0)]}
    wanted = [("torch.float32", (3, 8, 8)), ("torch.int64", ()), ("torch.float32", ())]
    assert layers.shapes(batch, 4) == layers.shapes(more, 6) == wanted
    assert layers.shapes(batch, 3)[0] == ("torch.float32", (4, 3, 8, 8)), "not one per sample"


def test_a_loop_of_one_s_own_finds_the_plan_of_its_job_whatever_its_inputs(command):
    assert plan_cache.of_job(job(), "exact", command) is None
    small, large = (dataclasses.replace(PLAN, fingerprint=mark(inputs=each)) for each in (IMAGES, LARGER))
    plan_cache.store(small, command, plan_cache.survey())
    assert plan_cache.of_job(job(), "exact", []) == small
    assert plan_cache.of_job(job(), "rounded", []) is None
    assert plan_cache.of_job(job(how={"accumulate": 2}), "exact", command) is None
    assert plan_cache.of_job(job(how={"precision": "bf16"}), "exact", command) is None
    plan_cache.store(large, [*command, "--large"], plan_cache.survey())
    assert plan_cache.of_job(job(), "exact", []).chosen == "threads:2", "both say the same"
    large = dataclasses.replace(large, chosen="replicas:2")
    plan_cache.store(large, [*command, "--large"], plan_cache.survey())
    assert plan_cache.of_job(job(), "exact", command) == small
    assert plan_cache.of_job(job(), "exact", [*command, "--large"]) == large
    assert plan_cache.of_job(job(), "exact", [*command, "--other"]) is None
