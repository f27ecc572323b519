"""A codec whose collectives are small has few buckets, and the same result; others have those of the exchange."""

import pytest
import torch
from torch import nn

import paceline
from nodes import gap

WIDE = 600  # a weight of more than a megabyte


def joined(codec, exchange, steps=0):
    """(buckets, weights after these steps) of a model of two large weights and their biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, WIDE, dtype=torch.float64)
    with paceline.join(
        model, optimizer, nn.functional.mse_loss, batch_size=4, engine="sequential", codec=codec, exchange=exchange
    ) as pace:
        for _ in range(steps):
            pace.step((x[:4], x[4:]))
        return [bucket.names for bucket in pace.engine.buckets], model.state_dict()


LARGE = ["2.weight", "0.weight"]


@pytest.mark.parametrize(
    ("codec", "exchange", "alone"),
    [
        ("none", "allreduce", LARGE),
        ("none", "allreduce:forms=dense", LARGE),
        ("feedback/lowrank:1", "allreduce", LARGE),  # factors need buckets of their own
        ("feedback/lowrank:1", "allreduce:forms=dense", []),
        ("lossless/feedback/lowrank:1", "allreduce:forms=dense", []),
        ("feedback/topk:keep=0.1", "allreduce:forms=dense", LARGE),
    ],
)
def test_large_weights_share_a_bucket_where_it_pays(codec, exchange, alone):
    buckets, _ = joined(codec, exchange)
    assert [name for (name,) in (names for names in buckets if len(names) == 1)] == alone
    assert sorted(name for names in buckets for name in names) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_the_result_does_not_depend_on_it():
    whole = f"lowrank:rank={WIDE},min_rate=0"
    _, few = joined(whole, "allreduce:forms=dense", steps=3)
    _, many = joined("none", "allreduce", steps=3)
    assert gap(few, many) < 1e-12
