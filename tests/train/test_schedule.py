"""The learning rate is a closed-form function of the number of applied steps, and resumes bit by bit."""

import json
import math
from itertools import pairwise

import pytest
import torch

from paceline.train import lr_schedule

PEAK, OTHER = 3.2, 0.7  # two groups, each with its own learning rate


def sgd():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    return torch.optim.SGD([{"params": parameters[:1], "lr": PEAK}, {"params": parameters[1:], "lr": OTHER}], lr=1.0)


def advance(optimizer, scheduler):
    optimizer.step()
    scheduler.step()


def rates(num_steps, **options):
    """The rate of the first group in each step; that of the second group must be proportional."""
    optimizer = sgd()
    scheduler = lr_schedule.make(optimizer, **options)
    found = []
    for _ in range(num_steps):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second * PEAK == pytest.approx(first * OTHER)
        found.append(first)
        advance(optimizer, scheduler)
    return found


@pytest.mark.parametrize(
    ("rule", "batch_size", "expected"),
    [
        ("none", 8192, 0.1),
        ("linear", 8192, 3.2),
        ("linear", 256, 0.1),
        ("linear", 64, 0.025),
        ("sqrt", 1024, 0.2),
        ("sqrt", 512, 0.1 * 2**0.5),
        ("sqrt", 64, 0.05),
    ],
)
def test_the_rate_for_another_batch(rule, batch_size, expected):
    assert lr_schedule.scaled(0.1, batch_size, 256, rule) == expected


def test_warm_up_rises_evenly_from_nothing_and_its_first_step_already_moves():
    found = rates(7, warmup_steps=4)
    assert found[:4] == pytest.approx([PEAK * n / 5 for n in (1, 2, 3, 4)])
    assert found[4:] == [PEAK] * 3


def test_warm_up_from_the_rate_of_the_base_batch_is_goyals():
    base, steps = 0.1, 10
    found = rates(12, warmup_steps=steps, start=base / PEAK)
    assert found[0] == pytest.approx(base)
    assert found[5] == pytest.approx((base + PEAK) / 2)
    assert found[3] == pytest.approx(base + (PEAK - base) * 3 / steps)
    assert found[steps:] == [PEAK, PEAK]


def test_cosine_passes_its_quarter_points_and_stays_at_zero():
    found = rates(14, warmup_steps=2, decay="cosine", total_steps=10)
    assert found[2] == PEAK
    assert found[2:10] == pytest.approx([PEAK * (1 + math.cos(math.pi * n / 8)) / 2 for n in range(8)])
    assert found[6] == pytest.approx(PEAK / 2)
    assert found[10:] == [0.0] * 4


def test_poly_is_the_square_of_what_is_left():
    found = rates(12, warmup_steps=2, decay="poly", total_steps=10)
    assert found[2:] == pytest.approx([PEAK * (left / 8) ** 2 for left in (8, 7, 6, 5, 4, 3, 2, 1, 0, 0)])


def test_step_divides_by_ten_at_30_60_and_80_of_90_epochs():
    per_epoch = 7
    found = rates(90 * per_epoch, warmup_steps=5 * per_epoch, decay="step", total_steps=90 * per_epoch)
    for epoch, divisor in ((5, 1), (29, 1), (30, 10), (59, 10), (60, 100), (79, 100), (80, 1000), (89, 1000)):
        first, last = found[epoch * per_epoch], found[(epoch + 1) * per_epoch - 1]
        assert (first, last) == pytest.approx((PEAK / divisor, PEAK / divisor))


@pytest.mark.parametrize("decay", lr_schedule.DECAYS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (1, 4), (5, 16), (29, 90), (3, 1000)])
@pytest.mark.parametrize("start", [None, 0.0, 1 / 32])
def test_rises_to_the_target_meets_it_exactly_and_never_rises_again(decay, warmup, total, start):
    if decay == "none" and not warmup:
        assert lr_schedule.make(sgd(), decay=decay, total_steps=total) is None
        return
    found = rates(total + 3, warmup_steps=warmup, decay=decay, total_steps=total, start=start)
    assert found[warmup] == PEAK
    assert all(a < b for a, b in pairwise(found[: warmup + 1]))
    assert all(a >= b for a, b in pairwise(found[warmup:]))
    assert min(found) >= 0


def test_nothing_to_do_is_no_schedule():
    optimizer = sgd()
    assert lr_schedule.make(optimizer) is None
    assert [group["lr"] for group in optimizer.param_groups] == [PEAK, OTHER]
    assert "initial_lr" not in optimizer.param_groups[0]


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("decay", lr_schedule.DECAYS)
@pytest.mark.parametrize("at", [0, 1, 5, 6, 17])
def test_resumes_bit_by_bit_at_any_step(decay, at, optimizer_first):
    options = {"warmup_steps": 6, "decay": decay, "total_steps": 20}
    optimizer = sgd()
    scheduler = lr_schedule.make(optimizer, **options)
    for _ in range(at):
        advance(optimizer, scheduler)
    state = json.loads(json.dumps(scheduler.state_dict()))  # numbers alone: it may lie in a text file

    again = sgd()
    if optimizer_first:
        again.load_state_dict(optimizer.state_dict())
    resumed = lr_schedule.make(again, **options)
    resumed.load_state_dict(state)
    if not optimizer_first:
        again.load_state_dict(optimizer.state_dict())
    for _ in range(at, 21):
        assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]
        advance(optimizer, scheduler)
        advance(again, resumed)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"warmup_steps": -1}, ["warmup_steps", "at least 0", "-1"]),
        ({"decay": "cosin"}, ["'cosin'", "known: none, cosine, poly, step"]),
        ({"decay": "cosine"}, ["'cosine' needs total_steps"]),
        ({"decay": "cosine", "warmup_steps": 10, "total_steps": 10}, ["10 leaves no room", "fewer than 10 steps"]),
        ({"decay": "poly", "total_steps": 0}, ["total_steps=0", "train for more"]),
        ({"decay": "step", "warmup_steps": 30, "total_steps": 90}, ["30 leaves no room", "fewer than 30 steps"]),
        ({"warmup_steps": 3, "start": 1.5}, ["start", "between 0 and 1", "1.5"]),
        ({"warmup_steps": -2, "decay": "sqrt"}, ["-2", "'sqrt'"]),
    ],
)
def test_what_cannot_be_scheduled_is_told(options, parts):
    with pytest.raises(ValueError, match="schedule") as error:
        lr_schedule.make(sgd(), **options)
    assert all(word in str(error.value) for word in parts), error.value


def test_an_unknown_rule_and_an_empty_batch_are_told():
    with pytest.raises(ValueError, match=r"'cube'; known: none, linear, sqrt"):
        lr_schedule.scaled(0.1, 64, 32, "cube")
    with pytest.raises(ValueError, match=r"at least 1, got 0 for a base of 32"):
        lr_schedule.scaled(0.1, 0, 32)
