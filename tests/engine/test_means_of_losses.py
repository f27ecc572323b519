"""Every mean is divided once, by what torch divides by: any split of a batch gives the one process's result.

Story: class weights in a functools.partial, or -100 in the labels of a `transformers` model, and two nodes trained
another model than one, without a word.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import ranks
from device import DEVICE, of_cpus
from nodes import IN, OPTIMIZERS, OUT, Rank, build, gap, reference, rows
from paceline.engine.compute import batch
from paceline.engine.sequential import Engine

W = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64, device=DEVICE)


def _batches(_):
    data = [rows(24, seed) for seed in range(2)]
    for seed, (_, y) in enumerate(data):
        y[: 7 + seed] = 1  # one rank has more of a class than others
    return data


def _ignoring(name):
    data = _batches(name)
    for _, y in data:
        y[:16] = IGNORED.get(name, -100)  # of three ranks one has nothing that counts
    return data


CLASSES = {
    "partial": partial(F.cross_entropy, weight=W),
    "partial of a partial": partial(partial(F.cross_entropy, weight=W.flip(0)), weight=W, ignore_index=2),
    "smoothed": partial(F.cross_entropy, weight=W, label_smoothing=0.2),
    "partial of a module": partial(nn.CrossEntropyLoss(weight=W)),
    "bound": nn.CrossEntropyLoss(weight=W, ignore_index=0).forward,
    "subclass": type("Mine", (nn.CrossEntropyLoss,), {})(weight=W),
    "lambda": lambda output, target: F.cross_entropy(output, target, weight=W),
    "hooked": nn.CrossEntropyLoss(weight=W),
    "likelihood": lambda output, target: nn.NLLLoss(weight=W)(output.log_softmax(1), target),
    "legacy": partial(F.cross_entropy, weight=W, size_average=True),
    "only some": lambda output, target: F.cross_entropy(output[target > 0], target[target > 0]),
}
IGNORED = {"partial of a partial": 2, "bound": 0}
CLASSES["hooked"].register_forward_hook(lambda module, args, output: None)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("make", [_batches, _ignoring])
@pytest.mark.parametrize("name", CLASSES)
def test_weights_of_classes_and_ignored_targets(name, make):
    loss, data, model = CLASSES[name], make(name), build()
    want, want_losses = reference(model, data, OPTIMIZERS["sgd"], loss=loss)

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=loss, shares=(5, 1, 2)[: link.size])
        return rank.train(data), rank.state()

    for size in (1, 2, 3):
        for losses, state in ranks.run(size, work):
            assert gap(state, want) < 1e-12
            assert losses == pytest.approx(want_losses, rel=1e-12)


COUNTED = {
    "mean": F.cross_entropy,
    "smoothed": partial(F.cross_entropy, label_smoothing=0.2),
    "likelihood": lambda output, target: F.nll_loss(output.log_softmax(1), target),
}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("make", [_batches, _ignoring])
@pytest.mark.parametrize("name", COUNTED)
def test_targets_that_are_counted_while_backward_runs(name, make, accumulate, monkeypatch):
    """As on a GPU; of a micro-batch in which nothing counts, the loss is 0 / 0, and its gradient 0."""
    loss, data, model = COUNTED[name], make(name), build()
    want, want_losses = reference(model, data, OPTIMIZERS["sgd"], loss=loss)
    seen = []
    monkeypatch.setattr(batch, "_is_late", lambda divisor: seen.append(float(divisor)) or True)

    def work(link):
        engine = Engine()
        engine.accumulate = accumulate
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=loss, shares=(5, 1, 2)[: link.size], engine=engine)
        return rank.train(data), rank.state()

    for size in (1, 3):
        for losses, state in ranks.run(size, work):
            assert gap(state, want) < 1e-12
            assert losses == pytest.approx(want_losses, rel=1e-12)
    assert seen
    assert make is _batches or 0.0 in seen


@pytest.mark.parametrize("late", [False, True])
def test_nothing_that_counts_is_0_with_a_gradient_of_0(late, monkeypatch):
    monkeypatch.setattr(batch, "_is_late", lambda divisor: late)
    output = torch.randn(4, OUT, device=DEVICE, requires_grad=True)
    nothing = torch.full((4,), -100, device=DEVICE)
    value, times, weight, _ = batch.judged(F.cross_entropy, output, (output, nothing))
    value.backward()
    assert (float(value.detach()), times * weight, float(output.grad.abs().max())) == (0.0, 0.0, 0.0)


@of_cpus
@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none")
def test_a_loss_whose_gradient_is_not_0_where_nothing_counts_is_counted_at_once(monkeypatch):
    """Its gradient is computed in forward, in chunks, and divided by 0."""
    monkeypatch.setattr(batch, "_is_late", lambda divisor: True)
    hidden, nothing = torch.randn(4, IN, requires_grad=True), torch.full((4,), -100)
    weight = torch.randn(OUT, IN, requires_grad=True)
    value, times, *_ = batch.judged_later(partial(_by_chunks, weight), hidden, (hidden, nothing))
    (value * times).backward()
    assert (times, float(hidden.grad.abs().max())) == (1.0, 0.0)


def _by_chunks(weight, hidden, target):
    return F.linear_cross_entropy(hidden, weight, target)


POSITIVE = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64, device=DEVICE)
CLASS, REAL, SIGN = (
    torch.arange(24) % OUT,
    torch.randn(24, OUT, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    (torch.arange(24 * OUT).view(24, OUT) % 3 - 1).sign().double(),
)
TORCHS = {
    nn.L1Loss: ({}, REAL),
    nn.MSELoss: ({}, REAL),
    nn.SmoothL1Loss: ({}, REAL),
    nn.HuberLoss: ({}, REAL),
    nn.CrossEntropyLoss: ({"weight": W}, CLASS),
    nn.NLLLoss: ({"weight": W}, CLASS),
    nn.PoissonNLLLoss: ({}, REAL.abs()),
    nn.KLDivLoss: ({"reduction": "batchmean"}, REAL.softmax(1)),
    nn.BCEWithLogitsLoss: ({"pos_weight": POSITIVE}, REAL.sigmoid()),
    nn.SoftMarginLoss: ({}, SIGN),
    nn.HingeEmbeddingLoss: ({}, SIGN),
    nn.MultiLabelSoftMarginLoss: ({"weight": POSITIVE}, (SIGN > 0).double()),
    nn.MultiLabelMarginLoss: ({}, torch.stack([CLASS, -torch.ones_like(CLASS), CLASS], 1)),
    nn.MultiMarginLoss: ({"weight": W}, CLASS),
}
# they take other than (output, target), so that a function of the user's calls them
CALLED = {
    nn.BCELoss: lambda made: lambda output, target: made(output.sigmoid(), target.sigmoid()),
    nn.GaussianNLLLoss: lambda made: lambda output, target: made(output, target, target.square() + 1),
    nn.CosineEmbeddingLoss: lambda made: lambda output, target: made(output, target, target[:, 0].sign()),
    nn.MarginRankingLoss: lambda made: lambda output, target: made(output[:, 0], output[:, 1], target[:, 0].sign()),
    nn.TripletMarginLoss: lambda made: lambda output, target: made(output, target, target.flip(1)),
    nn.TripletMarginWithDistanceLoss: lambda made: lambda output, target: made(output, target, target.flip(1)),
    nn.CTCLoss: lambda made: (
        lambda output, target: made(
            output.unsqueeze(0).repeat(4, 1, 1).log_softmax(2),
            torch.ones(len(output), 2, dtype=torch.long),
            torch.full((len(output),), 4),
            torch.tensor([1 + (row > 0) for row in target[:, 0].tolist()]),
        )
    ),
}
KINDS = [  # but LinearCrossEntropyLoss, whose weights are a model's to hold
    kind
    for name, kind in vars(nn.modules.loss).items()
    if isinstance(kind, type) and name.endswith("Loss") and not name.startswith(("_", "Linear"))
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_of_torchs_losses_is_that_of_one_process(kind):
    """Over three ranks with unlike shares, of which one may have one row."""
    how, target = TORCHS.get(kind, ({}, REAL))
    loss = CALLED[kind](kind()) if kind in CALLED else kind(**how)
    data, model = [(rows(24, 3)[0], target)], build()
    want, want_losses = reference(model, data, OPTIMIZERS["sgd"], loss=loss)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=loss, shares=(17, 6, 1))
        return rank.train(data), rank.state()

    for losses, state in ranks.run(3, work):
        assert gap(state, want) < 1e-12
        assert losses == pytest.approx(want_losses, rel=1e-12)
    assert gap(want, start) > 1e-5, "nothing was learned, so nothing is tested"


def _joined(loss, model=None, **how):
    model = model or nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return paceline.join(model, optimizer, loss, batch_size=8, engine="sequential", **how)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        partial(F.cross_entropy, reduction="sum"),
        partial(partial(F.mse_loss, reduction="mean"), reduction="sum"),
        partial(nn.MSELoss(reduction="sum")),
        nn.MSELoss(reduction="sum").forward,
        type("Mine", (nn.MSELoss,), {})(reduction="sum"),
        partial(F.l1_loss, size_average=False),
        nn.L1Loss(reduction="none"),
        partial(F.l1_loss, reduction="none"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused_at_join(loss):
    with pytest.raises(ValueError, match=r"loss has reduction='(sum|none)', .*use reduction='mean'"):
        _joined(loss)


def test_a_sum_inside_of_a_function_is_refused_at_the_first_step():
    pace = _joined(lambda output, target: F.cross_entropy(output, target, reduction="sum"), accumulate=2)
    with pytest.raises(ValueError, match=r"the loss is a sum \(reduction='sum' of cross_entropy\)"):
        pace.step(rows(8, 1, torch.float32))
    pace.close()


def test_a_part_of_a_loss_that_is_no_mean_over_samples_is_refused():
    x, y = rows(8, 1, torch.float32)
    with _joined(lambda output, target: {"ce": F.cross_entropy(output, target)}, accumulate=2) as pace:
        assert pace.step((x, y)) > 0
        y[0] = -100
        with pytest.raises(ValueError, match="the loss's part 'ce' is a mean over the targets that count"):
            pace.step((x, y))


def _of(scheduler):
    return lambda optimizer, other: scheduler(other)


class Warm(torch.optim.lr_scheduler.LRScheduler):
    """One that holds another, as warm-ups do."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs


