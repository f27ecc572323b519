"""The networks have the documented shapes, and the small one learns."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline import registry
from paceline.data import sample
from paceline.train.models import alexnet, resnet50v2, resnet101v2, resnet152v2, small, vgg16

RESIDUAL = {
    resnet50v2: ((3, 4, 6, 3), 25_613_800),
    resnet101v2: ((3, 4, 23, 3), 44_675_560),
    resnet152v2: ((3, 8, 36, 3), 60_380_648),
}


@pytest.fixture(autouse=True)
def _random_state_is_kept():
    with torch.random.fork_rng():
        yield


def test_alexnet_has_the_parameters_of_the_published_network() -> None:
    with torch.device("meta"):
        network = alexnet.build(3)
    # kernel area * channels in * channels out + channels out, layer by layer
    convolutions = [(11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 256), (3, 256, 256)]
    linears = [(256 * 6 * 6, 4096), (4096, 4096), (4096, 3)]
    expected = sum(k * k * i * o + o for k, i, o in convolutions) + sum(i * o + o for i, o in linears)
    assert expected == 57_016_131
    assert sum(parameter.numel() for parameter in network.parameters()) == expected


def test_alexnet_weights_are_named_as_torchvisions() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in alexnet.build(1000).state_dict().items()}
    layers = [f"features.{i}" for i in (0, 3, 6, 8, 10)] + [f"classifier.{i}" for i in (1, 4, 6)]
    assert list(shapes) == [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    assert shapes["features.0.weight"] == (64, 3, 11, 11)
    assert shapes["classifier.1.weight"] == (4096, 9216)
    assert shapes["classifier.6.bias"] == (1000,)


@pytest.mark.parametrize("name", registry.names("models"))
def test_input_shape_gives_one_logit_per_class(name) -> None:
    model = registry.module("models", name)
    with torch.device("meta"):
        assert model.build(5)(torch.empty(2, *model.INPUT)).shape == (2, 5)


@pytest.mark.parametrize("name", registry.names("models"))
def test_a_model_says_how_it_is_trained(name) -> None:
    model = registry.module("models", name)
    assert 0 < model.LEARNING_RATE < 1
    assert 0 <= model.MOMENTUM < 1
    assert model.BATCH_SIZE >= 1
    assert model.EPOCHS >= 1


def test_vgg16_has_the_parameters_of_the_published_network() -> None:
    with torch.device("meta"):
        network = vgg16.build(1000)
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    linears = [(512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)]
    expected = sum(9 * i * o + o for i, o in pairwise(widths))
    expected += sum(i * o + o for i, o in linears)
    assert expected == 138_357_544
    assert sum(parameter.numel() for parameter in network.parameters()) == expected


def test_vgg16_weights_are_named_as_torchvisions() -> None:
    with torch.device("meta"):
        network = vgg16.build(1000)
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        halfway = network.features[:19](torch.empty(1, 3, 224, 224))
    convolutions = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    layers = [f"features.{i}" for i in convolutions] + [f"classifier.{i}" for i in (0, 3, 6)]
    assert list(shapes) == [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    assert shapes["classifier.0.weight"] == (4096, 25_088)
    assert halfway.shape == (1, 512, 28, 28), "after the eighth convolution"


@pytest.mark.dear
def test_vgg16_begins_undecided_and_learns() -> None:
    torch.manual_seed(0)
    network, labels = vgg16.build(10).eval(), torch.tensor([3, 7])  # eval: without dropout
    losses = train(network, torch.randn(2, 3, 64, 64), labels, num_steps=3, lr=0.003)
    assert losses[0] == pytest.approx(math.log(10), abs=0.1)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("model", RESIDUAL, ids=lambda model: model.__name__)
def test_residual_networks_have_kerass_parameters_and_shapes(model) -> None:
    depths, expected = RESIDUAL[model]
    with torch.device("meta"):
        network, x, shapes = model.build(1000), torch.empty(1, 3, 224, 224), []
        for layer in network:
            x = layer(x)
            shapes.append(tuple(x.shape[1:]))
    # moving means and variances count for Keras, the number of batches seen is torch's alone
    counted = {k: v for k, v in network.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert sum(value.numel() for value in counted.values()) == expected
    stages = network.conv2, network.conv3, network.conv4, network.conv5
    assert tuple(len(stage) for stage in stages) == depths
    # conv1, pool1, then four stages: all but the fourth halve the image, in their last block
    assert shapes[:2] == [(64, 112, 112), (64, 56, 56)]
    assert shapes[2:6] == [(256, 28, 28), (512, 14, 14), (1024, 7, 7), (2048, 7, 7)]
    for stage in stages:
        halves = [tuple(block.residual[3].stride) == (2, 2) for block in stage]
        assert halves == [False] * (len(stage) - 1) + [stage is not network.conv5]
        assert [isinstance(block.shortcut, nn.Conv2d) for block in stage] == [True] + [False] * (len(stage) - 1)


def test_residual_layers_are_set_as_kerass() -> None:
    with torch.device("meta"):
        network = resnet50v2.build(1000)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1.001e-5, 0.01)}
    biased = {
        name for name, module in network.named_modules() if isinstance(module, nn.Conv2d) and module.bias is not None
    }
    blocks = [
        f"conv{stage}.{index}"
        for stage, depth in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True)
        for index in range(depth)
    ]
    first = [f"conv{stage}.0.shortcut" for stage in (2, 3, 4, 5)]
    assert biased == {"conv1", *first, *(f"{block}.residual.6" for block in blocks)}


def test_the_first_pool_has_a_border_of_zeros() -> None:
    with torch.device("meta"):
        pool = resnet50v2.build(3).pool1
    pooled = pool(torch.full((1, 1, 6, 6), -1.0))
    # zeros above and to the left; the pool does not reach the border below and to the right
    assert pooled[0, 0].tolist() == [[0, 0, 0], [0, -1, -1], [0, -1, -1]]


def test_without_its_branch_a_block_hands_on_its_input_or_every_second_pixel_of_it() -> None:
    stage, x = resnet50v2.build(3).conv2, torch.randn(2, 256, 6, 6)
    for block, expected in ((stage[1], x), (stage[2], x[:, :, ::2, ::2])):
        nn.init.zeros_(block.residual[6].weight)
        assert torch.equal(block(x), expected)


def test_a_block_normalises_before_it_convolves() -> None:
    # scale and shift of a block's input do not reach its branch
    block, x = resnet50v2.build(3).conv2[0], torch.randn(4, 64, 8, 8, dtype=torch.float64)
    block.double()
    torch.testing.assert_close(block(x), block(1000 * x + 5), rtol=0, atol=1e-4)


def test_a_residual_network_begins_nearly_undecided_and_learns() -> None:
    torch.manual_seed(0)
    network, labels = resnet50v2.build(10), torch.tensor([3, 7, 1, 0])
    options = {"lr": resnet50v2.LEARNING_RATE, "momentum": resnet50v2.MOMENTUM}
    losses = train(network, torch.randn(4, 3, 64, 64), labels, num_steps=4, **options)
    assert losses[0] == pytest.approx(math.log(10), abs=0.5)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("model", [alexnet, resnet50v2, small], ids=lambda model: model.__name__)
def test_the_seed_decides_the_weights(model) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(model.build(3).state_dict())
    first, same, other = states
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def train(network, images, labels, num_steps, **options) -> list[float]:
    """Losses before each step and after the last one; every parameter must get a gradient."""
    optimizer, losses = torch.optim.SGD(network.parameters(), **options), []
    for step in range(num_steps + 1):
        loss = functional.cross_entropy(network(images), labels)
        losses.append(loss.item())
        if step < num_steps:
            optimizer.zero_grad()
            loss.backward()
            assert all(parameter.grad.any() for parameter in network.parameters())
            optimizer.step()
    return losses


def test_small_has_a_layer_worth_compressing() -> None:
    linears = [module for module in small.build(3).modules() if isinstance(module, torch.nn.Linear)]
    assert max(linear.weight.numel() for linear in linears) >= 65_536


def test_small_learns_the_sample() -> None:
    train, test = sample.load()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = small.build(len(train.classes))
            optimizer = torch.optim.SGD(network.parameters(), small.LEARNING_RATE, small.MOMENTUM)
            for epoch in range(3):
                for indices in torch.randperm(len(train)).split(small.BATCH_SIZE):
                    images, labels = train.fetch(indices.tolist(), epoch)
                    optimizer.zero_grad()
                    functional.cross_entropy(network(images), labels).backward()
                    optimizer.step()
        images, labels = test.fetch(range(len(test)), 0)
        with torch.no_grad():
            correct = (network(images).argmax(1) == labels).sum().item()
    finally:
        torch.set_num_threads(threads)
    assert correct / len(test) >= 0.95
