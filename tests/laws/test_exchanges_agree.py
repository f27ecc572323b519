"""N ranks equal one process on the global batch, whatever the rows, the optimizer, the clip and the model."""

import pytest
import torch
from torch.nn import functional as F

import ranks
from nodes import HIDDEN, IN, MODELS, OPTIMIZERS, OUT, Plain, Rank, Whole, build, gap, reference, rows
from paceline import registry
from paceline.exchange.flow.cost_model import choose, dense_cost, factor_cost
from paceline.link.memory import world
from paceline.messages import DENSE, FACTORS
from paceline.step.average import average
from paceline.testing import laws

EXACT = 1e-12  # float64, a few steps: only the order of additions differs
BATCHES = [rows(24, seed) for seed in range(5)]


def exchanges(consensus):
    return [n for n in registry.names("exchange") if registry.module("exchange", n).Exchange.consensus == consensus]


def train(size, model, batches=BATCHES, **options):
    def work(link):
        rank = Rank(link, model, **options)
        losses = rank.train(batches)
        forms = list(rank.exchange.forms())
        rank.exchange.close()
        return rank.state(), losses, forms

    return ranks.run(size, work)


@pytest.mark.parametrize("exchange", registry.names("exchange"))
@pytest.mark.parametrize("law", laws("exchange"), ids=str)
def test_every_exchange(law, exchange):
    law(lambda: registry.parse("exchange", exchange))


@pytest.mark.parametrize("exchange", exchanges("step"))
def test_losses_are_those_of_one_process(exchange):
    model = build()
    want, want_losses = reference(model, BATCHES)
    for state, losses, _ in train(3, model, exchange=exchange):
        assert gap(state, want) < EXACT
        assert losses == pytest.approx(want_losses, rel=EXACT)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", MODELS)
def test_every_optimizer_clip_and_model(kind, optimizer, clip):
    model = build(MODELS[kind])
    want, _ = reference(model, BATCHES, OPTIMIZERS[optimizer], clip)
    for state, _, _ in train(2, model, optimizer=OPTIMIZERS[optimizer], clip=clip):
        assert gap(state, want) < 1e-12


def test_factors_are_used_where_they_are_fewer_bytes_and_only_there():
    (_, _, forms), *_ = train(2, build())
    assert forms[:3].count(FACTORS) == 2
    assert DENSE in forms


def test_a_layer_called_twice_sends_the_factors_of_both_calls():
    (_, _, forms), *_ = train(2, build(MODELS["twice"]), [rows(4, seed) for seed in range(3)])
    buckets = Rank(world(1)[0], build(MODELS["twice"])).engine.buckets
    assert [form for bucket, form in zip(buckets, forms, strict=True) if "second.weight" in bucket.names] == [FACTORS]


@pytest.mark.parametrize("kind", ["tied", "sometimes"])
def test_a_weight_with_another_gradient_goes_dense(kind):
    """Tied, or used outside its module: its factors are not its whole gradient."""
    model = build(MODELS[kind])
    (_, _, forms), *_ = train(2, model)
    assert forms.count(FACTORS) == {"tied": 0, "sometimes": 4}[kind]


@pytest.mark.parametrize("shares", [(1, 0, 7), (0, 0, 8), (5, 2, 1)])
def test_any_number_of_rows_per_rank(shares):
    batches = [rows(8, seed) for seed in range(4)]
    model = build(MODELS["sometimes"])
    want, want_losses = reference(model, batches)
    for state, losses, _ in train(3, model, batches, shares=shares, batch=24):
        assert gap(state, want) < EXACT
        assert losses == pytest.approx(want_losses, rel=EXACT)


def test_more_rows_than_were_expected():
    """The form was chosen for few rows; more than fit in the gradient's place must still be exact."""
    batches = [rows(240, seed) for seed in range(3)]
    model = build()
    want, _ = reference(model, batches)
    for state, _, _ in train(2, model, batches, batch=2):
        assert gap(state, want) < EXACT


def masked_sum(output, target):
    """Cross-entropy per token over those that count. *Shapes*: (rows, tokens, classes), (rows, tokens)."""
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return loss, (target != -100).sum()


