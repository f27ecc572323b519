"""Whatever layer calls batch_norm, batch_norm="sync" gives the weights and statistics of one process."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline
import ranks
from device import of_cpus, waits_in_backward
from nodes import HIDDEN, IN, OPTIMIZERS, OUT, Rank, build, gap, reference, rows
from paceline.engine.checks.norm_layers import over_batches, own_statistics
from paceline.engine.compute.sync_batch_norm import SyncBatchNorm
from paceline.engine.replicas import Engine as Replicas
from paceline.link.memory import world


class WithAct(nn.BatchNorm1d):
    """As timm's BatchNormAct2d: a forward of its own, which counts, normalises and activates in place."""

    def forward(self, x):
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu_(x)


class OwnBuffers(nn.Module):
    """No kin of torch.nn's, with other names for its statistics."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("seen_mean", torch.zeros(width))
        self.register_buffer("seen_var", torch.ones(width))

    def forward(self, x):
        return torch.batch_norm(
            x, self.scale, None, self.seen_mean, self.seen_var, self.training, 0.2, 1e-3, torch.backends.cudnn.enabled
        )


class Nothing(nn.Module):
    """Batch statistics by a bare call, which keeps none, twice."""

    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return F.batch_norm(F.batch_norm(x, None, None, training=True).tanh(), None, None, None, None, True)


class Again(nn.Module):
    """Computed again in backward."""

    def __init__(self, width, kind):
        super().__init__()
        self.inner = nn.Sequential(kind(width), nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Frozen(nn.Module):
    """One layer by its batch, and one by its statistics in a model that trains."""

    def __init__(self, width):
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def train(self, mode=True):
        super().train(mode)
        self.other.eval()
        return self

    def forward(self, x):
        return self.other(self.one(x))


class Images(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.norm = kind(4)

    def forward(self, x):
        return self.norm(x.view(len(x), 4, 4, -1)).flatten(1)


class Instances(Images):
    """Each sample by itself, beside batch norm."""

    def __init__(self, width):
        super().__init__(width, nn.BatchNorm2d)
        self.own = nn.InstanceNorm2d(4, affine=True)

    def forward(self, x):
        x = x.view(len(x), 4, 4, -1)
        return (self.norm(x) + self.own(x)).flatten(1)


KINDS = {
    "with an activation": WithAct,
    "buffers of its own": OwnBuffers,
    "no statistics": Nothing,
    "cumulative": lambda width: nn.BatchNorm1d(width, momentum=None),
    "not tracked": lambda width: nn.BatchNorm1d(width, track_running_stats=False),
    "not affine": lambda width: nn.BatchNorm1d(width, affine=False),
    "torch's synchronised": nn.SyncBatchNorm,
    "half of it in eval": Frozen,
    "instances beside": Instances,
    "images": lambda width: Images(width, nn.BatchNorm2d),
    "checkpointed": lambda width: Again(width, nn.BatchNorm1d),
    "checkpointed, with an activation": lambda width: Again(width, WithAct),
    "checkpointed, own buffers": lambda width: Again(width, OwnBuffers),
    "checkpointed, no statistics": lambda width: Again(width, Nothing),
}


class Around(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(IN, HIDDEN), kind(HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.first(x))))


def batches():
    return [rows(24, 0), rows(24, 1), rows(24, 2), rows(3, 3)]


def model(kind):
    made = build(lambda: Around(KINDS[kind]))
    made.train()
    return made


@waits_in_backward
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [(3, 1), (1, 0, 2)])
def test_nodes_equal_one_process(kind, shares):
    """Unequal shares, and nodes without samples in a step."""
    start = model(kind)
    want, want_losses = reference(start, batches(), OPTIMIZERS["momentum"])

    def work(link):
        rank = Rank(link, start, shares=shares, batch_norm="sync")
        losses = rank.train(batches())
        rank.exchange.close()
        rank.engine.close()
        return losses, rank.state()

    for losses, state in ranks.run(len(shares), work):
        assert losses == pytest.approx(want_losses, rel=1e-10)
        assert gap(state, want) < 1e-10


@waits_in_backward
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_equal_one_process(kind):
    start = model(kind)
    want, want_losses = reference(start, batches(), OPTIMIZERS["momentum"])
    rank = Rank(world(1)[0], start, engine=Replicas(2), batch_norm="sync")
    losses = rank.train(batches())
    rank.engine.close()
    assert losses == pytest.approx(want_losses, rel=1e-10)
    assert gap(rank.state(), want) < 1e-10


def test_a_bare_call_that_is_computed_again_is_refused():
    class Bare(nn.Module):
        def __init__(self, width):
            super().__init__()

        def forward(self, x):
            return checkpoint(lambda x: F.batch_norm(x, None, None, training=True), x, use_reentrant=False)

    rank = Rank(world(1)[0], build(lambda: Around(Bare)), batch_norm="sync")
    with pytest.raises(ValueError, match=r"batch_norm='sync'.*activation checkpointing.*batch_norm='local'"):
        rank.train(batches())
    rank.engine.close()


@pytest.mark.parametrize("function", [torch.native_batch_norm, torch.ops.aten.native_batch_norm])
def test_kernels_called_by_themselves_are_refused_in_training_alone(function):
    class Kernel(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.by_batch = True

        def forward(self, x):
            zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            return function(x, None, None, zeros, ones, self.by_batch, 0.1, 1e-5)[0]

    rank = Rank(world(1)[0], build(lambda: Around(Kernel)), batch_norm="sync")
    with pytest.raises(ValueError, match=r"native_batch_norm.*call torch.nn.functional.batch_norm instead"):
        rank.train(batches())
    rank.model.norm.by_batch = False
    rank.train(batches())
    rank.engine.close()


def test_layers_over_batches_are_known_by_what_they_keep():
    class Keras(nn.Module):
        def __init__(self):
            super().__init__()
            self.moving_mean = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.moving_variance = nn.Parameter(torch.ones(3), requires_grad=False)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.var = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    parts = {
        "torch": nn.BatchNorm2d(3),
        "derived": WithAct(3),
        "keras": Keras(),
        "own": OwnBuffers(3),
        "named": Named(),
        "instance": nn.InstanceNorm2d(3, track_running_stats=True),
        "layer": nn.LayerNorm(3),
    }
    assert list(over_batches(nn.ModuleDict(parts))) == ["torch", "derived", "keras", "own"]


def test_a_synchronised_layer_is_not_local_without_a_word():
    made = nn.Sequential(nn.Linear(IN, 4), nn.SyncBatchNorm(4), nn.Linear(4, OUT))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"layer '1' is a SyncBatchNorm.*give batch_norm='sync'"):
        paceline.join(made, optimizer, F.cross_entropy, batch_size=8, engine="replicas:2")


@of_cpus
def test_what_is_covered_is_restored():
    made = model("checkpointed, own buffers")
    layers = SyncBatchNorm(made)
    layers.convert(lambda vector: vector)
    with layers.computing():
        out = made(torch.randn(4, IN, dtype=torch.float64))
    out.sum().backward()
    assert "forward" in vars(made.norm.inner[0])
    copied = copy.deepcopy(made)
    assert copied.norm.inner[0].forward.__self__ is copied.norm.inner[0]
    layers.restore()
    assert not any("forward" in vars(module) for module in made.modules())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "batch norm (1) takes"),
        (nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.BatchNorm2d(2)), "batch norm (0 and 2 more) takes"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval()), ""),  # frozen
        (nn.Sequential(nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, track_running_stats=True)), ""),
    ],
)
def test_local_statistics_are_reported(model, said):
    text = own_statistics(model)
    assert text.startswith(said)
    assert bool(text) == bool(said)
