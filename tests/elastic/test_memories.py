"""Codec residuals are saved for every node, restored bit for bit for as many nodes, and in sum for any other number."""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import ranks
from launching import launch
from nodes import engine_of
from paceline.checkpoint import codec_state, run_state
from paceline.checkpoint.checkpoint import read_newest
from paceline.exchange.allreduce import Exchange
from paceline.exchange.flow.control import Control
from paceline.link.memory import Members
from paceline.messages import DENSE, FACTORS, Bucket
from paceline.registry import names, parse
from paceline.testing.codecs import collected
from scripts import owed

COUNT = 17
SPELLINGS = {"topk": "topk:keep=0.1", "lossless": "lossless/topk:keep=0.1"}
CODECS = [SPELLINGS.get(name, name) for name in names("codec") if name != "feedback"]
CPU = defaultdict(lambda: torch.device("cpu"))  # of each bucket


def remembered(num_nodes, seed=0):
    """Whole numbers, whose sums are exact; the second node has no residual yet."""
    dice = torch.Generator().manual_seed(seed)
    residuals = [torch.randint(-999, 1000, (COUNT,), generator=dice).double() for _ in range(num_nodes)]
    kept = [{0: (residual, None), 3: (residual, None)} for residual in residuals]
    if num_nodes > 1:
        kept[1][0] = None, None
    return kept


def total(kept, index):
    return sum((memory[index][0] for memory in kept if memory[index][0] is not None), torch.zeros(COUNT).double())


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("before", range(1, 6))
def test_what_is_owed_is_dealt_and_keeps_its_sum(before, after):
    codec, kept = parse("codec", "feedback/topk:keep=0.1"), remembered(before)
    dealt = [codec_state.redistribute(codec, kept, node, after, CPU) for node in range(after)]
    for index in (0, 3):
        assert torch.equal(total(dealt, index), total(kept, index))
        if after == before:
            pairs = zip(dealt, kept, strict=True)
            assert all(one[index][0] is other[index][0] for one, other in pairs)
    assert total(kept, 3).any()


@pytest.mark.parametrize("codec", [*CODECS, *(f"feedback/{codec}" for codec in CODECS)])
def test_every_codec_goes_on_from_what_is_dealt(codec):
    made = parse("codec", codec)
    bucket = owed.spec(COUNT)
    coded, _ = collected(made, [torch.randn(COUNT) for _ in range(3)], 0, bucket)
    kept = [{0: each.state} for each in coded]
    states = [codec_state.redistribute(made, kept, node, 2, CPU)[0] for node in range(2)]
    coded, _ = collected(made, [torch.randn(COUNT) for _ in range(2)], 1, bucket, states)
    assert all(each.total.isfinite().all() for each in coded)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rank_0_has_every_nodes_and_nobody_else_has_any(size):
    def mine(rank):
        odd = torch.arange(rank + 2.0).repeat(2, 1).T
        return {0: (None, None), 1: (odd, [torch.ones(rank).bfloat16(), rank]), 2: (torch.tensor(rank > 0), ())}

    def work(link):
        return codec_state.collect(Control(Members(link)), lambda: link, mine(link.rank))

    first, *others = ranks.run(size, work)
    assert others == [[]] * (size - 1)
    assert len(first) == size
    for rank, memory in enumerate(first):
        expected = mine(rank)
        assert memory[0] == expected[0]
        assert torch.equal(memory[1][0], expected[1][0])
        assert memory[1][1][0].dtype == torch.bfloat16
        assert torch.equal(memory[1][1][0], expected[1][1][0])
        assert (memory[1][1][1], memory[2][1]) == (rank, ())
        assert torch.equal(memory[2][0], expected[2][0])


@pytest.fixture(scope="module", params=["sequential", "processes:2"])
def two_nodes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("owed")
    launch("owed.py", folder, engine=request.param, num_nodes=2)
    return folder


