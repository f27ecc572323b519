"""What feedback did not send is neither lost nor sent twice: inputs of applied steps = what was sent + residual."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.messages import Bucket
from paceline.registry import find, names, parse

OPTIONS = {"topk": ":keep=0.1"}
INNER = [f"{name}{OPTIONS.get(name, '')}" for name in names("codec") if name != "feedback"]
LOSSY = [text for text in INNER if parse("codec", text).fidelity != "exact"]
COUNT, STEPS = 101, 30

every_inner = pytest.mark.parametrize("inner", INNER)


def whole_numbers(step):
    """Sums and differences of these are exact in float64, so that conservation can be, too."""
    dice = torch.Generator().manual_seed(step)
    return torch.randint(-9999, 10000, (COUNT,), generator=dice).double()


def train(codec, dropped=()):
    """What every step put in and sent, and the memory after it. A dropped step's pending is not settled."""
    memory = codec.init(Bucket(0, ("weight",), ((COUNT,),)), 0, 0)
    history = []
    for step in range(STEPS):
        flat = whole_numbers(step)
        payload, pending = codec.encode(flat.clone(), memory, step)
        sent = codec.decode(payload, COUNT, flat.dtype)
        if step not in dropped:
            memory = codec.commit(pending, sent)
            history.append((flat, sent, memory))
    return history


def totals(history):
    return sum(flat for flat, _, _ in history), sum(sent for _, sent, _ in history)


@every_inner
@pytest.mark.parametrize("seed", [None, 0, 1, 2], ids=lambda seed: f"dropping-{seed}")
def test_inputs_are_sent_or_still_owed(inner, seed):
    dropped = () if seed is None else set(random.Random(seed).sample(range(STEPS), 10))
    history = train(parse("codec", f"feedback/{inner}"), dropped)
    assert len(history) == STEPS - len(dropped)
    put_in, sent = totals(history)
    residual, _ = history[-1][2]
    if torch.equal(sent, sent.round()):
        assert torch.equal(sent + residual, put_in)
    else:  # a codec that sends no whole numbers: rounding of float64 over 30 steps
        assert torch.allclose(sent + residual, put_in, rtol=0, atol=1e-9)
    assert sent.any()


@pytest.mark.parametrize("inner", LOSSY)
def test_a_lossy_codec_does_owe_something(inner):
    assert all(memory[0].any() for _, _, memory in train(parse("codec", f"feedback/{inner}")))


@pytest.mark.parametrize("inner", LOSSY)
def test_without_feedback_the_same_codec_loses(inner):
    put_in, sent = totals(train(parse("codec", inner)))
    assert not torch.equal(sent, put_in)


@every_inner
def test_a_dropped_step_is_as_if_it_had_never_been(inner):
    """Encoding a step that is refused, whatever was in it, leaves no trace in the next."""
    codec = parse("codec", f"feedback/{inner}")
    *_, (_, _, memory) = train(codec)
    undisturbed, _ = codec.encode(whole_numbers(99), memory, STEPS)
    codec.encode(whole_numbers(77), memory, STEPS)
    after, _ = codec.encode(whole_numbers(99), memory, STEPS)
    assert torch.equal(after, undisturbed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_only_selects_conserves_every_step_bit_for_bit(dtype):
    """Real numbers of very different sizes: each value is either sent whole or kept whole."""
    codec = parse("codec", "feedback/topk:keep=0.1")
    memory = codec.init(Bucket(0, ("weight",), ((COUNT,),)), 0, 0)
    residual = torch.zeros(COUNT, dtype=dtype)
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(step)
        flat = torch.randn(COUNT, generator=dice, dtype=dtype) * 10.0 ** torch.randint(-6, 6, (COUNT,), generator=dice)
        payload, pending = codec.encode(flat, memory, step)
        sent = codec.decode(payload, COUNT, dtype)
        memory = codec.commit(pending, sent)
        assert torch.equal(sent + memory[0], flat + residual)
        assert not (sent * memory[0]).any(), "a value was both sent and kept"
        residual = memory[0]


def test_everything_is_sent_in_the_end():
    """One gradient and then none: a tenth per step, so ten or eleven steps empty the residual."""
    codec = parse("codec", "feedback/topk:keep=0.1")
    memory, flat, sent = codec.init(Bucket(0, ("weight",), ((COUNT,),)), 0, 0), torch.arange(1.0, COUNT + 1), 0
    for step in range(10):
        payload, pending = codec.encode(flat if step == 0 else torch.zeros(COUNT), memory, step)
        decoded = codec.decode(payload, COUNT, flat.dtype)
        memory, sent = codec.commit(pending, decoded), sent + decoded
        assert bool(memory[0].any()) == (step < 9)
    assert torch.equal(sent, flat)


@every_inner
def test_feedback_declares_what_its_codec_does(inner):
    outer, bare = parse("codec", f"feedback/{inner}"), parse("codec", inner)
    assert (outer.sums, outer.fidelity, outer.wire) == (bare.sums, bare.fidelity, bare.wire)
    assert outer.payload_bytes(COUNT, torch.float64) == bare.payload_bytes(COUNT, torch.float64)
    assert not outer.needs_feedback


def test_feedback_around_nothing_says_what_it_needs():
    with pytest.raises(ValueError, match="needs a codec to wrap, as in 'feedback/topk"):
        find("codec", "feedback")
