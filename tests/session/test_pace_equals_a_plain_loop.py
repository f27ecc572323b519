"""Any model, any optimizer, any schedule: what `pace` does is what a loop in plain PyTorch does, weight by weight.

In float64: bit for bit on one process where the optimizer is PyTorch's own, else to the last digits.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import cases
import tables
from launching import launch
from nodes import gap

ALL = [(table, name) for table in ("model", "optimizer") for name in tables.TABLES[table]]
IN_PARALLEL = ("lstm", "attention", "convolutions", "micro-batches of factors", "dropout", "AdamW")
ONE = [("sequential", 1, *pair) for pair in ALL] + [("threads:2", 2, *pair) for pair in ALL if pair[1] in IN_PARALLEL]


@pytest.fixture(scope="module", params=["processes:2"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    launch("laws.py", folder, 21, "model", "optimizer", engine=request.param)
    return folder


def same(got, want, tolerance):
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
    assert got["rates"] == want["rates"]
    if want["norms"][0] is not None:
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-9)
    if tolerance:
        assert gap(got["weights"], want["weights"]) < tolerance
    else:
        for name, weight in want["weights"].items():
            assert torch.equal(got["weights"][name].to(weight.device), weight), name


@pytest.mark.parametrize(("engine", "threads", "table", "name"), ONE)
def test_one_process(engine, threads, table, name):
    case = tables.TABLES[table][name]
    got = case.train(16, engine)  # a power of two: dividing by it is exact
    torch.set_num_threads(threads)
    want = case.plain(16)
    sums_anew = "accumulate" in case.options or "clip" in case.options or case.loss is cases.masked
    own_update = type(case.build()[1]) is torch.optim.SGD
    same(got, want, 1e-12 if sums_anew or own_update else 0)


@pytest.mark.dear("tied")
@pytest.mark.parametrize(("table", "name"), [(t, n) for t, n in ALL if not tables.TABLES[t][n].alone])
def test_two_processes(trained, table, name):
    said = json.loads((trained / f"{table} {name}.json").read_text())
    said["weights"] = load_file(trained / f"{table} {name}.safetensors")
    same(said, tables.TABLES[table][name].plain(21), 1e-10)


def test_factors_were_used(trained):
    said = json.loads((trained / "model micro-batches of factors.json").read_text())
    assert "factors" in said["forms"]


def test_every_optimizer_of_torch_is_here():
    assert len(tables.OPTIMIZERS) >= 13
