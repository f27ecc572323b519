"""A payload has the declared bytes and decodes to the gradient's shape and type; a codec keeps no secrets."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from paceline.messages import Bucket
from paceline.registry import names, parse

# How a codec is written, where its bare name is not all there is to try.
SPELLINGS = {
    "feedback": ("feedback/topk:keep=0.1", "feedback/half"),
    "half": ("half:bf16", "half:fp16"),
    "topk": ("topk:keep=0.1", "topk:keep=1"),
}
CODECS = [text for name in names("codec") for text in SPELLINGS.get(name, (name,))]
COUNTS = (1, 7, 1000)
DTYPES = (torch.float32, torch.float64)
HALVES = {"bf16": (torch.bfloat16, 2.0**-8), "fp16": (torch.float16, 2.0**-11)}

every_codec = pytest.mark.parametrize("text", CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_count = pytest.mark.parametrize("count", COUNTS)


def memory_of(codec, count, rank=0):
    return codec.init(Bucket(0, ("weight",), ((count,),)), rank, 5)


def noise(count, dtype, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def equal(one, other):
    """Bit for bit, through tuples, lists and dictionaries."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def used(codec, count, dtype):
    """A memory that two applied steps have left."""
    memory = memory_of(codec, count)
    for step in range(2):
        payload, pending = codec.encode(noise(count, dtype, step), memory, step)
        memory = codec.commit(pending, codec.decode(payload, count, dtype))
    return memory


@every_codec
@every_dtype
@every_count
def test_shape_type_and_bytes_are_as_declared(text, dtype, count):
    codec = parse("codec", text)
    flat = noise(count, dtype)
    payload, _ = codec.encode(flat, memory_of(codec, count), 0)
    assert payload.nbytes == codec.payload_bytes(count, dtype) > 0
    decoded = codec.decode(payload, count, dtype)
    assert decoded.shape == flat.shape
    assert decoded.dtype == dtype
    assert decoded.any(), "nothing arrived"


@every_codec
@every_dtype
@every_count
def test_equal_inputs_give_equal_payloads_from_two_codecs(text, dtype, count):
    flat = noise(count, dtype)
    payloads, decoded, pendings = [], [], []
    for codec in (parse("codec", text), parse("codec", text)):
        payload, pending = codec.encode(flat.clone(), used(codec, count, dtype), 2)
        payloads.append(payload)
        pendings.append(pending)
        decoded.append(codec.decode(payload, count, dtype))
    assert equal(*payloads)
    assert equal(*pendings)
    assert equal(*decoded)


@every_codec
@every_dtype
@every_count
def test_encode_and_decode_change_nothing_they_are_given(text, dtype, count):
    codec = parse("codec", text)
    flat, memory, own = noise(count, dtype), used(codec, count, dtype), copy.deepcopy(vars(codec))
    flat_before, memory_before = flat.clone(), copy.deepcopy(memory)
    payload, _ = codec.encode(flat, memory, 2)
    payload_before = payload.clone()
    codec.decode(payload, count, dtype)
    assert equal(flat, flat_before)
    assert equal(memory, memory_before)
    assert equal(payload, payload_before)
    assert {key: value for key, value in vars(codec).items() if key != "inner"} == {
        key: value for key, value in own.items() if key != "inner"
    }


@every_codec
@every_dtype
@every_count
def test_zeros_arrive_as_finite_numbers(text, dtype, count):
    codec = parse("codec", text)
    payload, pending = codec.encode(torch.zeros(count, dtype=dtype), memory_of(codec, count), 0)
    decoded = codec.decode(payload, count, dtype)
    assert decoded.isfinite().all()
    # and do no harm to the step after
    payload, _ = codec.encode(noise(count, dtype), codec.commit(pending, decoded), 1)
    assert codec.decode(payload, count, dtype).isfinite().all()