def test_ragged_token_masks():
    dice = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(4):
        x = torch.randn(7, 5, IN, generator=dice, dtype=torch.float64)
        y = torch.randint(0, OUT, (7, 5), generator=dice)
        lengths = torch.randint(0, 6, (7,), generator=dice)
        lengths[0] = 3
        y[torch.arange(5)[None] >= lengths[:, None]] = -100
        batches.append((x, y))
    model = build()
    want, want_losses = reference(model, batches, loss=masked_sum)
    for state, losses, _ in train(3, model, batches, loss=masked_sum, batch=7):
        assert gap(state, want) < EXACT
        assert losses == pytest.approx(want_losses, rel=EXACT)


def test_a_parameter_that_nobody_used_is_left_alone():
    """Weight decay does not shrink it, as it would not in one process."""
    model = build(MODELS["sometimes"])
    (state, _, _), *_ = train(2, model)
    assert torch.equal(state["never.weight"], model.state_dict()["never.weight"])


def test_an_input_changed_in_place_after_it_was_read_is_an_error():
    class Careless(Plain):
        def forward(self, x):
            h = F.relu(self.first(x))
            out = self.second(h)
            h.zero_()
            return self.head(out)

    with pytest.raises(RuntimeError, match=r"second\.weight.*changed in place"):
        train(2, build(Careless))


def test_a_loss_that_is_not_finite_stops_every_rank_before_its_update():
    x, y = rows(24, 1)
    x = x.clone()
    x[-1, 0] = float("nan")
    model, states = build(), []

    def work(link):
        rank = Rank(link, model)
        rank.train(BATCHES[:2])
        before = rank.state()
        with pytest.raises(FloatingPointError, match=r"not finite at step 2: .*\(rank \d\)"):
            rank.train([(x, y)])
        states.append(all(torch.equal(value, before[name]) for name, value in rank.state().items()))

    ranks.run(3, work)
    assert states == [True] * 3


def test_replicas_that_differ_are_seen():
    """The hash looks at a part of the weights per step: a planted difference shows within as many steps as parts."""

    def work(link):
        rank = Rank(link, build())
        with torch.no_grad():
            rank.model.second.bias[3] += 1e-9 * link.rank
        return [rank.step(Whole(data)).drift for data in [BATCHES[0]] * len(rank.engine._hash_parts)]

    for size, want in ((1, False), (2, True)):
        assert all(any(seen) == want for seen in ranks.run(size, work))


@pytest.mark.parametrize("period", [1, 3])
def test_periodic_average(period):
    """Period 1 with plain SGD is all-reduce; after each average the replicas are bit-equal."""
    batches = BATCHES[:3]
    model = build()
    got = train(3, model, batches, exchange=f"local_sgd:{period}", optimizer=OPTIMIZERS["sgd"], shares=(1, 2, 3))
    for state, _, _ in got:
        assert all(torch.equal(state[name], got[0][0][name]) for name in state)
    want, _ = reference(model, batches, OPTIMIZERS["sgd"])
    if period == 1:
        assert gap(got[0][0], want) < EXACT
    else:
        assert 1e-9 < gap(got[0][0], want) < 0.1


def test_periodic_conserves_the_mean_weighted_by_samples():
    def work(link):
        rank = Rank(link, build(), exchange="local_sgd:2", optimizer=OPTIMIZERS["sgd"], shares=(1, 3))
        rank.train(BATCHES[:1])
        before = rank.state()
        rank.exchange.step = 2
        average(rank.run, now=False)
        return before, rank.state()

    (one, averaged), (other, _) = ranks.run(2, work)
    assert not torch.equal(one["first.weight"], other["first.weight"]), "the step was not local"
    for name, got in averaged.items():
        assert torch.allclose(got, one[name] * 6 / 24 + other[name] * 18 / 24, rtol=1e-14, atol=1e-16)


def test_periodic_levels_between_two_averages_and_goes_on_from_there():
    def work(link):
        rank = Rank(link, build(), exchange="local_sgd:4", optimizer=OPTIMIZERS["sgd"], shares=(1, 3))
        rank.train(BATCHES[:3])
        before, sent = rank.state(), link.sent_bytes
        average(rank.run)
        levelled, first = rank.state(), link.sent_bytes - sent
        average(rank.run)
        return before, levelled, first, link.sent_bytes - sent - first, rank.exchange.samples

    (one, averaged, first, again, left), (other, same, *_) = ranks.run(2, work)
    assert first > again == left == 0
    for name, got in averaged.items():
        assert torch.equal(got, same[name])
        assert torch.allclose(got, one[name] * 18 / 72 + other[name] * 54 / 72, rtol=1e-14, atol=1e-16)


