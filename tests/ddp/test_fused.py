"""SGD from factors under our DistributedDataParallel: torch's weights, or an error that says what it is not for."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from test_as_torchs import SCRIPTS, ranks
from torch import nn

from paceline.ddp import fused
from paceline.ddp.sums import early

EXACT = 1e-12  # of sums in another order
SERVED = (
    *("plain", "dropout", "again", "accumulated", "two forwards", "unused here", "unused everywhere", "own group"),
    *("float32", "more rows than pay", "nesterov, decay", "no momentum", "cleared last", "cleared to zero"),
    *("cleared in between", "saved", "foreach", "fused of torch", "attacked", "two modules", "a part of the weights"),
    *("saved whole", "more rows than pay, to zero", "to zero, foreach"),
    *("more rows than pay, twice", "rows that pay on one rank"),
)
NOT_COMPUTED, NOT_ALONE = "is not computed, and aten", "got a gradient that is not its layer's alone"
REFUSED = {
    **dict.fromkeys(("clipped", "penalty", "tied", "scaled", "read"), NOT_COMPUTED),
    **dict.fromkeys(("module alone", "checkpointed"), NOT_ALONE),
    **dict.fromkeys(("ZeRO", "Adam"), "is for torch.optim.SGD without closure and hooks; this one is"),
    "stepped twice": "optimizer.step() was called twice for one gradient",
    "never cleared": "was used by optimizer.step() and not cleared before the next backward pass",
    "copied": "is not for copies of a wrapper",
    "allreduce hook": "is not for communication hooks",
    "joined": "is not for join() of uneven inputs",
    "compiled": "is not for a compiled model",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    for code, text in ranks(folder, SCRIPTS / "under_fused.py", folder):
        assert code == 0, text
    return json.loads((folder / "said.json").read_text())


@pytest.mark.dear
def test_every_case_is_looked_at(said):
    assert sorted(said) == sorted([*SERVED, *REFUSED])


@pytest.mark.dear
@pytest.mark.parametrize("case", SERVED)
def test_weights_are_those_of_torchs_class(said, case):
    one = said[case]
    assert one["gap"] <= (1e-6 if case == "float32" else EXACT)
    assert one["bit-equal"], "replicas differ"
    assert one["weights"] == 2


@pytest.mark.dear
def test_three_ranks_train_to_the_weights_of_torchs_class(tmp_path):
    for code, text in ranks(tmp_path, SCRIPTS / "under_fused.py", tmp_path, "packed", size=3):
        assert code == 0, text
    said = json.loads((tmp_path / "said0.json").read_text())
    assert said.pop("packed")
    assert said["plain"]["early"] == [[2, 2]] * len(said["plain"]["early"]) != []
    for case, one in said.items():
        assert one["gap"] <= (1e-6 if case == "float32" else EXACT), case
        assert one["bit-equal"], case


BOTH, ONCE = [[2, 2]], [[2, 0], [0, 0]]  # of each step, the last one for all that follow
EARLY = {
    **dict.fromkeys(("plain", "accumulated", "cleared to zero", "saved", "foreach", "attacked", "own group"), BOTH),
    **dict.fromkeys(("more rows than pay", "more rows than pay, to zero", "rows that pay on one rank"), BOTH),
    **dict.fromkeys(("two forwards", "cleared in between", "more rows than pay, twice"), ONCE),
    "again": [[2, 1], [1, 1]],
    "unused everywhere": [[0, 1], [1, 1]],  # at first it waits for the other layer
}


@pytest.mark.dear
@pytest.mark.parametrize("case", EARLY)
def test_sums_begin_during_backward_and_a_layer_whose_rows_change_after_that_begins_early_once(said, case):
    expected, found = EARLY[case], said[case]["early"]
    assert found == (expected + [expected[-1]] * len(found))[: len(found)] != []


def test_a_sum_begins_when_its_layers_gradient_is_there_and_those_of_all_layers_after_it_have_begun():
    begun = []
    lane = SimpleNamespace(submit=lambda work, layer, own: begun.append(layer))
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    names = fused.Fused(layers).names
    sums = early.EarlySums(lane, len(names), pays=lambda layer, rows: True)
    for number, expected in ((3, [3]), (1, [3]), (2, [3, 2, 1]), (0, [3, 2, 1, 0])):  # of layers, as backward comes by
        sums.ready(names.index(f"{number}.weight"), lambda: early.Own([object()], torch.zeros(1)))
        assert [names[each] for each in begun] == [f"{each}.weight" for each in expected]


@pytest.mark.dear
def test_on_a_slow_network_all_is_packed(tmp_path):
    for code, text in ranks(tmp_path, SCRIPTS / "under_fused.py", tmp_path, "packed"):
        assert code == 0, text
    told = [json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(2)]
    packed = [sorted(one.pop("packed")) for one in told]  # two lanes: what lies between them is in no order
    assert packed[0] == packed[1] != []
    for case, one in told[0].items():
        assert one["gap"] <= (1e-6 if case == "float32" else EXACT)
        assert one["bit-equal"], "replicas differ"


@pytest.mark.dear
@pytest.mark.parametrize("case", REFUSED)
def test_what_it_is_not_for_is_refused_by_name(said, case):
    assert REFUSED[case] in said[case]["refused"]
    assert "without PACELINE_DDP_OPTIMIZER=fused this script runs as it is" in said[case]["refused"] or case == "copied"


def test_a_gradient_that_is_not_computed_can_be_cleared_and_nothing_else():
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = fused.Unread.of("its name", weight)
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([weight, other], lr=1.0).zero_grad(set_to_none=False)
    assert not weight.grad.calls
    assert not other.grad.any()
    for look in (nn.utils.clip_grad_value_, nn.utils.clip_grad_norm_, lambda *_: weight.grad + 1):
        with pytest.raises(
            RuntimeError, match=r"the gradient of 'its name' is not computed, and aten\.\w+\.\w+ uses it"
        ):
            look([other, weight], 1.0)
    with pytest.raises(RuntimeError, match="a penalty on the weight"):
        (weight * 2).sum().backward()


def test_another_value_of_the_variable_is_told(monkeypatch):
    monkeypatch.setitem(os.environ, fused.OPTIMIZER, "adam")
    with pytest.raises(ValueError, match="PACELINE_DDP_OPTIMIZER is 'fused' or not set, not 'adam'"):
        fused.wanted(nn.Linear(2, 2), False)


def test_weights_on_another_device_or_of_fewer_bits_are_told():
    with pytest.raises(ValueError, match="is for CPUs, and there is a weight on meta"):
        fused.Fused(nn.Linear(300, 400, device="meta"))
    with pytest.raises(ValueError, match=r"is for 32 and 64 bits, and there is a weight of torch\.bfloat16"):
        fused.Fused(nn.Linear(300, 400, dtype=torch.bfloat16))
