"""Updates that arrive during the next forward pass change no bit, and nobody ever reads a weight too early."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from device import DEVICE
from nodes import MODELS, OPTIMIZERS, Plain, Rank, Whole, build, gap, reference, rows
from paceline import transport
from paceline.engine.node.optimizer_shards import splits
from paceline.errors import NotFinite
from paceline.exchange.allreduce import Exchange
from paceline.link import memory
from paceline.messages import DENSE

BATCHES = [rows(24, seed) for seed in range(5)]


def rank_of(link, model, overlap="forward", forms="bytes", **options):
    exchange = Exchange(forms)
    exchange.overlap = overlap
    return Rank(link, model, exchange=exchange, **options)


def train(size, model, overlap="forward", batches=BATCHES, schedule=None, forms="bytes", accumulate=1, **options):
    def work(link):
        rank = rank_of(link, model, overlap, forms, **options)
        rank.engine.accumulate = accumulate
        rank.run.job.scheduler = schedule(rank.optimizer) if schedule else None
        losses = rank.train(batches)
        held = len(rank.engine._deferred._pending)
        state, moments = rank.state(), rank.optimizer.state_dict()["state"]
        rank.exchange.close()
        return state, losses, held, moments

    return ranks.run(size, work)


def assert_same(one, other):
    for (state, losses, _, moments), (want, want_losses, _, want_moments) in zip(one, other, strict=True):
        assert losses == want_losses
        assert all(torch.equal(state[name], want[name]) for name in want)
        assert moments.keys() == want_moments.keys()
        for key, values in want_moments.items():
            assert all(
                torch.equal(values[name], moments[key][name]) for name in values if torch.is_tensor(values[name])
            )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_model_and_optimizer_bit_by_bit(kind, optimizer):
    """Tied weights, one used outside its module, a layer called twice, branches that some ranks do not take."""
    model = build(MODELS[kind])
    got = train(2, model, optimizer=OPTIMIZERS[optimizer])
    assert any(held for _, _, held, _ in got), "nothing was left to come after a step: this tests nothing"
    assert_same(got, train(2, model, "backward", optimizer=OPTIMIZERS[optimizer]))
    want, _ = reference(model, BATCHES, OPTIMIZERS[optimizer])
    assert gap(got[0][0], want) < 1e-11


@pytest.mark.parametrize("shares", [(1, 0, 7), (0, 0, 8), (5, 2, 1)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_rows_per_rank_and_micro_batches(shares, accumulate):
    """Also where a rank has no rows, and so no forward pass that would wait for anything."""
    model = build(MODELS["sometimes"])
    options = {"shares": shares, "accumulate": accumulate}
    assert_same(train(3, model, **options), train(3, model, "backward", **options))


def test_a_schedule_moves_after_the_step_whose_gradient_it_does_not_change():
    def halves(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model = build()
    assert_same(train(2, model, schedule=halves), train(2, model, "backward", schedule=halves))


def test_under_autocast():
    class Cast(Plain):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    model = build(Cast, torch.float32)
    batches = [rows(24, seed, torch.float32) for seed in range(4)]
    assert_same(train(2, model, batches=batches), train(2, model, "backward", batches=batches))


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("codec", ["none", "half", "feedback/topk:keep=0.1", "feedback/lowrank:1", "qsgd"])
def test_what_a_codec_remembers_arrives_with_its_piece(codec, kind):
    """Tied weights are sent twice in the first step: what was refused is not remembered."""
    model = build(MODELS[kind])
    assert_same(train(2, model, codec=codec), train(2, model, "backward", codec=codec))


@pytest.mark.parametrize("turn", range(4))
def test_no_order_on_the_wire_changes_a_result(turn):
    """Any permutation, also with pieces laid together."""
    model = build(MODELS["sometimes"])
    dice = torch.Generator().manual_seed(turn)

    def work(link, shuffled):
        rank = rank_of(link, model, "forward" if turn % 2 else "backward", DENSE)
        order = torch.randperm(len(rank.engine.buckets), generator=dice.clone_state()).tolist()
        if shuffled:
            cut = 1 + turn % 3
            rank.exchange.choice.groups = tuple(tuple(order[i : i + cut]) for i in range(0, len(order), cut))
        rank.train(BATCHES)
        state = rank.state()
        rank.exchange.close()
        return state

    want = ranks.run(3, lambda link: work(link, False))
    got = ranks.run(3, lambda link: work(link, True))
    assert all(torch.equal(state[name], want[0][name]) for state in (*got, *want) for name in state)


class Stack(nn.Module):
    """Three layers, each a piece by itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(96, 96, bias=False) for _ in range(3))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Gated(transport.Handle):
    def __init__(self, handle, gate):
        self.handle, self.gate = handle, gate

    def done(self):
        return self.gate.is_set() and self.handle.done()

    def wait(self, deadline_s=None):
        assert self.gate.wait(60.0), "nobody opened the gate"
        return self.handle.wait(deadline_s)


class Gates(memory.Link):
    """Messages on the lane of gradients arrive when their gate is opened; all are open but those in ``shut``."""

    shut: dict[int, threading.Event]

    def lane(self, name):
        lane = Gates(self.hub, self.rank, self.generation, f"{self.name}/{name}")
        lane.shut, lane.count = self.shut, 0
        return lane

    def sum(self, tensor, what="sum"):
        self.count += 1
        handle = super().sum(tensor, what)
        return Gated(handle, self.shut[self.count]) if self.count in self.shut else handle