@pytest.mark.dear
def test_two_nodes_go_on_bit_for_bit(two_nodes):
    for node in range(2):
        said = json.loads((two_nodes / f"{node}.json").read_text())
        assert said["owed"] > 0
        assert said["faults"] == []


@pytest.mark.dear
def test_another_number_of_nodes_owes_as_much(two_nodes):
    """One node resumes from what two have saved, and saves it in turn."""
    kept = read_newest(two_nodes / "run")
    assert len(kept.state["memories"]) == 2
    with owed.join() as pace:
        assert pace.restore(two_nodes / "run")
        for index, (residual, _) in pace.exchange.memory.items():
            both = [memory[index][0] for memory in kept.state["memories"]]
            assert both[0].any()
            assert not torch.equal(*both)
            assert torch.equal(residual, sum(both[1:], both[0]))
        expected = {index: residual.clone() for index, (residual, _) in pace.exchange.memory.items()}
        pace.save(two_nodes / "one", wait=False)
    again = read_newest(two_nodes / "one").state["memories"]
    assert all(torch.equal(again[0][index][0], residual) for index, residual in expected.items())


@pytest.mark.dear("processes:2")
@pytest.mark.parametrize(("codec", "other"), [("none", "'none'"), ("half", "'half'"), ("feedback/topk:keep=0.3", "")])
def test_going_on_with_another_codec_says_what_is_left_out(two_nodes, capsys, codec, other):
    """The fraction of the gradient that a codec sends may change: the residual stays."""
    with owed.join(codec) as pace:
        assert pace.restore(two_nodes / "run")
        assert pace.num_steps == owed.MIDDLE
        kept = [memory for memory in pace.exchange.memory.values() if memory is not None]
        for batch in pace.batches(owed.data()):
            assert pace.step(batch) > 0
    said = [line for line in capsys.readouterr().err.splitlines() if "residuals" in line]
    assert bool(said) == bool(other) == (not kept)
    assert (
        not said
        or f"made with codec 'feedback/topk' (here {other}): its error-feedback residuals are dropped" in said[0]
    )


def test_how_messages_were_put_together_is_not_taken_over_by_another_codec():
    """Story: a gathered message cannot be split as a sum can, and each resume ended in an AttributeError."""
    said = {
        "plan": "sequential",
        "exchange": {"groups": [[0, 1]], "step": 7},
        "methods": {"exchange": "allreduce", "codec": "none"},
        "shares": [4, 4],
    }
    run = SimpleNamespace(
        row="sequential",
        leader=False,
        shares=(4, 4),
        world=SimpleNamespace(num_nodes=2, node=0),
        control=SimpleNamespace(all_gather=lambda words: [words, words]),
        methods={"exchange": "allreduce", "codec": "none"},
        engine=SimpleNamespace(weights=[torch.zeros(1)]),
    )
    assert run_state._exchange(run, said) == said["exchange"]
    said["exchange"]["owing"] = [1]
    run.row = "replicas:2"
    assert run_state._exchange(run, said) == {"step": 7, "owing": [1]}
    run.methods = {"exchange": "allreduce", "codec": "feedback/topk"}
    assert run_state._exchange(run, said) == {"step": 7}


def test_a_layer_that_owes_goes_on_dense_under_another_plan():
    """Story: forms were chosen again, and as factors the layer would never have sent its residual."""
    layers = [Bucket(i, (f"fc{i}.weight",), ((500, 500),), linear=True) for i in range(2)]

    def work(link):
        exchange = Exchange()
        exchange.open(engine_of(layers), link, parse("codec", "feedback/topk:keep=0.1"), rows=2)
        begun = list(exchange.forms())
        exchange.load({"step": 7, "owing": [1]})
        exchange.choice.on_assignment(0.5)
        exchange.close()
        return begun, list(exchange.forms()), exchange.choice.state()["owing"]

    assert ranks.run(2, work) == [([FACTORS] * 2, [FACTORS, DENSE], [1])] * 2
