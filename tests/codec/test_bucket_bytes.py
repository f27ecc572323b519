"""A codec whose collectives are small has few buckets; others have those of the exchange."""

import pytest
import torch
from torch import nn

import paceline

WIDE = 600  # a weight of more than a megabyte


def buckets_of(codec, exchange):
    """The names in each, of a model of two large weights and their biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with paceline.join(
        model, optimizer, nn.functional.mse_loss, batch_size=4, engine="sequential", codec=codec, exchange=exchange
    ) as pace:
        return [bucket.names for bucket in pace.engine.buckets]


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
    buckets = buckets_of(codec, exchange)
    assert [name for (name,) in (names for names in buckets if len(names) == 1)] == alone
    assert sorted(name for names in buckets for name in names) == ["0.bias", "0.weight", "2.bias", "2.weight"]
