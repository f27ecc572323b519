"""A codec's collectives are as declared, all nodes get one sum of the right shape and type, and it keeps no secrets."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from collecting import bucket_of, collected, noise
from paceline.codec.encoding.in_process import in_process
from paceline.messages import ALL_GATHER, FACTORS, Bucket, StepContext
from paceline.registry import names, parse

# How a codec is written, where its bare name is not all there is to try.
SPELLINGS = {
    "feedback": ("feedback/topk:keep=0.1", "feedback/half", "feedback/lowrank:1", "feedback/lossless/topk:keep=0.1"),
    "half": ("half:bf16", "half:fp16"),
    "lossless": ("lossless/none", "lossless/half", "lossless/topk:keep=0.1", "lossless/lowrank"),
    "lowrank": ("lowrank:1", "lowrank:rank=3,min_rate=0"),
    "qsgd": ("qsgd", "qsgd:block=8"),
    "topk": ("topk:keep=0.1", "topk:keep=1"),
}
CODECS = [text for name in names("codec") for text in SPELLINGS.get(name, (name,))]
BUCKETS = {
    "one": bucket_of((1,)),
    "few": bucket_of((7,)),
    "matrix": bucket_of((40, 25)),
    "layers": bucket_of((12, 3, 3, 3), (12,), (5, 60), (), (3, 0), index=4),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
HALVES = {"bf16": (torch.bfloat16, 2.0**-8), "fp16": (torch.float16, 2.0**-11)}

every_codec = pytest.mark.parametrize("text", CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_bucket = pytest.mark.parametrize("bucket", BUCKETS.values(), ids=BUCKETS)
every_size = pytest.mark.parametrize("size", [1, 2, 3])


def gradients(bucket, dtype, size, step=0):
    return [noise(bucket.numel, dtype, 10 * step + rank) for rank in range(size)]


def equal(one, other):
    """Bit for bit, through tuples, lists and dictionaries."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def used(codec, bucket, dtype, size):
    """The states that two applied steps have left."""
    states = [codec.init(bucket, 5) for _ in range(size)]
    for step in range(2):
        coded, _ = collected(codec, gradients(bucket, dtype, size, step), step, bucket, states)
        states = [each.state for each in coded]
    return states


@every_codec
@every_dtype
@every_bucket
@every_size
def test_collectives_are_as_declared_and_all_nodes_get_one_sum(text, dtype, bucket, size):
    codec = parse("codec", text)
    coded, collectives = collected(codec, gradients(bucket, dtype, size), bucket=bucket)
    rounds = codec.rounds(bucket, size, dtype)
    for each in collectives:
        assert [(one.operation, one.even) for one in each] == [(one.operation, one.even) for one in rounds]
        for one, declared in zip(each, rounds, strict=True):
            assert 0 < one.payload.nbytes <= declared.max_bytes
            if declared.even:
                assert one.payload.nbytes == declared.max_bytes
                assert one.payload.dim() == 1, "it could not be merged with others"
    for each in coded:
        assert each.total.shape == (bucket.numel,)
        assert each.total.dtype == dtype
        assert each.total.any(), "nothing arrived"
        assert equal(each.total, coded[0].total)
        assert each.sent is None or (each.sent.shape, each.sent.dtype) == ((bucket.numel,), dtype)


@every_codec
@every_bucket
def test_equal_inputs_give_equal_payloads_from_two_codecs(text, bucket):
    found = []
    for codec in (parse("codec", text), parse("codec", text)):
        states = used(codec, bucket, torch.float32, 3)
        coded, collectives = collected(codec, gradients(bucket, torch.float32, 3, 2), 2, bucket, states)
        found.append(([(each.total, each.sent, each.state) for each in coded], collectives))
    assert equal(found[0][0], found[1][0])
    payloads = [[one.payload for each in collectives for one in each] for _, collectives in found]
    assert equal(*payloads)


@every_codec
@every_dtype
@every_bucket
def test_a_run_changes_no_state_and_not_itself(text, dtype, bucket):
    codec = parse("codec", text)
    states = used(codec, bucket, dtype, 2)
    before, own = copy.deepcopy(states), copy.deepcopy({k: v for k, v in vars(codec).items() if k != "inner"})
    collected(codec, gradients(bucket, dtype, 2, 2), 2, bucket, states)
    assert equal(states, before)
    assert {k: v for k, v in vars(codec).items() if k != "inner"} == own


@every_codec
@every_dtype
@every_bucket
def test_zeros_arrive_as_finite_numbers(text, dtype, bucket):
    codec = parse("codec", text)
    coded, _ = collected(codec, [torch.zeros(bucket.numel, dtype=dtype)] * 1, 0, bucket)
    assert coded[0].total.isfinite().all()
    # and do no harm to the step after
    coded, _ = collected(codec, gradients(bucket, dtype, 1, 1), 1, bucket, [coded[0].state])
    assert coded[0].total.isfinite().all()


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_size
def test_what_is_not_finite_arrives_as_such(text, bad, size):
    """A sum that looked finite would be applied."""
    codec, bucket = parse("codec", text), BUCKETS["matrix"]
    values = gradients(bucket, torch.float32, size)
    values[-1][3] = bad
    coded, _ = collected(codec, values, bucket=bucket)
    assert not any(each.total.isfinite().all() for each in coded)