@pytest.mark.parametrize("text", [text for text in CODECS if parse("codec", text).sums])
@every_dtype
@every_count
def test_the_sum_of_payloads_decodes_to_the_sum(text, dtype, count):
    """Three ranks with whole numbers up to 15 each: their sums are exact in any 16-bit float."""
    codec = parse("codec", text)
    flats = [((rank + 1) * (torch.arange(count) % 5 + 1)).to(dtype) for rank in range(3)]
    payloads = [codec.encode(flat, memory_of(codec, count, rank), 0)[0] for rank, flat in enumerate(flats)]
    decoded = [codec.decode(payload.clone(), count, dtype) for payload in payloads]
    whole = payloads[0].clone()
    for payload in payloads[1:]:
        whole += payload
    assert torch.equal(codec.decode(whole, count, dtype), decoded[0] + decoded[1] + decoded[2])
    assert decoded[0].any()
    if codec.fidelity != "approximate":
        assert torch.equal(decoded[0] + decoded[1] + decoded[2], 6 * flats[0])


@pytest.mark.parametrize("text", [text for text in CODECS if parse("codec", text).fidelity == "exact"])
@every_dtype
@every_count
def test_an_exact_codec_is_the_identity(text, dtype, count):
    codec, flat = parse("codec", text), noise(count, dtype)
    payload, _ = codec.encode(flat, memory_of(codec, count), 0)
    assert torch.equal(codec.decode(payload, count, dtype), flat)


@pytest.mark.parametrize("kind", HALVES)
@every_dtype
@every_count
def test_half_rounds_by_at_most_half_a_unit_in_the_last_place(kind, dtype, count):
    _, unit = HALVES[kind]
    codec = parse("codec", f"half:{kind}")
    scales = 2.0 ** (torch.arange(count, dtype=dtype) % 20 - 10)  # inside fp16's normal range
    flat = (1 + noise(count, dtype).abs().clamp(max=8)) * scales * (1 - 2 * (torch.arange(count) % 2))
    decoded = codec.decode(codec.encode(flat, None, 0)[0], count, dtype)
    assert ((decoded - flat).abs() <= unit * flat.abs()).all()
    assert codec.payload_bytes(count, dtype) == 2 * count


@pytest.mark.parametrize("kind", HALVES)
@every_dtype
def test_half_keeps_what_sixteen_bits_hold_and_rounds_what_they_do_not(kind, dtype):
    _, unit = HALVES[kind]
    codec = parse("codec", f"half:{kind}")
    flat = torch.tensor([0.0, 1.0, -1.5, 1 + 2 * unit, 1 + 0.5 * unit, 1 + 1.5 * unit], dtype=dtype)
    want = torch.tensor([0.0, 1.0, -1.5, 1 + 2 * unit, 1.0, 1 + 2 * unit], dtype=dtype)
    assert torch.equal(codec.decode(codec.encode(flat, None, 0)[0], len(flat), dtype), want)


@pytest.mark.parametrize("keep", [0.001, 0.1, 0.5, 1.0])
@every_dtype
@every_count
def test_topk_keeps_exactly_the_largest_magnitudes(keep, dtype, count):
    codec = parse("codec", f"topk:keep={keep}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    magnitudes = (order + 1).to(dtype)  # all different, so that the largest k are one set
    flat = magnitudes * (1 - 2 * (order % 2))
    k = math.ceil(keep * count)
    want = torch.where(magnitudes > count - k, flat, torch.zeros_like(flat))
    decoded = codec.decode(codec.encode(flat, None, 0)[0], count, dtype)
    assert torch.equal(decoded, want)
    assert decoded.count_nonzero() == k


@pytest.mark.parametrize("keep", [0, -0.1, 1.5])
def test_topk_refuses_a_share_that_is_none(keep):
    with pytest.raises(ValueError, match=f"0 < keep <= 1; got keep={keep}"):
        parse("codec", f"topk:keep={keep}")
