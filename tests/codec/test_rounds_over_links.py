"""Codecs of several rounds over real exchanges: one order, aborted steps, changed members, real links."""

import pytest
import torch

import ranks
from device import of_cpus
from nodes import Rank, build, rows
from paceline.exchange.allreduce import Exchange
from paceline.messages import DENSE
from paceline.registry import parse

CODECS = ("feedback/lowrank:1", "lowrank:rank=64,min_rate=0", "feedback/qsgd", "qsgd", "lossless/feedback/lowrank:1")
DATA = [rows(24, seed) for seed in range(5)]


def train(link, codec, groups=None, steps=5, packed="never", row="sequential", least=0):
    engine = parse("engine", row)
    engine.bucket_bytes = least, least
    rank = Rank(link, build(), exchange=Exchange(DENSE, packed), codec=codec, engine=engine)
    if groups:
        rank.exchange.choice.groups = groups
    rank.train(DATA[:steps])
    state, sent_bytes = rank.state(), rank.exchange._lane.sent_bytes
    rank.exchange.close()
    return state, sent_bytes, len(rank.engine.buckets)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_stay_bit_equal_however_buckets_are_merged(codec, size):
    one = ranks.run(size, lambda link: train(link, codec))
    assert all(torch.equal(one[0][0][name], other[name]) for other, *_ in one for name in other)
    if codec.startswith("lossless") and size == 2:
        return  # packed payloads have unlike lengths, and are never merged
    groups = ((0, 1), *((i,) for i in range(2, one[0][2])))
    merged = ranks.run(size, lambda link: train(link, codec, groups))
    assert all(torch.equal(one[0][0][name], merged[0][0][name]) for name in merged[0][0])
    assert merged[0][1] == one[0][1]


@pytest.mark.parametrize("size", [2, 3])
def test_full_width_equals_none(size):
    exact = ranks.run(size, lambda link: train(link, "none"))[0][0]
    found = ranks.run(size, lambda link: train(link, "lowrank:rank=64,min_rate=0"))[0][0]
    for name, want in exact.items():
        if want.is_floating_point():
            assert float((found[name] - want).norm()) <= 1e-12 * float(want.norm()), name


@pytest.mark.parametrize("row", ["sequential", "replicas:2", pytest.param("pipeline:2", marks=of_cpus)])
def test_one_bucket_of_all_weights_gives_the_same(row):
    """In every engine: nodes of unlike engines have the same buckets."""
    exact = ranks.run(2, lambda link: train(link, "none", row=row))[0][0]
    found, _, count = ranks.run(2, lambda link: train(link, "lowrank:rank=64,min_rate=0", row=row, least=1 << 30))[0]
    assert count == 1
    for name, want in exact.items():
        if want.is_floating_point():
            assert float((found[name] - want).norm()) <= 1e-12 * float(want.norm()), name


@pytest.mark.parametrize("codec", ["feedback/lowrank:1", "qsgd"])
def test_packing_between_two_changes_no_bit(codec):
    plain = ranks.run(2, lambda link: train(link, codec))
    packed = ranks.run(2, lambda link: train(link, codec, packed="always"))
    assert all(torch.equal(plain[0][0][name], packed[0][0][name]) for name in plain[0][0])
