"""A plan is made once per job and machine, found again without the model, and never used where it no longer fits."""

from __future__ import annotations

import dataclasses
import multiprocessing
import stat

import pytest
import torch
from torch import nn

from paceline.probe import shelf
from paceline.probe.sheet import Plan
from paceline.probe.survey import Machine

MACHINE = Machine("host", "cpu", 2, 2, memory_bytes=8 << 30)
PLAN = Plan("threads:2", "because", fingerprint="feed")


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text("print()")
    return [str(tmp_path / "train.py"), "--lr", "0.1"]


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def mark(network=None, optimizer=torch.optim.SGD, batch_size=8, fidelity="exact", **options):
    network = network or model()
    return shelf.fingerprint(network, optimizer(network.parameters(), lr=0.1, **options), batch_size, fidelity)


def test_what_is_stored_is_found_by_command_and_by_fingerprint(command):
    assert shelf.cached(command, "exact", MACHINE) == (None, "")
    shelf.store(PLAN, command, MACHINE)
    assert shelf.cached(command, "exact", MACHINE) == (PLAN, "")
    assert shelf.by_fingerprint("feed", MACHINE) == PLAN
    assert shelf.by_fingerprint("food", MACHINE) is None
    assert shelf.cached([*command, "--more"], "exact", MACHINE) == (None, "")
    assert shelf.cached(command, "rounded", MACHINE) == (None, "")


def test_only_its_owner_may_look(command):
    shelf.store(PLAN, command, MACHINE)
    assert stat.S_IMODE(shelf.folder().stat().st_mode) == 0o700


def test_another_machine_is_noticed_and_another_name_or_kernel_is_none(command):
    shelf.store(PLAN, command, MACHINE)
    assert shelf.cached(command, "exact", dataclasses.replace(MACHINE, name="x", kernel="y"))[0] == PLAN
    plan, why = shelf.cached(command, "exact", dataclasses.replace(MACHINE, cores=4))
    assert plan is None
    assert "another machine, or with other cores or memory" in why


def test_another_version_is_noticed_by_name(command, monkeypatch):
    shelf.store(PLAN, command, MACHINE)
    now = shelf.versions()
    monkeypatch.setattr(shelf, "versions", lambda: {**now, "torch": "9.9"})
    assert shelf.cached(command, "exact", MACHINE) == (
        None,
        f"the cached plan is stale: torch {now['torch']} is now 9.9",
    )
    assert shelf.by_fingerprint("feed", MACHINE) is None


def test_another_script_is_noticed(command, tmp_path):
    shelf.store(PLAN, command, MACHINE)
    (tmp_path / "train.py").write_text("print(1)")
    assert shelf.cached(command, "exact", MACHINE) == (None, "the cached plan is stale: the script has changed")


def test_another_model_is_noticed_and_the_entry_forgotten(command, monkeypatch):
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    assert shelf.confirm(network, optimizer, 8) == "", "nothing was promised"
    plan = dataclasses.replace(PLAN, fingerprint=mark(network))
    shelf.store(plan, command, MACHINE)
    for name, value in shelf.promise(plan, command).items():
        monkeypatch.setenv(name, value)
    assert shelf.confirm(network, optimizer, 8) == ""
    assert shelf.cached(command, "exact", MACHINE) == (plan, "")
    assert "another model, optimizer or batch size" in shelf.confirm(network, optimizer, 9)
    assert shelf.cached(command, "exact", MACHINE) == (None, "")


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"fingerprint": 1}', "\x00\xff", '{"a": "'])
def test_a_broken_file_counts_as_none_and_is_written_anew(command, broken):
    shelf.store(PLAN, command, MACHINE)
    for path in shelf.folder().rglob("*.*"):
        path.write_text(broken)
    assert shelf.cached(command, "exact", MACHINE)[0] is None
    assert shelf.by_fingerprint("feed", MACHINE) is None
    shelf.store(PLAN, command, MACHINE)
    assert shelf.cached(command, "exact", MACHINE) == (PLAN, "")


def test_a_place_where_nothing_can_be_written_is_no_reason_to_stop(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    shelf.store(PLAN, command, MACHINE)
    assert shelf.cached(command, "exact", MACHINE) == (None, "")


def _store_many(command, reason):
    for _ in range(50):
        shelf.store(dataclasses.replace(PLAN, reason=reason * 500), command, MACHINE)


def test_planners_at_the_same_time_do_not_harm_each_other(command):
    """Four processes write; whoever reads meanwhile finds one of their plans, whole."""
    shelf.store(PLAN, command, MACHINE)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_store_many, args=(command, letter)) for letter in "abcd"]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        plan, _ = shelf.cached(command, "exact", MACHINE)
        assert plan is not None
        assert plan.reason == "because" or (len(plan.reason) == 500 and len(set(plan.reason)) == 1)
        seen += 1
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert seen > 3
    left = [path.name for path in shelf.folder().rglob("*") if path.is_file()]
    assert len(left) == 2, left


def test_a_fingerprint_is_of_shapes_and_types_not_of_values():
    assert mark() == mark()
    others = [
        mark(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2))),
        mark(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))),
        mark(model().double()),
        mark(batch_size=9),
        mark(fidelity="rounded"),
        mark(optimizer=torch.optim.Adam),
        mark(momentum=0.9),
    ]
    assert len({mark(), *others}) == len(others) + 1
    frozen = model()
    frozen[0].weight.requires_grad_(False)
    assert mark(frozen) != mark()
