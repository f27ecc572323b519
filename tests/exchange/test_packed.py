"""Numbers that travel in fewer bytes come out bit by bit as they went in, and training does not see it."""

import pytest
import torch
import zstandard
from test_forms_by_seconds import Late, Slow
from torch import nn
from torch.nn import functional as F

import ranks
from nodes import HIDDEN, IN, OUT, Plain, Rank, build, engine_of, rows
from paceline.codec.encoding.packing import HEAD, WHOLE, fits, joined, pack, unpack
from paceline.exchange.allreduce import Exchange
from paceline.exchange.flow.autotuner import HIGH_BANDWIDTH_S, Autotuner
from paceline.exchange.flow.control import Control
from paceline.exchange.flow.costs import SLOW_S
from paceline.exchange.flow.wire_rates import SPAN
from paceline.link.memory import Members
from paceline.messages import DENSE, FACTORS, Bucket, CommCost, Decision, Gradient, Vote
from paceline.registry import parse

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.reshape(-1).view(torch.uint8))


def noise(count, dtype=torch.float32, zeros=0.0):
    """Channels of different sizes, as gradients are."""
    dice = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=dice) * torch.rand(-(-count // 64), generator=dice).repeat_interleave(64)[:count]
    return (x * (torch.rand(count, generator=dice) >= zeros)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_every_bit_comes_back(dtype, zeros, count):
    x = noise(count, dtype, zeros)
    packed = pack(x)
    assert same(unpack(packed, dtype), x)
    assert packed.numel() <= x.nbytes + HEAD.size


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_strange_numbers_come_back_too(dtype):
    """Between many zeros, and between none: what tells a zero from a number that is almost one differs."""
    limits = torch.finfo(dtype)
    tiny = limits.smallest_normal
    odd = [float("nan"), float("inf"), -float("inf"), -0.0, limits.max, limits.min, tiny, -tiny, tiny / 2, -tiny / 4]
    for around in (torch.zeros(3000), torch.ones(3000), torch.randn(3000)):
        for number in odd:
            x = around.to(dtype)
            x[[5, 1999]] = torch.tensor(number, dtype=dtype)
            assert same(unpack(pack(x), dtype), x), number


def test_numbers_of_16_bytes_and_of_one_are_not_packed():
    assert [fits(torch.ones(2, dtype=dtype)) for dtype in (*TYPES, torch.complex128, torch.int8)] == [True] * 4 + [
        False
    ] * 2


def test_any_bits_at_all_come_back():
    dice = torch.Generator().manual_seed(3)
    x = torch.randint(0, 256, (4 * 10_000,), dtype=torch.uint8, generator=dice).view(torch.float32)
    assert same(unpack(pack(x), torch.float32), x)


def test_fewer_bytes():
    for dtype, zeros, most in (
        (torch.float32, 0.0, 0.9),
        (torch.bfloat16, 0.0, 0.75),
        (torch.float32, 0.6, 0.45),
        (torch.bfloat16, 0.6, 0.45),
    ):
        x = noise(100_000, dtype, zeros)
        assert pack(x).numel() < most * x.nbytes


def test_a_view_of_other_memory_is_packed_as_it_reads():
    x = noise(6000).view(60, 100).t()
    assert same(unpack(pack(x), torch.float32), x)


@pytest.mark.parametrize(
    "spoil", [lambda p: p[:9], lambda p: p[:-5], lambda p: p[:-4999], lambda p: torch.cat([p[:25], p[25:] ^ 0xFF])]
)
def test_what_is_damaged_is_an_error(spoil):
    with pytest.raises(ValueError, match=r"are no packed torch\.float32"):
        unpack(spoil(pack(noise(5000))), torch.float32)


def test_a_code_of_more_numbers_than_are_told_is_an_error_before_it_takes_memory():
    coded = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    told = HEAD.pack(WHOLE, 10, len(coded)) + coded + bytes(30)
    with pytest.raises(ValueError, match=f"a code of {1 << 20} bytes for 10 numbers"):
        unpack(torch.frombuffer(bytearray(told), dtype=torch.uint8), torch.float32)


class Seen(nn.Module):
    """A convolution, whose gradient no factors have, and a layer that reads what a ReLU left of it."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.head = (
            nn.Conv2d(1, 64, 9, padding=4),
            nn.Linear(64 * 24, HIDDEN),
            nn.Linear(HIDDEN, OUT),
        )

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x.view(len(x), 1, 8, IN // 8))), 2)
        return self.head(F.relu(self.fc(x.flatten(1))))


def trained(link, model, packed, forms="bytes", codec="none", overlap="backward", shares=None):
    exchange = parse("exchange", f"allreduce:forms={forms},packed={packed}")
    exchange.overlap = overlap
    rank = Rank(link, model, exchange=exchange, codec=codec, shares=shares)
    losses = rank.train([rows(24, seed, torch.float32) for seed in range(6)])
    rank.engine.wait_pending()
    sent_bytes = rank.exchange._lane.sent_bytes
    rank.exchange.close()
    return rank.state(), losses, sent_bytes, rank.exchange.forms()


def compared(size, kind=Plain, **how):
    model = build(kind, torch.float32)
    plain, packed = (ranks.run(size, lambda link, p=p: trained(link, model, p, **how)) for p in ("never", "always"))
    for (one, losses, _, forms), (other, same_losses, _, same_forms) in zip(plain, packed, strict=True):
        assert losses == same_losses
        assert forms == same_forms
        assert all(torch.equal(one[name], other[name]) for name in one)
    return plain, packed


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("forms", [DENSE, FACTORS])
def test_training_is_the_same_bits_and_sends_less(size, forms):
    plain, packed = compared(size, forms=forms)
    for (*_, many, told), (*_, few, _) in zip(plain, packed, strict=True):
        if forms == FACTORS:
            assert FACTORS in told
        if forms == FACTORS or size == 2:
            assert few < 0.95 * many
        else:  # dense among three: a gather would be more than a sum
            assert few == many


@pytest.mark.parametrize("codec", ["half", "half:type=fp16", "topk:keep=0.2"])
def test_under_codecs(codec):
    plain, packed = compared(2, codec=codec)
    assert packed[0][2] < 0.95 * plain[0][2]


def test_with_forward_overlap_and_shares_that_differ():
    for plain, packed in (compared(2, overlap="forward"), compared(3, shares=(3.0, 1.0, 2.0), forms=FACTORS)):
        assert sum(few[2] for few in packed) < 0.95 * sum(many[2] for many in plain)


def test_a_convolution_too():
    plain, packed = compared(2, Seen, forms=FACTORS)
    assert all(few[2] < 0.9 * many[2] for many, few in zip(plain, packed, strict=True))


def test_only_a_slow_wire_is_worth_it_and_what_was_begun_is_kept():
    seen = decided(1 << 20)
    assert seen == [False, True, True, False]
    assert not any(decided(1000)), "a small message takes long for what it is"


def decided(numel):
    bucket = Bucket(0, ("weight",), ((numel,),), False)
    choice = Autotuner(
        *((bucket,), 2, dict.fromkeys((DENSE, FACTORS), parse("codec", "none")), "measured", 1),
        optimizer_takes_factors=False,
        by_need=False,
    )
    seen = []
    for per_byte in (0.5, 1.2, 0.7, 0.4):
        for _ in range(SPAN):
            choice.learn(Vote(took=(per_byte * SLOW_S * 4 * numel,), ready=(0.0,)), [CommCost(2, 4 * numel)])
        seen.append(choice.packed)
    return seen


class Narrow(Slow):
    """Slow for packed sums, too."""

    def lane(self, name):
        return Narrow(self.hub, self.rank, self.generation, f"{self.name}/{name}")

    def all_gather(self, tensor, what="all-gather", even=False):
        handle = super().all_gather(tensor, what, even)
        return Late(handle, self.per_byte * tensor.nbytes) if "sum of" in what else handle


def test_a_slow_link_is_packed_for_and_measured_by_what_it_carries(monkeypatch):
    """One bound alone: a busy machine makes it slower still."""

    def work(link):
        rank = Rank(link, build(dtype=torch.float32), exchange=Exchange())
        rank.train([rows(24, seed, torch.float32) for seed in range(2 * SPAN + 2)])
        choice = rank.exchange.choice
        rank.exchange.close()
        return choice.packed, choice.rates.per_byte

    monkeypatch.setattr("paceline.exchange.flow.autotuner.LARGE_BYTES", 1 << 12)  # layers of tests are small
    hub = ranks.memory.Hub(2)
    one, other = ranks.run(2, work, [Narrow(hub, 0), Narrow(hub, 1)])
    assert one == other
    assert one[0]
    assert one[1] >= 0.9 * Narrow.per_byte, "and not by what it would have carried"


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="packed is one of measured, always, never, got 'sometimes'"):
        parse("exchange", "allreduce:packed=sometimes")
    assert HIDDEN * HIDDEN * 4 > 1 << 14, "the layers of these tests are large enough to be packed"


@pytest.mark.parametrize("packed", ["never", "always"])
@pytest.mark.parametrize("codec", ["half", "half:fp16", "feedback/half"])
def test_two_add_sixteen_bits_in_the_gradients_own_type(codec, packed):
    """One and a small part of it are numbers of 16 bits; their sum is none."""
    buckets = [Bucket(i, (f"w{i}",), ((count,),)) for i, count in enumerate((40_000, 7))]

    def work(link):
        exchange = Exchange(packed=packed)
        exchange.open(engine_of(buckets), link, parse("codec", codec))
        exchange.begin()
        for bucket in buckets:
            exchange.put(Gradient(bucket, flat=torch.full((bucket.numel,), (1.0, 2.0**-14)[link.rank])))
        said = {"used": b"\1\1", "dense": b"\0\0", "rows": (0, 0), "weight": 0.5, "expected": 1.0}
        outcome = Control(Members(link)).commit(exchange.collect(Vote(**said)), exchange.finish)
        assert outcome.decision is Decision.COMMIT
        return [gradient.flat for gradient in outcome.gradients]

    for found in ranks.run(2, work):
        for flat in found:
            assert flat.dtype == torch.float32
            assert torch.equal(flat, torch.full_like(flat, 1 + 2.0**-14))


def test_rows_that_lie_side_by_side_are_joined_where_they_lie():
    whole = torch.arange(24.0).reshape(8, 3)
    a, b, c = whole.split([3, 0, 5])
    for parts, copied in (([a, b, c], False), ([b, c], False), ([c, a], True), ([a, c.clone()], True)):
        got = joined(parts)
        assert torch.equal(got, torch.cat(parts))
        assert (got.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()) == copied
    assert joined([b, b]).shape == (0, 3)
    half = whole[:, :2]
    assert torch.equal(joined([half[:3], half[3:]]), half), "rows with something between them are copied"


def test_a_quick_wire_is_known_by_its_rate_and_told_to_the_lane():
    """Around the bound nobody goes back and forth."""
    bucket, told = Bucket(0, ("weight",), ((1 << 20,),)), []

    class Told(ranks.memory.Link):
        def lane(self, name):
            return Told(self.hub, self.rank, self.generation, f"{self.name}/{name}")

        def set_regime(self, quick):
            told.append(quick)

    def work(link):
        exchange, seen = Exchange(), []
        exchange.open(engine_of([bucket]), link, parse("codec", "none"))
        for per_byte in (1.1, 0.9, 1.1, 1.4):
            for _ in range(SPAN):
                took = (per_byte * HIGH_BANDWIDTH_S * 4 * bucket.numel,)
                exchange.choice.learn(Vote(took=took, ready=(0.0,)), [CommCost(2, 4 * bucket.numel)])
            seen.append(exchange.choice.high_bandwidth)
            exchange.begin()
            exchange.put(Gradient(bucket, flat=torch.ones(bucket.numel)))
            exchange.receive(exchange._flight, bucket)
        exchange.close()
        return seen

    hub = ranks.memory.Hub(2)
    assert ranks.run(2, work, [Told(hub, rank) for rank in range(2)]) == [[False, True, True, False]] * 2
    assert sorted(told) == [False] * 4 + [True] * 4
