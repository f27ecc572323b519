"""Models that make data. What they draw comes with each sample: the noise of a process is its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.utils.data import TensorDataset

from zoo.case import ROWS, Parts, family, images, numbers
from zoo.layers import mlp

case = family("generative")


class VAE(nn.Module):
    def __init__(self, own: bool = False):
        super().__init__()
        self.encode, self.decode, self.own = mlp(12, 32, 8), mlp(4, 32, 12), own

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        noise = torch.randn_like(mean) if self.own else noise
        return self.decode(mean + (0.5 * log).exp() * noise), mean, log


def elbo(output: tuple[Tensor, ...], target: Tensor) -> dict[str, Tensor]:
    made, mean, log = output
    divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
    return {"made": F.mse_loss(made, target), "divergence": 0.1 * divergence}


@case(Adam, lr=0.01)
def vae() -> Parts:
    x = numbers(12)
    return VAE(), TensorDataset(x, numbers(4, seed=8), x), elbo


@case(Adam, lr=0.01, differs="random")
def vae_own_noise() -> Parts:
    """As it is usually written: each process draws noise of its own."""
    x = numbers(12)
    return VAE(True), TensorDataset(x, numbers(4, seed=8), x), elbo


class Codebook(nn.Module):
    """The nearest of some vectors, which follow what comes to them by moving averages, or by a loss."""

    def __init__(self, moves: bool):
        super().__init__()
        self.encode, self.decode, self.moves = mlp(12, 16, 6), mlp(6, 16, 12), moves
        codes = torch.randn(8, 6) / 2
        if moves:
            self.register_buffer("codes", codes)
            self.register_buffer("size", torch.ones(8))
            self.register_buffer("total", codes.clone())
        else:
            self.codes = nn.Parameter(codes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        which = torch.cdist(z, self.codes).argmin(1)
        code = self.codes[which]
        loss = 0.25 * F.mse_loss(z, code.detach())
        if not self.moves:
            loss = loss + F.mse_loss(code, z.detach())
        elif self.training:
            hot = F.one_hot(which, 8).to(z.dtype)
            self.size.mul_(0.9).add_(0.1 * hot.sum(0))
            self.total.mul_(0.9).add_(0.1 * hot.T @ z.detach())
            self.codes.copy_(self.total / self.size[:, None])
        return self.decode(z + (code - z).detach()), loss


def vq(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + output[1]


@case(Adam, lr=0.01)
def vq_vae() -> Parts:
    x = numbers(12)
    return Codebook(False), TensorDataset(x, x), vq


@case(Adam, lr=0.01, differs="buffer|forward changes")
def vq_vae_moving() -> Parts:
    x = numbers(12)
    return Codebook(True), TensorDataset(x, x), vq


@case(Adam, lr=0.005, betas=(0.5, 0.9))
def gan(optimizer: Any, join: Any) -> Any:
    generator, critic = mlp(4, 32, 12), mlp(12, 32, 1)
    data, losses = TensorDataset(numbers(12), numbers(4, seed=8)), []
    with (
        join(generator, optimizer(generator.parameters()), batch_size=ROWS) as makes,
        join(critic, optimizer(critic.parameters()), batch_size=ROWS) as judges,
    ):
        for batch in judges.batches(data, 2, shuffle=False):
            rows = judges.rows(batch)
            if rows is not None:
                judges.backward(F.softplus(-critic(rows[0])).mean())
                judges.backward(F.softplus(critic(generator(rows[1]).detach())).mean())
            losses.append(judges.update())
            rows = makes.rows(batch)
            if rows is not None:
                makes.backward(F.softplus(-critic(generator(rows[1]))).mean())
            losses.append(makes.update())
    return [generator, critic], losses


@case(RMSprop, lr=0.001)
def wgan_penalty(optimizer: Any, join: Any) -> Any:
    """The critic's gradient has a norm, of which there is a gradient."""
    generator, critic = mlp(4, 32, 12), mlp(12, 32, 1, act=nn.SiLU)
    data, losses = TensorDataset(numbers(12), numbers(4, seed=8), numbers(1, seed=9).sigmoid()), []
    with (
        join(generator, optimizer(generator.parameters()), batch_size=ROWS) as makes,
        join(critic, optimizer(critic.parameters()), batch_size=ROWS) as judges,
    ):
        for batch in judges.batches(data, 2, shuffle=False):
            rows = judges.rows(batch)
            if rows is not None:
                real, noise, mix = rows
                false = generator(noise).detach()
                between = (mix * real + (1 - mix) * false).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).square().mean()
                judges.backward(critic(false).mean() - critic(real).mean() + 10 * penalty)
            judges.clip(1.0)
            losses.append(judges.update())
            rows = makes.rows(batch)
            if rows is not None:
                makes.backward(-critic(generator(rows[1])).mean())
            losses.append(makes.update())
    return [generator, critic], losses


class Flow(nn.Module):
    """Affine couplings, after a normalization that its first batch sets."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(4, 16, 8, act=nn.Tanh) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x, log = torch.cat([b * scale.exp() + shift, a], 1), log + scale.sum(1)
        return x, log


def likelihood(output: tuple[Tensor, Tensor], _: Any) -> Tensor:
    z, log = output
    return (0.5 * z.square().sum(1) - log).mean()


@case(Adam, lr=0.005)
def normalizing_flow() -> Parts:
    return Flow(), numbers_alone(8), likelihood


def numbers_alone(columns: int) -> Any:
    """Samples without a target."""

    class Rows:
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, i: int) -> Tensor:
            return x[i]

    x = numbers(columns)
    return Rows()


class UNet(nn.Module):
    """Noise out of images, at a time between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()

        def block(wide: int, narrow: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(wide, narrow, 3, padding=1), nn.GroupNorm(2, narrow), nn.SiLU())

        self.time = mlp(1, 16, 16)
        self.down, self.deep, self.up = block(1, 8), block(8, 16), block(16, 8)
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        high = self.down(x)
        low = self.deep(F.max_pool2d(high, 2)) + self.time(t)[:, :, None, None]
        return self.last(torch.cat([high, F.interpolate(self.up(low), scale_factor=2, mode="bilinear")], 1))


@case(AdamW, lr=0.003, join={"clip": 1.0})
def diffusion() -> Parts:
    clean, noise, t = numbers(1, 8, 8), numbers(1, 8, 8, seed=8), numbers(1, seed=9).sigmoid()
    seen = (1 - t[..., None, None]).sqrt() * clean + t[..., None, None].sqrt() * noise
    return UNet(), TensorDataset(seen, t, noise), F.mse_loss


class Made(nn.Module):
    """Each column from those before it, by masks over weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 6)
        order = torch.arange(24) % 5
        self.register_buffer("low", (order[:, None] >= torch.arange(6)).to(torch.get_default_dtype()))
        self.register_buffer("high", (torch.arange(6)[:, None] > order).to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.first.weight * self.low, self.first.bias))
        return F.linear(h, self.last.weight * self.high, self.last.bias)


@case(SGD, lr=0.1, momentum=0.9, maximize=False)
def made() -> Parts:
    x = (numbers(6) > 0).to(torch.get_default_dtype())
    return Made(), TensorDataset(x, x), F.binary_cross_entropy_with_logits


@case(Adam, lr=0.005)
def convolutional_autoencoder() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
    )  # fmt: skip
    x = images(8).tensors[0]
    return model, TensorDataset(x, x), nn.SmoothL1Loss()
