"""What the first graph of a loss shows: a scale that nobody would divide by, and backward passes inside backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline
import ranks
from device import of_cpus
from nodes import OPTIMIZERS, Plain, Rank, build, gap, reference, rows
from paceline.link.net.metered import MeteredLink


class Reentrant(Plain):
    """Two segments that are computed again inside backward, with one layer in both, and once outside of them."""

    def part(self, x):
        return F.relu(self.second(x))

    def forward(self, x):
        x = F.relu(self.first(x))
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=True)
        return self.head(self.part(x))


class Direct(Reentrant):
    def forward(self, x):
        return self.head(self.part(self.part(self.part(F.relu(self.first(x))))))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("exchange", ["allreduce:factors", "allreduce:dense"])
def test_segments_that_backward_computes_again_are_exact(size, exchange):
    """Story: a weight that two of them use "got its gradient twice", or left before it was whole."""
    batches, model = [rows(24, seed) for seed in range(4)], build(Reentrant)  # while the other rank's backward draws

    def work(link):
        rank = Rank(MeteredLink(link), model, exchange=exchange)
        rank.train(batches)
        return rank.state()

    want, _ = reference(build(Direct), batches, OPTIMIZERS["momentum"])
    for state in ranks.run(size, work):
        assert gap(state, want) < 1e-12


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def plainly(engine="sequential", loss=F.cross_entropy, model=None, **words):
    model = model or net()
    return paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), loss, batch_size=8, engine=engine, **words)


@pytest.mark.parametrize(
    "words", [{"engine": "replicas:2"}, {"accumulate": 2}, pytest.param({"engine": "reproducible:2"}, marks=of_cpus)]
)
def test_such_segments_in_every_engine(words):
    models = [build(kind) for kind in (Reentrant, Direct)]
    batch = rows(8, 0)
    for model in models:
        with plainly(model=model, **words) as pace:
            pace.step(batch)
            pace.step(batch)
    assert gap(*(model.state_dict() for model in models)) < 1e-12


SCALED = {
    "scaled": lambda scaler, loss: scaler.scale(loss),
    "and divided": lambda scaler, loss: scaler.scale(loss / 4),
    "divided after": lambda scaler, loss: scaler.scale(loss) / 4,
    "a part of it": lambda scaler, loss: scaler.scale(loss) + 0.0,
}


@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("engine", ["sequential", "replicas:2"])
def test_a_loss_that_a_scaler_has_multiplied_is_refused(how, engine):
    """Story: steps were 65536 times too large, without a word."""
    scaler, model = torch.amp.GradScaler("cpu"), net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        plainly(engine, lambda output, y: SCALED[how](scaler, F.cross_entropy(output, y)), model) as pace,
        pytest.raises(
            ValueError, match=r"multiplied by a torch\.amp\.GradScaler.*leave the scaler out.*precision='fp16'"
        ),
    ):
        pace.step(BATCH)
    assert gap(model.state_dict(), before) == 0.0


def test_in_a_loop_of_ones_own_too():
    scaler, model = torch.amp.GradScaler("cpu"), net()
    with plainly(model=model) as pace, pytest.raises(ValueError, match=r"multiplied by a torch\.amp\.GradScaler"):
        pace.backward(scaler.scale(F.cross_entropy(model(BATCH[0]), BATCH[1])), rows=8)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_did_not_scale_this_loss_is_nobodys_business(enabled):
    scaler, other = torch.amp.GradScaler("cpu", enabled=enabled), torch.ones(1, requires_grad=True)
    scaler.scale(other.sum()).backward()
    weight = torch.tensor(2.0)

    def loss(output, y):
        return weight * F.cross_entropy(output, y) if enabled else scaler.scale(F.cross_entropy(output, y))

    with plainly(loss=loss) as pace:
        assert pace.step(BATCH) > pace.step(BATCH)
