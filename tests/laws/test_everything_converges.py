"""On a quadratic every codec under every exchange halves its distance to the optimum."""

import pytest
import torch
from torch import nn

import ranks
from nodes import Rank
from paceline import registry

RATE, STEPS = 0.2, 60


class Point(nn.Module):
    """The loss of row x is |w - x|^2 / 2: the optimum is the mean of all rows."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(200, dtype=torch.float64))

    def forward(self, x):
        return self.w - x


def squared(output, _):
    return 0.5 * output.square().sum(1).mean()


def codecs():
    wrap = {"feedback": "feedback/topk:keep=0.1", "lossless": "lossless/half", "topk": "topk:keep=0.5"}
    return [wrap.get(name, name) for name in registry.names("codec")]


@pytest.mark.parametrize("exchange", registry.names("exchange"))
@pytest.mark.parametrize("codec", codecs())
def test_halves_its_distance(codec, exchange):
    x = torch.randn(12, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    batches = [(x, torch.zeros(12))] * STEPS

    def work(link):
        options = {"optimizer": lambda p: torch.optim.SGD(p, lr=RATE), "loss": squared}
        rank = Rank(link, Point(), exchange=exchange, codec=codec, batch=12, **options)
        rank.train(batches)
        rank.exchange.close()
        return rank.state()["w"]

    goal = x.mean(0)
    for w in ranks.run(2, work):
        assert (w - goal).norm() < 0.5 * goal.norm()