def test_a_layer_waits_for_its_own_weights_alone():
    """The last layer's sum arrives only when those before it have computed: waiting for all would wait for ever."""
    hub, gates = memory.Hub(2), [threading.Event(), threading.Event()]
    links = [Gates(hub, rank) for rank in range(2)]
    for link, gate in zip(links, gates, strict=True):
        link.shut = {3: gate}  # the last message of the first step
    model = build(Stack)

    def work(link):
        rank = rank_of(link, model, forms=DENSE)
        rank.exchange.choice.groups = ((2,), (1,), (0,))  # the order in which forward reads them
        opened = []

        def computed(*_):
            opened.append(rank.engine._deferred._pending.keys() == {0})
            gates[link.rank].set()

        rank.train(BATCHES[:1])
        rank.model.second.register_forward_hook(computed)
        rank.train(BATCHES[1:3])
        state = rank.state()
        rank.exchange.close()
        return opened[0], state

    for waiting, state in ranks.run(2, work, links):
        assert waiting
        assert gap(state, reference(model, BATCHES[:3])[0]) < 1e-12


def test_whoever_uses_the_model_between_steps_finds_the_last_step_in_it():
    model = build()
    want, _ = reference(model, BATCHES[:1])
    probe = torch.ones(2, 96, dtype=torch.float64, device=DEVICE)

    def work(link):
        said = {}
        for use in ("call", "part", "state", "state of a part", "optimizer", "settle"):
            rank = rank_of(memory.Link(link.hub, link.rank, 0, use), model)
            rank.train(BATCHES[:1])
            if use == "call":
                rank.model(probe)
            elif use == "part":
                rank.model.second(torch.ones(2, 128, dtype=torch.float64, device=DEVICE))
            elif use == "state":
                rank.model.state_dict()
            elif use == "state of a part":
                rank.model.second.state_dict()
            elif use == "optimizer":
                rank.optimizer.state_dict()
            else:
                rank.engine.wait_pending()
            said[use] = {name: value.detach().clone() for name, value in rank.model.named_parameters()}
            rank.exchange.close()
        return said

    for said in ranks.run(2, work):
        for use, state in said.items():
            assert gap(state, want) < 1e-12, use


def test_a_gradient_that_is_not_finite_is_told_one_step_later_by_everyone_alike():
    model = build(Stack)

    def work(link):
        rank, twin = (rank_of(memory.Link(link.hub, link.rank, 0, name), model, forms=DENSE) for name in "ab")
        rank.train(BATCHES[:2])
        twin.train(BATCHES[:3])
        before, after = rank.state(), twin.state()
        if link.rank == 1:
            hook = rank.model.second.weight.register_hook(lambda grad: grad * float("nan"))
        rank.step(Whole(BATCHES[2]))
        if link.rank == 1:
            hook.remove()
        with pytest.raises(NotFinite, match=r"gradient of step 2 is not finite \(second\.weight\)") as caught:
            rank.step(Whole(BATCHES[3]))
        state = rank.state()
        assert torch.equal(state["second.weight"], before["second.weight"])
        assert all(torch.equal(state[name], after[name]) for name in ("first.weight", "third.weight"))
        rank.train(BATCHES[4:])  # and on from there, if one likes
        for each in (rank, twin):
            each.exchange.close()
        return str(caught.value), rank.state()

    (said, one), (also, other) = ranks.run(2, work)
    assert said == also
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_optimizers_that_count_or_look_at_all_weights_are_known():
    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 0.5
            return super().step(closure)

    for name, make in OPTIMIZERS.items():
        assert splits(make(build().parameters())), name
    assert not splits(Counts(build().parameters(), lr=0.1))
    hooked = torch.optim.SGD(build().parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    assert not splits(hooked)


def test_a_loss_that_is_not_finite_still_stops_before_its_update():
    bad = torch.full_like(BATCHES[0][0], float("nan"))

    def work(link):
        rank = rank_of(link, build())
        rank.train(BATCHES[:2])
        before = rank.state()
        with pytest.raises(NotFinite, match="the loss is not finite at step 2"):
            rank.train([(bad, BATCHES[0][1])])
        unchanged = all(torch.equal(value, before[name]) for name, value in rank.state().items())
        losses = rank.train(BATCHES[2:])
        rank.exchange.close()
        return unchanged and all(loss == loss for loss in losses)

    assert ranks.run(2, work) == [True, True]


def test_a_loss_that_reads_weights_reads_those_of_the_last_step():
    for overlap in ("backward", "forward"):
        model = build()

        def work(link, overlap=overlap, model=model):
            rank = rank_of(link, model, overlap, forms=DENSE)
            own = rank.model.first.weight
            rank.engine.loss = lambda output, target: F.cross_entropy(output, target) + 1e-2 * own.square().sum()
            losses = rank.train(BATCHES)
            state = rank.state()
            rank.exchange.close()
            return state, losses

        got = ranks.run(2, work)
        if overlap == "backward":
            want = got
    assert all(one[1] == other[1] for one, other in zip(got, want, strict=True))
    assert all(
        torch.equal(one[0][name], other[0][name]) for one, other in zip(got, want, strict=True) for name in one[0]
    )