@pytest.mark.parametrize("text", [text for text in CODECS if parse("codec", text).fidelity != "approximate"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@every_bucket
@every_size
def test_whole_numbers_arrive_as_their_sum(text, dtype, bucket, size):
    """Up to 15 each, so that their sums are exact in any 16-bit float."""
    values = [((rank + 1) * (torch.arange(bucket.numel) % 5 + 1)).to(dtype) for rank in range(size)]
    want = sum(values)
    coded, _ = collected(parse("codec", text), [each.clone() for each in values], bucket=bucket)
    assert all(torch.equal(each.total, want) for each in coded)


@pytest.mark.parametrize("text", [text for text in CODECS if parse("codec", text).fidelity == "exact"])
@every_dtype
@every_bucket
def test_an_exact_codec_is_the_identity(text, dtype, bucket):
    (flat,) = gradients(bucket, dtype, 1)
    (coded,), _ = collected(parse("codec", text), [flat.clone()], bucket=bucket)
    assert torch.equal(coded.total, flat)
    assert coded.sent is None


@every_codec
@every_dtype
@every_bucket
@every_size
def test_all_that_was_sent_is_the_sum(text, dtype, bucket, size):
    """Or else a residual is kept that is not owed."""
    values = gradients(bucket, dtype, size)
    coded, _ = collected(parse("codec", text), [each.clone() for each in values], bucket=bucket)
    sent = sum(flat if each.sent is None else each.sent for flat, each in zip(values, coded, strict=True))
    # one rounding per node, of the sum's type; half's sum among three is rounded in its own
    close = {torch.bfloat16: 2.0**-7}.get(dtype, 1e-5 if dtype != torch.float64 else 1e-12)
    if "half" in text and size == 3:
        close = 2.0**-6
    assert float((coded[0].total - sent).abs().max()) <= close * float(sum(each.abs().max() for each in values)) * 3


@pytest.mark.parametrize("text", [text for text in CODECS if FACTORS in parse("codec", text).kinds])
@every_size
def test_factors_of_all_nodes_lie_one_below_the_other(text, size):
    """Nodes may have unlike numbers of rows, or none. Whole numbers, which 16 bits hold."""
    codec, layer = parse("codec", text), Bucket(3, ("weight",), ((5, 4),), linear=True)
    parts = [torch.arange(9.0 * rows).view(rows, 9) + rows for rows in (3, 0, 2)[:size]]
    runs = [
        codec.run(layer.as_factors(len(part)), part, codec.init(layer, 0), StepContext(0, rank, size))
        for rank, part in enumerate(parts)
    ]
    coded, _ = in_process(runs)
    assert all(torch.equal(each.total, torch.cat(parts)) for each in coded)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_half_rounds_by_at_most_half_a_unit_in_the_last_place(kind, dtype, count):
    _, unit = HALVES[kind]
    codec = parse("codec", f"half:{kind}")
    scales = 2.0 ** (torch.arange(count, dtype=dtype) % 20 - 10)  # inside fp16's normal range
    flat = (1 + noise(count, dtype).abs().clamp(max=8)) * scales * (1 - 2 * (torch.arange(count) % 2))
    (coded,), ((collective,),) = collected(codec, [flat])
    assert ((coded.total - flat).abs() <= unit * flat.abs()).all()
    assert collective.payload.nbytes == 2 * count


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_half_keeps_what_sixteen_bits_hold_and_rounds_what_they_do_not(kind, dtype):
    _, unit = HALVES[kind]
    flat = torch.tensor([0.0, 1.0, -1.5, 1 + 2 * unit, 1 + 0.5 * unit, 1 + 1.5 * unit], dtype=dtype)
    want = torch.tensor([0.0, 1.0, -1.5, 1 + 2 * unit, 1.0, 1 + 2 * unit], dtype=dtype)
    (coded,), _ = collected(parse("codec", f"half:{kind}"), [flat])
    assert torch.equal(coded.total, want)


@pytest.mark.parametrize("keep", [0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_topk_keeps_exactly_the_largest_magnitudes(keep, dtype, count):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    magnitudes = (order + 1).to(dtype)  # all different, so that the largest k are one set
    flat = magnitudes * (1 - 2 * (order % 2))
    k = math.ceil(keep * count)
    want = torch.where(magnitudes > count - k, flat, torch.zeros_like(flat))
    (coded,), ((collective,),) = collected(parse("codec", f"topk:keep={keep}"), [flat])
    assert torch.equal(coded.total, want)
    assert coded.total.count_nonzero() == k
    assert collective.operation == ALL_GATHER


@pytest.mark.parametrize("keep", [0, -0.1, 1.5])
def test_topk_refuses_a_share_that_is_none(keep):
    with pytest.raises(ValueError, match=f"0 < keep <= 1; got keep={keep}"):
        parse("codec", f"topk:keep={keep}")
