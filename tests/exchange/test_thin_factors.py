"""Where every node computes in 16 bits, factors travel in 16 bits, and nothing is lost by it."""

import pytest
import torch

from nodes import HIDDEN, Rank, build, rows
from paceline.elastic.consistency import common_precision
from paceline.engine.compute.precision import Numerics
from paceline.engine.sequential import Engine
from paceline.registry import parse
from ranks import run

NUM_RANKS = 2


def batches():
    """As autocast hands them to a layer: no bit more than bf16 has."""
    return [(x.bfloat16().float(), y) for x, y in (rows(24, seed, torch.float32) for seed in range(4))]


def computing(precision):
    engine = Engine()
    engine.numerics = Numerics(precision=precision)
    return engine


def trained(link, kind):
    exchange = parse("exchange", "allreduce:forms=factors")
    exchange.factor_codec = parse("codec", kind)
    rank = Rank(link, build(dtype=torch.float32), exchange=exchange, engine=computing("bf16"))
    rank.train(batches())
    return rank.state(), rank.exchange._lane.sent_bytes, rank.exchange.forms()


def test_half_the_bytes_and_every_bit():
    wide = run(NUM_RANKS, lambda link: trained(link, "none"))
    narrow = run(NUM_RANKS, lambda link: trained(link, "half:bf16"))
    assert wide[0][2] == narrow[0][2]
    assert "factors" in narrow[0][2]
    for (one, more, _), (other, fewer, _) in zip(wide, narrow, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert more - fewer == 4 * (24 // NUM_RANKS) * 2 * HIDDEN * 2  # steps, rows, in + out, bytes
    assert all(torch.equal(narrow[0][0][name], narrow[1][0][name]) for name in narrow[0][0])


@pytest.mark.parametrize(
    ("precisions", "agreed"),
    [
        (("bf16", "bf16"), "bf16"),
        (("fp16", "fp16"), "fp16"),
        (("bf16", "fp32"), ""),
        (("bf16", "fp16"), ""),
        (("fp32", "fp32"), ""),
    ],
)
def test_only_where_all_are_alike(precisions, agreed):
    assert run(NUM_RANKS, lambda link: common_precision(link, computing(precisions[link.rank]))) == [agreed] * 2
