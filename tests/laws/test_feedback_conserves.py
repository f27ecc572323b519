"""What feedback did not send is neither lost nor sent twice: inputs of applied steps = what was sent + residual."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.registry import find, names, parse
from paceline.testing.codecs import bucket_of, collected

OPTIONS = {"topk": ":keep=0.1", "lossless": "/topk:keep=0.1", "lowrank": ":1"}
INNER = [f"{name}{OPTIONS.get(name, '')}" for name in names("codec") if name != "feedback"]
LOSSY = [text for text in INNER if parse("codec", text).fidelity != "exact"]
BUCKET, STEPS = bucket_of((12, 8), (5,)), 30
COUNT = BUCKET.numel

every_inner = pytest.mark.parametrize("inner", INNER)


def whole_numbers(step, rank=0):
    """Sums and differences of these are exact in float64, so that conservation can be, too."""
    dice = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(-9999, 10000, (COUNT,), generator=dice).double()


def residual(state):
    return torch.zeros(()) if state[0] is None else state[0]


def train(codec, size=1, dropped=()):
    """What every applied step put in and applied, over all nodes, and the states after it."""
    states = [codec.init(BUCKET, 0) for _ in range(size)]
    history = []
    for step in range(STEPS):
        values = [whole_numbers(step, rank) for rank in range(size)]
        coded, _ = collected(codec, [flat.clone() for flat in values], step, BUCKET, states)
        if step not in dropped:
            states = [each.state for each in coded]
            history.append((sum(values), coded[0].total, states))
    return history


# among three, half adds in 16 bits: the roundings of that sum are owed by nobody (its docstring)
CONSERVING = [(inner, size) for inner in INNER for size in (1, 2, 3) if (inner, size) != ("half", 3)]


@pytest.mark.parametrize(("inner", "size"), CONSERVING)
@pytest.mark.parametrize("seed", [None, 0, 1], ids=lambda seed: f"dropping-{seed}")
def test_inputs_are_applied_or_still_owed(inner, size, seed):
    dropped = () if seed is None else set(random.Random(seed).sample(range(STEPS), 10))
    history = train(parse("codec", f"feedback/{inner}"), size, dropped)
    assert len(history) == STEPS - len(dropped)
    put_in, applied = (sum(each[i] for each in history) for i in range(2))
    owed = sum(residual(state) for state in history[-1][2])
    # exact where only whole numbers are sent; else rounding of float64 over 30 steps
    close = 0.0 if torch.equal(applied, applied.round()) else 1e-9
    assert torch.allclose(applied + owed, put_in, rtol=0, atol=close)
    assert applied.any()


@pytest.mark.parametrize("inner", LOSSY)
def test_a_lossy_codec_does_owe_something(inner):
    assert all(residual(states[0]).any() for _, _, states in train(parse("codec", f"feedback/{inner}")))


@pytest.mark.parametrize("inner", LOSSY)
def test_without_feedback_the_same_codec_loses(inner):
    history = train(parse("codec", inner))
    assert not torch.equal(sum(each[0] for each in history), sum(each[1] for each in history))


@every_inner
def test_a_dropped_step_is_as_if_it_had_never_been(inner):
    """Encoding a step that is refused, whatever was in it, leaves no trace in the next."""
    codec = parse("codec", f"feedback/{inner}")
    *_, (_, _, states) = train(codec, 2)

    def sent(seed):
        values = [whole_numbers(seed, rank) for rank in range(2)]
        _, collectives = collected(codec, values, STEPS, BUCKET, states)
        return [one.payload for each in collectives for one in each]

    undisturbed = sent(99)
    sent(77)
    assert all(torch.equal(one, other) for one, other in zip(undisturbed, sent(99), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_only_selects_conserves_every_step_bit_for_bit(dtype):
    """Real numbers of very different sizes: each value is either sent whole or kept whole."""
    codec = parse("codec", "feedback/topk:keep=0.1")
    state = codec.init(BUCKET, 0)
    before = torch.zeros(COUNT, dtype=dtype)
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(step)
        flat = torch.randn(COUNT, generator=dice, dtype=dtype) * 10.0 ** torch.randint(-6, 6, (COUNT,), generator=dice)
        (coded,), _ = collected(codec, [flat.clone()], step, BUCKET, [state])
        state = coded.state
        assert torch.equal(coded.total + state[0], flat + before)
        assert not (coded.total * state[0]).any(), "a value was both sent and kept"
        before = state[0]


def test_everything_is_sent_in_the_end():
    """One gradient and then none: a tenth per step, so ten or eleven steps empty the residual."""
    codec = parse("codec", "feedback/topk:keep=0.1")
    state, flat, sent = codec.init(BUCKET, 0), torch.arange(1.0, COUNT + 1), 0
    for step in range(10):
        (coded,), _ = collected(codec, [flat.clone() if step == 0 else torch.zeros(COUNT)], step, BUCKET, [state])
        state, sent = coded.state, sent + coded.total
        assert bool(state[0].any()) == (step < 9)
    assert torch.equal(sent, flat)


@every_inner
def test_feedback_declares_what_its_codec_does(inner):
    outer, bare = parse("codec", f"feedback/{inner}"), parse("codec", inner)
    assert (outer.fidelity, outer.wire, outer.kinds) == (bare.fidelity, bare.wire, bare.kinds)
    assert outer.rounds(BUCKET, 2, torch.float64) == bare.rounds(BUCKET, 2, torch.float64)
    assert not outer.needs_feedback
    assert outer.has_residual


@pytest.mark.parametrize("name", ["feedback", "lossless"])
def test_a_codec_around_nothing_says_what_it_needs(name):
    with pytest.raises(ValueError, match=f"needs a codec to wrap, as in '{name}/"):
        find("codec", name)
