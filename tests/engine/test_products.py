"""Large fully-connected layers by oneDNN: torch's own numbers, up to the order of summation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from device import of_cpus
from paceline.engine.compute import matmul
from paceline.engine.compute.optimizer_step import Factored, finish
from paceline.messages import UpdateRule

OUT, IN, ROWS = 1024, 1024, 6

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(params=[pytest.param(True, marks=needs_onednn), False])
def fast(request, monkeypatch):
    """By oneDNN, and as torch does it: the laws are the same."""
    monkeypatch.setenv("PACELINE_MATMUL", "onednn" if request.param else "blas")
    matmul.fast.cache_clear()
    yield request.param
    monkeypatch.undo()
    matmul.fast.cache_clear()


def layer(bias=True):
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(ROWS,), (2, 3), ()])
def test_values_and_slopes_are_torchs(fast, bias, shape):
    plain, model = layer(bias), layer(bias)
    matmul.install(model)
    assert ("forward" in vars(model)) == fast
    x = torch.randn(*shape, IN)
    slope = torch.randn(*shape, OUT)
    found = []
    for each, dtype in ((plain.double(), torch.float64), (model, torch.float32)):
        rows = x.to(dtype).requires_grad_()
        output = each(rows)
        output.backward(slope.to(dtype))
        found.append([output.detach(), rows.grad, *(p.grad for p in each.parameters())])
    for want, got in zip(*found, strict=True):
        assert want.shape == got.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [False, True], ids=["half width", "full width"])
@pytest.mark.parametrize("rows", [1, matmul.MANY_ROWS - 1, matmul.MANY_ROWS, 3 * matmul.MANY_ROWS])
def test_of_a_smaller_layer_many_rows_are_torchs_too(fast, width, rows, monkeypatch):
    """As a transformer's, whose rows are tokens; few of them are left to torch, bit for bit."""
    monkeypatch.setattr(matmul, "_full_width", lambda: width)
    torch.manual_seed(0)
    plain = nn.Linear(320, 256)
    model = copy.deepcopy(plain)
    matmul.install(model)
    x, slope = torch.randn(rows, 320), torch.randn(rows, 256)
    found = []
    for each in (plain, model):
        its = x.clone().requires_grad_()
        output = each(its)
        output.backward(slope)
        found.append([output.detach(), its.grad, *(p.grad for p in each.parameters())])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert rows >= matmul.MANY_ROWS or torch.equal(got, want)


def test_a_slope_of_a_slope_is_torchs(fast):
    """As a gradient penalty asks for."""
    found = []
    for dtype in (torch.float64, torch.float32):
        model = layer().to(dtype)
        matmul.install(model)
        torch.manual_seed(1)
        x = torch.randn(ROWS, IN).to(dtype).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([x.grad.double(), model.weight.grad.double()])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got / want.abs().max(), want / want.abs().max(), rtol=1e-4, atol=1e-5)


def test_a_frozen_weight_and_an_input_without_a_slope_cost_nothing(fast):
    model = layer()
    matmul.install(model)
    model.weight.requires_grad_(False)
    model(torch.randn(ROWS, IN)).sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad.eq(ROWS).all()


def test_what_is_unusual_is_left_to_torch(fast):
    model = layer()
    matmul.install(model)
    x = torch.randn(ROWS, IN)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert model(x[:0]).shape == (0, OUT)
    each = torch.func.vmap(model)(x)
    torch.testing.assert_close(each, F.linear(x, model.weight, model.bias), rtol=1e-4, atol=1e-4)
    assert model.double()(x.double()).dtype == torch.float64


def test_copies_compute_with_weights_of_their_own_and_nothing_is_left_behind(fast):
    model = nn.Sequential(layer())
    before = [set(vars(module)) for module in model.modules()]
    matmul.install(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin[0].weight.zero_()
            twin[0].bias.zero_()
        assert not twin(torch.ones(1, IN)).any()
    assert model(torch.ones(1, IN)).any()
    matmul.remove(model)
    assert [set(vars(module)) for module in model.modules()] == before


def test_a_layer_with_a_forward_of_its_own_keeps_it(fast):
    model = layer()
    model.forward = lambda x: x
    matmul.install(model)
    x = torch.randn(2, IN)
    assert model(x) is x
    matmul.remove(model)
    assert model(x) is x


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
        {"momentum": 0.9, "maximize": True},
        {"weight_decay": 0.01},
    ],
)
def test_factors_enter_the_optimizer_as_the_gradient_would(fast, options):
    torch.manual_seed(0)
    one, other = (nn.Parameter(torch.ones(OUT, IN)) for _ in range(2))
    by_factors, plain = (torch.optim.SGD([p], lr=0.1, **options) for p in (one, other))
    for _ in range(3):
        left, right = torch.randn(ROWS, OUT), torch.randn(ROWS, IN)
        other.grad = 0.5 * left.T @ right
        plain.step()
        finish([], [Factored(one, left, right)], by_factors, UpdateRule(0.5), lambda total: total)
    torch.testing.assert_close(one.data, other.data, rtol=1e-4, atol=1e-4)


@of_cpus
@needs_onednn
@pytest.mark.parametrize("fast", [True], indirect=True)
def test_a_row_does_not_depend_on_the_rows_beside_it(fast):
    """Processes update slices of their own, and all nodes must come to the same bits. The BLAS does not promise it."""
    torch.manual_seed(0)
    left, right = torch.randn(64, OUT), torch.randn(64, IN)
    found = []
    for cuts in ([OUT], [OUT // 2] * 2, [300, 724], [3, 1021]):
        weight = torch.ones(OUT, IN)
        starts = [sum(cuts[:i]) for i in range(len(cuts))]
        for start, length in zip(starts, cuts, strict=True):
            part = nn.Parameter(weight[start : start + length])
            optimizer = torch.optim.SGD([part], lr=0.1, momentum=0.9)
            for _ in range(2):
                finish(
                    [],
                    [Factored(part, left[:, start : start + length], right)],
                    optimizer,
                    UpdateRule(1.0),
                    lambda t: t,
                )
        found.append(weight)
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_training_by_it_is_training(fast):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, 3))
    twin = copy.deepcopy(model)
    x, y = torch.randn(ROWS, IN), torch.arange(ROWS) % 3
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=ROWS, engine="sequential") as pace:
        for _ in range(4):
            pace.step((x, y))
            plain.zero_grad()
            F.cross_entropy(twin(x), y).backward()
            plain.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_word_that_is_not_known_is_told(monkeypatch):
    monkeypatch.setenv("PACELINE_MATMUL", "mkl")
    matmul.fast.cache_clear()
    with pytest.raises(ValueError, match=r"PACELINE_MATMUL='mkl'.*'blas' or 'onednn'"):
        matmul.install(nn.Linear(1, 1))
    matmul.fast.cache_clear()
