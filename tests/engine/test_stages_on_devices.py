"""Stages with a device each: sequential with as many micro-batches, and each device has its stage's memory only."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import ranks
from device import DEVICE
from launching import launch
from nodes import HIDDEN, IN, OPTIMIZERS, OUT, Conv, Normed, Plain, Rank, build, reference, rows
from paceline.engine import pipeline, sequential
from paceline.engine.stages import devices
from paceline.registry import find
from two_devices import ASKED, PLACES, on

BATCH = 24
DATA = [rows(BATCH, seed) for seed in range(5)]
DENSE, FACTORS = "allreduce:forms=dense", "allreduce:forms=factors"
GAP = 0 if DEVICE.type == "cpu" else 1e-11


def train(engine, model, data, optimizer="momentum", size=1, accumulate=1, clip=None, exchange=DENSE):
    def work(link):
        made = engine()
        made.accumulate = accumulate
        rank = Rank(link, model, OPTIMIZERS[optimizer], engine=made, clip=clip, batch=BATCH, exchange=exchange)
        torch.set_num_threads(1)
        losses = rank.train(data)
        made.close()
        return rank, {name: value.cpu() for name, value in rank.state().items()}, losses

    return ranks.run(size, work)


def gap(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in other)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("cut", ["", "second", "head"])
@pytest.mark.parametrize(
    ("optimizer", "size", "exchange", "clip"),
    [
        ("adamw", 1, DENSE, None),
        ("momentum", 2, DENSE, 0.05),
        ("momentum", 2, FACTORS, None),
        ("adamw", 2, "server", None),
        ("momentum", 2, "diloco:2", None),
    ],
)
def test_equals_sequential_on_one_device(schedule, cut, optimizer, size, exchange, clip):
    words = {"optimizer": optimizer, "size": size, "exchange": exchange, "clip": clip}
    want = train(sequential.Engine, on(build()), DATA, accumulate=4, **words)
    found = train(lambda: pipeline.Engine(2, 4, schedule, cut, ASKED), on(build()), DATA, **words)
    for (_, state, losses), (_, its, its_losses) in zip(want, found, strict=True):
        assert gap(state, its) <= GAP
        assert losses == pytest.approx(its_losses, rel=GAP, abs=0)


def held(rank):
    """Where each weight lies, its gradient, and what the optimizer holds of it."""
    for name, weight in rank.model.named_parameters():
        moments = [each for each in rank.optimizer.state[weight].values() if each.dim()]
        assert len(moments) == 2
        grads = [] if weight.grad is None else [weight.grad]
        yield name, {each.device for each in (weight, *grads, *moments)}


def test_each_device_has_its_stages_weights_gradients_and_state_only_until_the_end():
    made = pipeline.Engine(2, 4, cut="second", devices=ASKED)
    (rank,) = ranks.run(1, lambda link: Rank(link, on(build()), OPTIMIZERS["adamw"], engine=made, batch=BATCH))
    rank.train(DATA)
    assert all(weight.grad is not None for weight in rank.model.parameters())
    for name, places in held(rank):
        assert places == {PLACES[not name.startswith("first")]}
    made.close()
    assert all(places == {PLACES[0]} for _, places in held(rank))
    assert rank.model(DATA[0][0].to(PLACES[0])).device == PLACES[0]


def test_a_device_too_small_for_all_of_it_leaves_the_model_where_it_is(monkeypatch, caplog):
    made = pipeline.Engine(2, 4, cut="second", devices=ASKED)
    (rank,) = ranks.run(1, lambda link: Rank(link, on(build()), OPTIMIZERS["adamw"], engine=made, batch=BATCH))
    rank.train(DATA)

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(devices, "_move", full)
    made.close()
    assert [places for _, places in held(rank)][-1] == {PLACES[1]}
    assert "has not enough memory for the whole model, which stays on several devices" in caplog.text


@pytest.mark.dear
def test_a_node_with_stages_and_one_without_train_together_and_exchange_their_parts(tmp_path):
    """Over gloo, with each way of sending; and from a checkpoint of the middle, with the nodes' parts exchanged."""
    launch("staged.py", tmp_path, engine="sequential", num_nodes=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    wanted, _ = reference(build(), [rows(BATCH, seed) for seed in range(6)], OPTIMIZERS["adamw"], 0.05)
    for kind, state in one.items():
        assert all(torch.equal(state[name], other[kind][name]) for name in state), kind
        if "diloco" in kind or "lowrank" in kind:  # whose parts are other ones after the exchange: other last bits
            assert gap(state, one[kind.removesuffix(" again")]) < 1e-11, kind
        else:
            assert gap(state, wanted) < 1e-11, kind


class Block(nn.Module):
    """A residual: what it computes inside is no place for a cut."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x, scale, beside):
        return x + self.fc(self.norm(x)) * scale["of"] + beside.mean(1, keepdim=True)


class Blocks(nn.Module):
    """Blocks that are all passed tensors of the first device, in which a child is never called."""

    def __init__(self):
        super().__init__()
        self.embed, self.shift = nn.Linear(IN, HIDDEN), nn.Parameter(torch.zeros(HIDDEN))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.attention, self.head = nn.MultiheadAttention(HIDDEN, 4, batch_first=True), nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        h = self.embed(x) + self.shift
        scale = {"of": x.abs().mean(1, keepdim=True)}
        for block in self.blocks:
            h = block(h, scale, beside=x)
        h = h.view(len(h), 4, -1).repeat(1, 1, 4)
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


def test_what_every_block_is_passed_follows_it():
    want = train(sequential.Engine, on(build(Blocks)), DATA, accumulate=4)
    made = pipeline.Engine(3, 4, cut="blocks.1;attention", devices=";".join(map(str, [*PLACES, PLACES[0]])))
    found = train(lambda: made, on(build(Blocks)), DATA)
    assert gap(want[0][1], found[0][1]) <= GAP
    assert "its weights lie" in made.hint
    assert f"% on {PLACES[1]}" in made.hint


def test_buffers_and_dropout_are_those_of_the_stage():
    made = pipeline.Engine(2, 4, cut="fc", devices=ASKED)
    (rank,) = ranks.run(1, lambda link: Rank(link, on(build(Conv)), engine=made, batch=BATCH))
    rank.train(DATA)
    made.close()
    assert {each.device for each in rank.model.norm.buffers()} == {PLACES[0]}
    assert rank.model.norm.num_batches_tracked == 4 * len(DATA)
    want = train(sequential.Engine, on(build(Normed)), DATA, accumulate=4)
    found = train(lambda: pipeline.Engine(2, 4, devices=ASKED), on(build(Normed)), DATA)
    assert gap(want[0][1], found[0][1]) <= GAP


class Around(Plain):
    def forward(self, x):
        h = F.relu(self.first(x))
        return self.head(F.relu(self.second(h)) + h)


def test_tensors_of_two_devices_that_meet_outside_of_a_layer_are_told_with_what_to_do():
    if len(set(PLACES)) == 1:
        pytest.skip("one GPU, on which all stages lie")
    with pytest.raises(ValueError, match=r"tensors of two stages outside of a layer.*Cut it elsewhere than at second"):
        train(lambda: pipeline.Engine(2, 4, cut="second", devices=ASKED), on(build(Around)), DATA)


def test_what_the_optimizer_has_from_before_moves_with_its_weight():
    """Of a fused one its count of steps, too, which others keep on the CPU."""
    weights = [nn.Parameter(torch.ones(3).to(PLACES[0])) for _ in range(2)]
    one, other = (torch.optim.Adam([weight]) for weight in weights)
    for weight, optimizer, place in zip(weights, (one, other), ("cpu", PLACES[0]), strict=True):
        optimizer.state[weight] = {"step": torch.ones(()).to(place), "exp_avg": torch.ones(3).to(PLACES[0])}
        optimizer.param_groups[0]["fused"] = optimizer is other
        devices._move(weight, PLACES[1], optimizer)
        assert weight.device == optimizer.state[weight]["exp_avg"].device == PLACES[1]
    assert one.state[weights[0]]["step"].device.index is None
    assert other.state[weights[1]]["step"].device == PLACES[1]


def test_a_weight_of_two_stages_is_refused_by_name_before_anything_moves():
    model = on(build())
    model.again = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    model.again.weight = model.first.weight
    with pytest.raises(ValueError, match=r"parameter 'weight' of a Linear is used by stages 0 and 1 .*cut the model"):
        pipeline.Engine(2, 4, cut="second", devices=ASKED).open(model, torch.optim.SGD(model.parameters()), None)
    assert model.second.weight.device == PLACES[0]


GPUS = [torch.device("cuda", index) for index in range(4)]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "own", "num_stages", "found"),
    [
        ([], CPU, 2, []),
        ([], GPUS[0], 2, GPUS[:2]),
        ([], GPUS[1], 3, GPUS[1:]),
        (["cuda:3", "cuda:0"], CPU, 2, [GPUS[3], GPUS[0]]),
        (["cuda:0", "cuda:0"], GPUS[2], 2, [GPUS[0], GPUS[0]]),
    ],
)
def test_which_device_each_stage_has(asked, own, num_stages, found):
    assert devices.chosen(asked, own, num_stages, num_gpus=4) == found


@pytest.mark.parametrize(
    ("asked", "own", "said"),
    [
        ([], GPUS[3], r"the model lies on cuda:3, of 4 GPUs that this process sees; use fewer stages, name the device"),
        ([], torch.device("meta"), "the model lies on meta"),
        (["cuda:0"], CPU, "a pipeline of 2 stages needs a device each, got devices='cuda:0'"),
        (["cuda:0", "cuda:4"], CPU, r"devices='cuda:0;cuda:4', and this process sees 4 GPUs"),
        (["gpu:0", "gpu:1"], CPU, "devices='gpu:0;gpu:1': Expected one of cpu, cuda"),
    ],
)
def test_devices_that_cannot_be_are_refused(asked, own, said):
    with pytest.raises(ValueError, match=said):
        devices.chosen(asked, own, 2, num_gpus=4)


def _parts(model):
    """Layers of these models, and their blocks."""
    for child in model.children():
        yield from child.children() if isinstance(child, nn.Sequential) else (child,)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50v2"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_even_cuts_divide_the_weights_and_cut_no_block(name, num_stages):
    with torch.device("meta"):
        model = find("models", name, 3)
    cuts = devices.even_cuts(model, num_stages)
    names = [name for name, _ in model.named_modules()]
    assert sorted(cuts, key=names.index) == cuts
    assert len(set(cuts)) == num_stages - 1
    nbytes = [0] * num_stages
    for stage, module, whole in devices.units(model, cuts):
        nbytes[stage] += sum(each.nbytes for each in module.parameters(recurse=whole))
    assert sum(nbytes) == sum(each.nbytes for each in model.parameters())
    parts = [sum(each.nbytes for each in part.parameters()) for part in _parts(model)]
    assert max(nbytes) <= sum(nbytes) / num_stages + max(parts)


def test_a_model_without_a_place_for_a_cut_is_told_to_name_one():
    with pytest.raises(ValueError, match=r"finds 1 places at which Sequential can be cut; .* name the modules by cut="):
        devices.even_cuts(nn.Sequential(nn.Sequential(Block())), 2)


def test_a_script_evaluates_saves_and_goes_on_elsewhere(tmp_path):
    def join(engine, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        words = {"batch_size": BATCH, "accumulate": 1 if "pipeline" in engine else 4}
        return paceline.join(model, optimizer, F.cross_entropy, folder=tmp_path, engine=engine, **words)

    def correct(output, y):
        return (output.argmax(1) == y).sum()

    staged, rest = f"pipeline:2,micros=4,cut=second,devices={ASKED}", f"pipeline:2,micros=4,cut=head,devices={ASKED}"
    model, samples = on(build()), list(zip(*DATA[0], strict=True))
    with join(staged, model) as pace:
        pace.evaluate(samples, correct)
        for batch in DATA[:3]:
            pace.step(batch)
        pace.save()
        losses = [float(pace.step(batch)) for batch in DATA[3:]]
        found = pace.evaluate(samples, correct)
    for engine, again in (("sequential", on(build())), (rest, on(build())), (rest, model), (staged, model)):
        with join(engine, again) as pace:
            assert pace.restore(), engine
            assert [float(pace.step(batch)) for batch in DATA[3:]] == pytest.approx(losses, rel=1e-12)
            assert pace.evaluate(samples, correct) == found
