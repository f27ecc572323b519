"""LARS follows its equation, is invariant to the gradient's scale, and equals SGD for parameters without layers."""

import copy

import pytest
import torch
from torch import nn

from paceline.train.lars import LARS


def parameter(*shape, seed=0, dtype=torch.float64):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def gradient(p, seed):
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64).to(p.dtype)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3, 3), (1, 1)])
def test_three_steps_in_closed_form(shape, decay, momentum):
    lr, trust, eps = 2.0, 0.01, 1e-3
    p = parameter(*shape)
    w, buffer = p.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    optimizer = LARS([p], lr, momentum, decay, trust, eps)
    for step in range(3):
        p.grad = g = gradient(p, step)
        kept = g.clone()
        optimizer.step()
        local = trust * w.norm() / (g.norm() + decay * w.norm() + eps)
        buffer = momentum * buffer + local * (g + decay * w)
        w = w - lr * buffer
        torch.testing.assert_close(p.detach(), w, rtol=1e-13, atol=1e-15)
        assert torch.equal(g, kept), "the gradient is the caller's"
    assert bool(optimizer.state) == bool(momentum)


@pytest.mark.parametrize("scale", [1e-6, 0.5, 3.0, 1e6])
def test_a_layers_update_ignores_the_size_of_its_gradient(scale):
    one, two, fixed = parameter(6, 4), parameter(6, 4), parameter(6, 4)
    optimizer = LARS([one, two, fixed], lr=1.0, weight_decay=0.0, eps=0.0)
    for step in range(3):
        one.grad, two.grad, fixed.grad = gradient(one, step), gradient(one, step) * scale, gradient(one, 7)
        optimizer.step()
    torch.testing.assert_close(one, two, rtol=1e-12, atol=0)
    assert not torch.allclose(one, fixed), "the direction still counts"


def test_each_layer_has_a_trust_of_its_own():
    # |update| = lr * trust * |w| for every layer, however different the gradients
    layers = [parameter(5, 5, seed=seed) for seed in range(3)]
    before = [p.detach().clone() for p in layers]
    for index, p in enumerate(layers):
        p.grad = gradient(p, index) * 10.0**index
    LARS(layers, lr=0.5, momentum=0.0, weight_decay=0.0, trust=0.02, eps=0.0).step()
    for p, w in zip(layers, before, strict=True):
        torch.testing.assert_close((p.detach() - w).norm(), 0.5 * 0.02 * w.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_layers_it_is_sgd_bit_by_bit_under_a_changing_rate(momentum):
    parameters = [parameter(7, seed=1, dtype=torch.float32), parameter(seed=2, dtype=torch.float32)]
    plain = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizers = LARS(parameters, 0.3, momentum, weight_decay=0.5), torch.optim.SGD(plain, 0.3, momentum)
    for step in range(5):
        for p, q in zip(parameters, plain, strict=True):
            p.grad, q.grad = gradient(p, step), gradient(p, step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.3 / (step + 1)
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(parameters, plain, strict=True))


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize(("zero_weight", "zero_gradient"), [(True, False), (False, True), (True, True)])
def test_a_norm_of_zero_means_a_trust_of_one(zero_weight, zero_gradient, eps):
    p = parameter(3, 4)
    if zero_weight:
        nn.init.zeros_(p)
    w = p.detach().clone()
    p.grad = torch.zeros_like(p) if zero_gradient else gradient(p, 0)
    LARS([p], lr=0.5, weight_decay=0.1, eps=eps).step()
    torch.testing.assert_close(p.detach(), w - 0.5 * (p.grad + 0.1 * w), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_beyond_sixteen_bits_are_safe(dtype):
    # 256 * 256 values of 300: both norms, 76,800, are beyond float16
    p, exact = (nn.Parameter(torch.full((256, 256), 300.0, dtype=d)) for d in (dtype, torch.float64))
    for q in (p, exact):
        q.grad = torch.full_like(q, 300.0)
        LARS([q], lr=1.0, trust=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(p.detach().double(), exact.detach(), rtol=0.01, atol=0)


def test_a_parameter_without_gradient_stays_and_keeps_no_state():
    used, unused = parameter(2, 2), parameter(2, 2)
    before = unused.detach().clone()
    optimizer = LARS([used, unused], lr=1.0)
    used.grad = gradient(used, 0)
    optimizer.step()
    assert torch.equal(unused, before)
    assert list(optimizer.state) == [used]


def test_types_and_groups_may_be_mixed():
    def build():
        return [parameter(3, 3), parameter(3, 3, seed=1, dtype=torch.float32), parameter(3, seed=2)]

    def step(optimizer):
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = gradient(p, index)
        optimizer.step()

    together, apart = build(), build()
    step(LARS([{"params": together[:1], "lr": 2.0}, {"params": together[1:], "weight_decay": 0.0}], lr=1.0))
    for index, (p, options) in enumerate(
        zip(apart, [{"lr": 2.0}] + [{"lr": 1.0, "weight_decay": 0.0}] * 2, strict=True)
    ):
        p.grad = gradient(p, index)
        LARS([p], **options).step()
    assert all(torch.equal(p, q) for p, q in zip(together, apart, strict=True))


def test_resumes_bit_by_bit():
    p, q = parameter(4, 4), parameter(4, 4)
    optimizer = LARS([p], lr=1.0)
    for step in range(2):
        p.grad = gradient(p, step)
        optimizer.step()
    with torch.no_grad():
        q.copy_(p)
    again = LARS([q], lr=9.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2, 5):
        p.grad, q.grad = gradient(p, step), gradient(p, step)
        optimizer.step()
        again.step()
    assert torch.equal(p, q)


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    p, losses = parameter(3, 2), []
    optimizer = LARS([p], lr=1.0)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        losses.append(loss)
        return loss

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert optimizer.step() is None


def test_what_it_cannot_do_is_told():
    with pytest.raises(ValueError, match=r"lr must be at least 0, got -1.*momentum must be at least 0, got -0.5"):
        LARS([parameter(2, 2)], lr=-1, momentum=-0.5)
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        LARS(table.parameters(), lr=1.0).step()
    assert torch.equal(table.weight, before)


def test_learns_a_linear_map():
    torch.manual_seed(0)
    layer, goal = nn.Linear(8, 4), torch.randn(4, 8)
    x = torch.randn(64, 8)
    optimizer = LARS(layer.parameters(), lr=1.0, trust=0.02, weight_decay=0.0)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (layer(x) - x @ goal.T).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
