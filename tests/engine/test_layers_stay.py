"""A layer or a parameter that takes another's place after join() is an error at the next step, which names it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import paceline
from device import of_cpus
from launching import launch, small


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU()
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.head = nn.Linear(3, 3)
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.head(self.rest(self.act(self.norm(self.first(x))))) * self.still


BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])


def put(where, name, value):
    setattr(where, name, value)


CHANGES = {
    "a layer": (lambda m: m.rest.__setitem__(2, nn.Linear(8, 3)), r"layer \(Linear\) 'rest\.2' was replaced"),
    "one of buffers alone": (
        lambda m: put(m, "norm", nn.BatchNorm1d(8, affine=False)),
        r"layer \(BatchNorm1d\) 'norm' was replaced",
    ),
    "a parameter": (
        lambda m: put(m.first, "weight", nn.Parameter(m.first.weight.detach())),
        r"parameter 'first\.weight' was replaced",
    ),
    "one that does not train": (
        lambda m: put(m, "still", nn.Parameter(2 * m.still.detach(), requires_grad=False)),
        r"parameter 'still' was replaced",
    ),
    "behind torch's back": (
        lambda m: m.first._parameters.update(bias=nn.Parameter(torch.zeros(8))),
        r"parameter 'first\.bias' was replaced",
    ),
    "another shape": (
        lambda m: put(m.first.bias, "data", torch.zeros(1)),
        r"parameter 'first\.bias' has shape \(1,\), and had \(8,\)",
    ),
    "a part of it": (
        lambda m: put(m.first.weight, "data", m.first.weight.data[:1]),
        r"parameter 'first\.weight' has shape \(1, 4\), and had \(8, 4\)",
    ),
    "a new layer": (lambda m: m.rest.append(nn.Linear(3, 3)), r"layer \(Linear\) 'rest\.3' is new"),
    "a new parameter": (
        lambda m: m.head.register_parameter("scale", nn.Parameter(torch.ones(3))),
        r"parameter 'head\.scale' is new",
    ),
    "one layer less": (lambda m: m.rest.__delitem__(2), r"layer \(Linear\) 'rest\.2' was removed"),
    "one parameter less": (lambda m: put(m.head, "bias", None), r"parameter 'head\.bias' was removed"),
    "tied": (
        lambda m: put(m.rest[0], "weight", m.head.weight),
        r"parameter 'rest\.0\.weight' was replaced",
    ),
    "two of them changed": (
        lambda m: put(m.rest, "_modules", {**m.rest._modules, "0": m.rest[2], "2": m.rest[0]}),
        "was replaced",
    ),
    "parametrized": (lambda m: parametrizations.weight_norm(m.head), r"parameter 'head\.\w+.* is new"),
}


@pytest.mark.parametrize("engine", ["sequential", "replicas:2"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_replaced_after_joining_is_told_by_name(what, engine):
    """Story: model[2] = nn.Linear(...) after join(): each node kept its own random layer to the end."""
    change, said = CHANGES[what]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=6, engine=engine) as pace:
        pace.step(BATCH)
        change(model)
        with pytest.raises(ValueError, match=f"the model was changed after join.*{said}.*before join"):
            pace.step(BATCH)


def test_a_layer_that_the_first_forward_pass_makes_is_told():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), None

        def forward(self, x):
            self.last = self.last or nn.Linear(8, 3)
            return self.last(self.first(x))

    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=6, engine="sequential") as pace:
        pace.step(BATCH)
        with pytest.raises(ValueError, match=r"layer \(Linear\) 'last' is new"):
            pace.step(BATCH)


def test_in_a_loop_of_ones_own_too():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, batch_size=6, engine="sequential") as pace:
        model.head = nn.Linear(3, 3)
        pace.backward(F.cross_entropy(model(BATCH[0]), BATCH[1]), rows=6)
        with pytest.raises(ValueError, match=r"layer \(Linear\) 'head' was replaced"):
            pace.update()


UNCHANGED = {
    "other values": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "other memory": lambda m: put(m.first.weight, "data", m.first.weight.detach().clone()),
    "another activation": lambda m: put(m, "act", nn.GELU()),
    "a layer that holds nothing": lambda m: m.rest.append(nn.Dropout(0.0)),
    "pruned": lambda m: prune.l1_unstructured(m.head, "weight", amount=2),
    "another mode": lambda m: m.eval(),
    "frozen": lambda m: m.first.requires_grad_(False),
    "hooked": lambda m: m.first.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_what_keeps_every_parameter_trains_on(what):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=6, engine="sequential") as pace:
        pace.step(BATCH)
        UNCHANGED[what](model)
        before = model.rest[0].weight.detach().clone()
        pace.step(BATCH)
        pace.step(BATCH)
        assert not torch.equal(model.rest[0].weight, before)


def test_after_closing_a_changed_model_may_join_again():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=6, engine="sequential") as pace:
        pace.step(BATCH)
    model.head = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=6, engine="sequential") as pace:
        pace.step(BATCH)


def join(model, **words):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return paceline.join(model, optimizer, F.cross_entropy, **{"batch_size": 6, "engine": "sequential", **words})


@of_cpus
@pytest.mark.parametrize("engine", ["sequential", "threads:2", "replicas:2"])
def test_a_model_is_trained_by_one_join_at_a_time(engine):
    """Story: under processes:2 the first one's memory was replaced: "was given other memory"."""
    model = Net()
    with join(model, engine=engine) as pace:
        for second in (model, nn.Sequential(model, nn.ReLU()), model.rest, nn.parallel.DataParallel(model)):
            with pytest.raises(
                ValueError, match=r"^join: parameter '[\w.]+' is trained by another join.*close that first"
            ):
                join(second)
        with join(Net()) as other:  # as a generator and a discriminator are
            other.step(BATCH)
        pace.step(BATCH)
    with join(model, engine=engine) as pace:
        pace.step(BATCH)


def test_after_an_error_in_its_block_a_model_may_join_again():
    model = Net()
    with pytest.raises(RuntimeError, match="of the user's"), join(model):
        raise RuntimeError("of the user's")
    with join(model) as pace:
        pace.step(BATCH)


def test_between_processes_a_model_is_trained_by_one_join_at_a_time_and_again_after_it(tmp_path):
    body = (
        "    import pytest",
        "    with pytest.raises(ValueError, match='trained by another join'):",
        "        paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8)",
        "    batch = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)",
        "    losses = [pace.step(batch) for _ in range(2)]",
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
        "with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8) as pace:",
        "    losses += [pace.step(batch) for _ in range(2)]",
        "assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4, losses",
    )
    script = small(tmp_path)
    script.write_text("\n".join([script.read_text().rstrip(), *body, ""]))
    launch(str(script), engine="processes:2")
