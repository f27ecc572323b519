"""The networks have the shapes they claim, and the small one learns."""

import pytest
import torch
from torch.nn import functional

from paceline.data import sample
from paceline.models import alexnet, small


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


@pytest.mark.parametrize("model", [alexnet, small])
def test_input_shape_gives_one_logit_per_class(model) -> None:
    with torch.device("meta"):
        assert model.build(5)(torch.empty(2, *model.INPUT)).shape == (2, 5)


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
