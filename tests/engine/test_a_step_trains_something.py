"""A step that cannot train is an error, as torch gives: in every engine, in every process, whoever sees it."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import launching
import paceline
import ranks
from nodes import OPTIMIZERS, Normed, Rank, Whole, build, gap, rows
from paceline.errors import LinkError, NoGradient

ENGINES = ["sequential", "threads:2", "replicas:2", "reproducible:4"]
NO_GRAD = "does not require grad, or no trainable parameter is part of it"


def detached(output, target):
    return F.cross_entropy(output.detach(), target)


def retensored(output, target):
    return torch.tensor(F.cross_entropy(output, target).item())


def leaf(output, target):
    """Torch itself says nothing of this one."""
    return torch.tensor(F.cross_entropy(output, target).item(), requires_grad=True)


def numbers(output, target):
    return (F.cross_entropy(output.detach(), target, reduction="sum"), len(target))


def small(loss=F.cross_entropy, engine="sequential", **how):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    pace = paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), loss, batch_size=8, engine=engine, **how)
    return model, pace, (torch.randn(8, 4), torch.arange(8) % 3)


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [detached, retensored, leaf, numbers])
def test_a_loss_without_a_gradient_is_an_error(loss, engine):
    """Story: it trained nothing, said a constant loss, and ended with 0."""
    model, pace, data = small(loss, engine)
    before = weights(model)
    with pytest.raises(NoGradient, match=f"^step 0 trains nothing: the loss {NO_GRAD}"):
        pace.step(data)
    assert gap(model.state_dict(), before) == 0.0
    pace.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)])
def test_gradients_that_are_switched_off_are_an_error(mode, engine):
    """Story: threads of replicas have a mode of their own, and trained all the same."""
    model, pace, data = small(engine=engine)
    pace.step(data)
    before = weights(model)
    with mode(), pytest.raises(NoGradient, match=f"^step 1 trains nothing: the loss {NO_GRAD}"):
        pace.step(data)
    assert gap(model.state_dict(), before) == 0.0
    assert pace.step(data) > 0, "nothing is left behind by it"
    assert gap(model.state_dict(), before) > 0
    pace.close()


@pytest.mark.parametrize("alone", [False, True])
def test_one_process_of_several_that_sees_it_ends_all_with_the_same_words(alone):
    model, data = build(), rows(24, 1)

    def work(link):
        loss = detached if link.rank == 1 or not alone else F.cross_entropy
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=loss)
        with pytest.raises(NoGradient) as told:
            rank.step(Whole(data))
        return str(told.value), gap(rank.state(), model.state_dict())

    said = ranks.run(3, work)
    assert len(set(said)) == 1
    assert NO_GRAD in said[0][0]
    assert said[0][1] == 0.0


def test_a_process_whose_rows_add_nothing_is_none_of_them():
    """Where some rows train nothing, their loss is 0; and a process without rows has none."""
    model, (x, y) = build(), rows(24, 1)
    y[12:] = 0

    def loss(output, target):
        return (output * F.one_hot(target, 3)).square().sum(), 3 if target.any() else 0

    def constant(output, target):
        return loss(output, target) if target.any() else (torch.zeros(()), 4)

    def work(link):
        many = Rank(link, model, OPTIMIZERS["sgd"], loss=constant)
        few = many.step(Whole((x[:2], y[:2].clamp(min=1)))).vote  # of three ranks one has no row
        return many.train([(x, y)]), few.weight

    for losses, weight in ranks.run(3, work):
        assert losses[0] > 0
        assert weight == 6


def test_batch_norm_over_everyone_waits_for_nobody_who_has_no_gradient():
    model, data = build(Normed), rows(24, 1)
    start = time.monotonic()

    def work(link):
        loss = detached if link.rank else F.cross_entropy
        Rank(link, model, OPTIMIZERS["sgd"], loss=loss, batch_norm="sync").step(Whole(data))

    with pytest.raises(NoGradient, match="with batch_norm='sync' every process with rows takes part in backward"):
        ranks.run(2, work)
    assert time.monotonic() - start < 30


def test_a_loop_of_ones_own_gets_torchs_error():
    model, pace, (x, y) = small()
    with pytest.raises(RuntimeError, match="does not require grad"):
        pace.backward(F.cross_entropy(model(x).detach(), y), rows=8)
    pace.close()


def test_a_loop_of_ones_own_whose_loss_is_of_another_model_is_an_error():
    _, pace, (x, y) = small()
    pace.backward(F.cross_entropy(nn.Linear(4, 3)(x), y), rows=8)
    with pytest.raises(NoGradient, match=NO_GRAD):
        pace.update()
    pace.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: (output.sum(), 0.0),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 1.0])),
    ],
    ids=["pair", "ignored", "weights"],
)
def test_a_step_of_which_nothing_counts_is_an_error(loss, engine):
    """Story: it was left out without a word, and the loss was NaN."""
    model, pace, (x, _) = small(loss, engine)
    before = weights(model)
    with pytest.raises(NoGradient, match="nothing in the global batch counts: every process's weight is 0"):
        pace.step((x, torch.ones(8, dtype=torch.long)))
    assert gap(model.state_dict(), before) == 0.0
    pace.close()


def test_it_is_an_error_on_all_processes_and_of_one_alone_it_is_none():
    model, (x, y) = build(), rows(24, 1)
    some, none = y.clone(), torch.full_like(y, -100)
    some[:12] = -100

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"])
        losses = rank.train([(x, some)])
        with pytest.raises(NoGradient, match="nothing in the global batch counts"):
            rank.step(Whole((x, none)))
        return losses

    for losses in ranks.run(2, work):
        assert losses[0] > 0


@pytest.mark.dear("own loop", "processes")
@pytest.mark.parametrize(
    "lines",
    [
        ["torch.set_grad_enabled(pace.world.rank == 0)", "pace.step((torch.ones(4, 4), torch.ones(4, dtype=int)))"],
        [
            "loss = torch.nn.functional.cross_entropy(model(torch.ones(4, 4)), torch.ones(4, dtype=int))",
            "pace.backward(loss.detach() if pace.world.rank else loss, rows=4)",
            "pace.update()",
        ],
    ],
    ids=["step", "own loop"],
)
@pytest.mark.parametrize("where", [("processes:2", 1), ("sequential", 2)], ids=["processes", "nodes"])
def test_real_processes_end_with_one_line(tmp_path, lines, where):
    script = launching.small(tmp_path, *lines)
    start = time.monotonic()
    done = launching.launch(str(script), engine=where[0], num_nodes=where[1], code=1)
    said = [line for line in done.stderr.splitlines() if "threads" not in line]
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"paceline: step 0 trains nothing: the loss {NO_GRAD}")
    assert time.monotonic() - start < 60
    assert LinkError.__name__ not in done.stderr
