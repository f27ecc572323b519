"""Every codec obeys the laws of `paceline.testing.codecs`; what half and top-k send, in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.messages import ALL_GATHER
from paceline.registry import names, parse
from paceline.testing import laws
from paceline.testing.codecs import DTYPES, collected, noise

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
HALVES = {"bf16": (torch.bfloat16, 2.0**-8), "fp16": (torch.float16, 2.0**-11)}


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("law", laws("codec"), ids=str)
def test_every_codec(law, text):
    law(lambda: parse("codec", text))


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