def test_what_periodic_was_asked_is_told_once():
    """Story: a save that failed once was told for ever, and louder than a signal to another node."""

    def work(link):
        rank = Rank(link, build(), exchange="local_sgd:2", optimizer=OPTIMIZERS["sgd"])
        asks = {(0, 0): 255, (1, 6): 15, (1, 7): 15, (1, 8): 15}
        told = []
        finish = rank.exchange.finish

        def heard(tally):
            tally.vote.stop_signal = asks.get((link.rank, len(told)), 0)
            outcome = finish(tally)
            told.append(outcome.vote.stop_signal)
            return outcome

        rank.exchange.finish = heard
        rank.train([BATCHES[0]] * 9)
        return told

    assert ranks.run(2, work) == [[0, 0, 255, 0, 0, 0, 0, 0, 15]] * 2


def test_the_form_follows_from_bytes():
    """Factors cost (N - 1) rows (in + out) words, the ring 2 (N - 1) / N in out."""
    (bucket,) = [s for s in Rank(world(1)[0], build()).engine.buckets if s.names == ("second.weight",)]
    for size in (2, 3, 8):
        for count in (1, 4, 16, 63):
            cheaper = factor_cost(bucket, count, size).bytes < dense_cost(bucket, size).bytes
            fits = count * size * 2 * HIDDEN <= HIDDEN * HIDDEN
            most, total = [count] * (bucket.index + 1), [count * size] * (bucket.index + 1)
            assert (choose([bucket], most, total, size, set()) == [FACTORS]) == (cheaper and fits)


def test_a_hook_of_the_users_changes_the_output_and_not_the_gradient():
    """Story: a forward hook that doubles a layer's output ran before ours, and left was its gradient, doubled."""

    class Hooked(Plain):
        def __init__(self):
            super().__init__()
            self.second.register_forward_hook(lambda module, args, output: output * 2)

    model = build(Hooked)
    want, _ = reference(model, BATCHES)
    for state, _, forms in train(2, model):
        assert FACTORS in forms
        assert gap(state, want) < EXACT


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_factors_under_autocast_have_the_weights_type(optimizer):
    """Story: bf16 factors made the momentum bf16 for good, or failed in the optimizer."""

    class Cast(Plain):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    model = build(Cast, torch.float32)

    def work(link):
        rank = Rank(link, model, OPTIMIZERS[optimizer])
        rank.train([rows(24, seed, torch.float32) for seed in range(3)])
        state = rank.optimizer.state.get(rank.model.second.weight, {})
        return {v.dtype for v in state.values() if torch.is_tensor(v)} | {rank.model.second.weight.dtype}

    assert ranks.run(2, work) == [{torch.float32}] * 2


def test_an_interrupted_backward_leaves_nothing_for_the_next_step():
    """Story: pieces of the interrupted step stayed in line, and each later step applied those of the one before."""
    model, interrupted = build(), []

    class Stop(BaseException):
        pass

    def work(link):
        rank = Rank(link, model)
        rank.train(BATCHES[:1])
        hook = rank.model.first.bias.register_hook(lambda grad: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            rank.train(BATCHES[1:2])
        interrupted.append(True)
        hook.remove()
        rank.train(BATCHES[1:])
        return rank.state()

    (state,) = ranks.run(1, work)
    assert interrupted
    assert gap(state, reference(model, BATCHES)[0]) < EXACT


def test_a_loss_that_is_not_finite_stays_out_of_the_residuals():
    x, y = rows(24, 1)
    bad = torch.full_like(x, float("nan"))

    def work(link):
        rank = Rank(link, build(), codec="feedback/topk:keep=0.1")
        rank.train(BATCHES[:2])
        with pytest.raises(FloatingPointError):
            rank.train([(bad, y)])
        return rank.train(BATCHES[2:])

    for losses in ranks.run(2, work):
        assert all(loss == loss for loss in losses)