lr = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda own, other: lr.StepLR(other, 1),
        lambda own, other: lr.SequentialLR(other, [lr.StepLR(other, 1), lr.StepLR(other, 2)], [3]),
        lambda own, other: lr.ChainedScheduler([lr.StepLR(other, 1)], optimizer=other),
        lambda own, other: Warm(own, lr.StepLR(other, 1)),
    ],
)
def test_a_scheduler_of_another_optimizer_is_an_error(make):
    """Story: the learning rate stayed what it was."""
    model = nn.Linear(IN, OUT)
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    with pytest.raises(ValueError, match="was made for another optimizer, whose learning rates it would change"):
        paceline.join(model, optimizer, F.cross_entropy, batch_size=8, scheduler=make(optimizer, other))


class Around(torch.optim.Optimizer):
    """One that wraps another, with its groups, as Lookahead does."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step()


def test_a_scheduler_of_the_optimizer_inside_is_none_of_these():
    model = nn.Linear(IN, OUT)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with paceline.join(
        model, Around(inner), F.cross_entropy, batch_size=8, engine="sequential", scheduler=lr.StepLR(inner, 1)
    ) as pace:
        pace.step(rows(8, 1, torch.float32))
        assert inner.param_groups[0]["lr"] == pytest.approx(0.01)
