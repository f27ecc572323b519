"""At the start every node has rank 0's weights, and those that are equal by their seeds are not sent."""

from __future__ import annotations

import pytest
import torch

import ranks
from paceline.exchange.flow.control import Control, digest
from paceline.link import memory

LARGE, SMALL = 250_000, 10


def tensors(rank: int, unlike: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Four weights from one seed, of which some are another on each rank, then a bit that only rank 1 has."""
    dice = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=dice) for size in (LARGE, SMALL, LARGE, LARGE)]
    for number in unlike:
        made[number] += rank
    return [made[0], made[1], made[2].view(500, 500).t(), made[3].to(torch.bfloat16)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("unlike", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_only_what_differs_is_sent_and_all_end_with_rank_0s(size, unlike):
    def work(link):
        own = tensors(link.rank, unlike)
        Control(memory.Members(link)).broadcast(own)
        return own, link.sent_bytes

    told = ranks.run(size, work, memory.world(size))
    want = tensors(0, unlike)
    for own, _ in told:
        for one, other in zip(own, want, strict=True):
            assert torch.equal(one, other)
    whole = sum(want[number].nbytes for number in unlike)
    digests = (size - 1) * 4 * 64
    assert whole * (size - 1) <= told[0][1] <= whole * (size - 1) + digests


def test_one_bit_that_differs_is_a_difference():
    """Zeros of either sign are equal as numbers, and train to other weights."""

    def work(link):
        own = torch.zeros(2 * LARGE)
        own[LARGE] = 0.0 if link.rank == 0 else -0.0
        Control(memory.Members(link)).broadcast([own])
        return own

    for own in ranks.run(2, work, memory.world(2)):
        assert not torch.signbit(own).any()


def test_a_digest_is_of_values_in_their_order_and_of_nothing_else():
    values = torch.arange(12.0).view(3, 4)
    assert digest(values) == digest(values.t().contiguous().t()) == digest(torch.arange(12.0))
    assert digest(values) != digest(values.t())
    assert digest(torch.empty(0)) == digest(torch.empty(0, 5))
