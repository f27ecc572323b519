"""Laws of a link: collectives give the closed form of what the ranks put in, and count the bytes that they declare."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.errors import LinkError
from paceline.testing.law import Law
from paceline.transport import Handle, Link

COUNTS = (0, 1, 7, 1000)  # empty, one, a prime, more than one packet of eight
LARGE = 70_001  # a message that a slow network gets in several parts, of which the last is smaller
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LIMIT_S = 15.0


def pattern(count: int) -> Tensor:
    """1 .. 7 over and over: times ranks up to 5, and added up, even bfloat16 holds it exactly."""
    return torch.arange(count, dtype=torch.float64) % 7 + 1


def signs(count: int) -> Tensor:
    return 1 - 2 * (torch.arange(count, dtype=torch.float64) % 2)


def same(got: Tensor, want: Tensor, *what: object) -> None:
    want = want.to(got.dtype)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.equal(got, want), (what, got, want)


def everyone(link: Link) -> int:
    """1 + 2 + .. + N."""
    return link.size * (link.size + 1) // 2


def sum_adds(link: Link) -> None:
    for dtype in (*FLOATS, torch.int64):
        for count in COUNTS:
            mine = ((link.rank + 1) * pattern(count)).to(dtype)
            result = link.sum(mine).wait(LIMIT_S)
            same(result, everyone(link) * pattern(count), dtype, count)
            assert result is mine


def two_add_up_to_torchs_bits(link: Link) -> None:
    """So it changes nothing where a sum of two is made of a gather."""
    generator = torch.Generator().manual_seed(7)
    for dtype in FLOATS:
        both = [torch.randn(1000, generator=generator, dtype=torch.float64).to(dtype) for _ in range(link.size)]
        result = link.sum(both[link.rank].clone()).wait(LIMIT_S)
        if link.size == 2:
            assert torch.equal(result, both[0] + both[1]), dtype


def sixteen_bits_are_rounded_once_where_that_is_promised(link: Link) -> None:
    """256 + 1 + 1: in bfloat16 alone each 1 is lost."""
    mine = torch.full((9,), 256.0 if link.rank == 0 else 1.0).bfloat16()
    result = link.sum(mine).wait(LIMIT_S)
    assert link.accumulates_fp32 in (False, True)
    if link.accumulates_fp32 and link.size > 2:
        same(result, torch.full((9,), 255.0 + link.size), link.size)


def max_takes_the_largest(link: Link) -> None:
    """Even places are largest on the last rank, odd ones on the first."""
    for dtype in (*FLOATS, torch.int64):
        for count in COUNTS:
            mine = ((link.rank + 1) * signs(count) * pattern(count)).to(dtype)
            link.max(mine).wait(LIMIT_S)
            largest = torch.where(signs(count) > 0, link.size, -1)
            same(mine, largest * pattern(count), dtype, count)


def all_gather_keeps_rank_order(link: Link) -> None:
    for even in (False, True):
        for dtype in (torch.float64, torch.uint8):
            for count in COUNTS:
                mine = ((link.rank + 1) * pattern(3 * count)).view(count, 3).to(dtype)
                before = mine.clone()
                parts = link.all_gather(mine, even=even).wait(LIMIT_S)
                assert len(parts) == link.size
                for rank, part in enumerate(parts):
                    same(part, (rank + 1) * pattern(3 * count).view(count, 3), even, dtype, count)
                same(mine, before, "input")


def all_gather_of_ragged_rows(link: Link) -> None:
    """Rank r has r rows, then N - 1 - r, then only one rank has any."""
    last = link.size - 1
    counts: list[Callable[[int], int]] = [lambda r: r, lambda r: 7 * (last - r), lambda r: 1000 * (r == last)]
    for rows_of in counts:
        rows = rows_of(link.rank)
        mine = (link.rank + 1) * pattern(2 * rows).view(rows, 2)
        for rank, part in enumerate(link.all_gather(mine).wait(LIMIT_S)):
            same(part, (rank + 1) * pattern(2 * rows_of(rank)).view(-1, 2), rank)


def a_gather_is_the_same_over_a_quick_wire(link: Link) -> None:
    """Several megabytes: in stretches, or whole."""
    last = link.size - 1
    counts: list[Callable[[int], int]]
    counts = [lambda r: 40_000, lambda r: 40_000 * (r + 1), lambda r: 90_000 * (r == last)]
    for quick in (False, True, False):
        link.set_regime(quick)
        for rows_of in counts:
            rows = rows_of(link.rank)
            mine = (link.rank + 1) * pattern(8 * rows).view(rows, 8)
            for rank, part in enumerate(link.all_gather(mine).wait(LIMIT_S)):
                same(part, (rank + 1) * pattern(8 * rows_of(rank)).view(-1, 8), rank, quick)


def all_gather_results_are_ones_own(link: Link) -> None:
    parts = link.all_gather(torch.full((3,), link.rank + 1.0)).wait(LIMIT_S)
    for part in parts:
        part.add_(100 * (link.rank + 1))
    link.sum(torch.ones(1)).wait(LIMIT_S)  # everyone has changed theirs
    for rank, part in enumerate(parts):
        same(part, torch.full((3,), rank + 1.0 + 100 * (link.rank + 1)), rank)


def reduce_scatter_gives_each_its_slice(link: Link) -> None:
    for dtype in (torch.float32, torch.float64):
        for count in (*COUNTS, LARGE):
            rows = pattern(2 * link.size * count).view(link.size * count, 2)
            mine = ((link.rank + 1) * rows).to(dtype)
            before = mine.clone()
            part = link.reduce_scatter(mine).wait(LIMIT_S)
            same(part, everyone(link) * rows[link.rank * count : (link.rank + 1) * count], dtype, count)
            same(mine, before, "input")


def shift_gives_what_the_rank_before_has(link: Link) -> None:
    for dtype in (*FLOATS, torch.uint8) if link.size > 1 else ():
        for count in (*COUNTS, LARGE):
            rows = pattern(2 * count).view(2, count)
            mine = ((link.rank + 1) * rows).to(dtype)
            before = mine.clone()
            same(link.shift(mine).wait(LIMIT_S), ((link.rank - 1) % link.size + 1) * rows, dtype, count)
            same(mine, before, "input")


def broadcast_from_every_root(link: Link) -> None:
    for root in range(link.size):
        for count in COUNTS:
            mine = (link.rank + 1) * pattern(count)
            link.broadcast(mine, root).wait(LIMIT_S)
            same(mine, (root + 1) * pattern(count), root, count)


def send_reaches_the_peer_and_tag(link: Link) -> None:
    """Everyone to everyone, two messages each, received in the other order than sent."""
    others = [rank for rank in range(link.size) if rank != link.rank]
    for count in COUNTS:
        out = {(peer, tag): (link.rank + 1) * 10.0**tag * pattern(count) for peer in others for tag in (1, 2)}
        sent = [link.send(tensor, peer, tag) for (peer, tag), tensor in out.items()]
        got = {key: torch.zeros(count, dtype=torch.float64) for key in reversed(list(out))}
        received = [link.recv(tensor, peer, tag) for (peer, tag), tensor in got.items()]
        for handle in (*received, *sent):
            handle.wait(LIMIT_S)
        for (peer, tag), tensor in got.items():
            same(tensor, (peer + 1) * 10.0**tag * pattern(count), peer, tag, count)


def many_are_in_flight_on_two_lanes(link: Link) -> None:
    """Each lane has an order of its own: odd ranks start the second lane first, and all wait backwards."""
    lanes = [link.lane("first"), link.lane("second")]
    flying = []
    for i, lane in reversed(list(enumerate(lanes))) if link.rank % 2 else enumerate(lanes):
        for k in range(6):
            mine = (link.rank + 1) * (10 * i + k + 1) * pattern(1000 * (k % 2) + 7)
            first = mine[:3].clone()  # while a sum is under way its tensor is the link's
            flying.append((i, k, lane.sum(mine)))
            flying.append((i, k, lane.all_gather(first, even=True)))
    for i, k, handle in reversed(flying):
        result = handle.wait(LIMIT_S)
        if isinstance(result, list):
            for rank, part in enumerate(result):
                same(part, (rank + 1) * (10 * i + k + 1) * pattern(3), i, k)
        else:
            same(result, everyone(link) * (10 * i + k + 1) * pattern(1000 * (k % 2) + 7), i, k)
        assert handle.done()


def counted_bytes_are_the_declared_ones(link: Link) -> None:
    mine = (link.rank + 1) * pattern(60 * 8)  # divisible by 1 .. 6 ranks
    operations: dict[str, Callable[[], Handle]] = {
        "sum": lambda: link.sum(mine.clone()),
        "max": lambda: link.max(mine.clone()),
        "all-gather": lambda: link.all_gather(mine, even=True),
        "reduce-scatter": lambda: link.reduce_scatter(mine),
        "broadcast": lambda: link.broadcast(mine.clone()),
    }
    for operation, start in operations.items():
        before = link.sent_bytes
        start().wait(LIMIT_S)
        assert link.sent_bytes - before == link.cost(operation, mine.nbytes).bytes, operation
        assert (link.sent_bytes > before) == (link.size > 1), operation
    if link.size > 1:
        before = link.sent_bytes
        link.shift(mine).wait(LIMIT_S)
        assert link.sent_bytes - before == link.cost("shift", mine.nbytes).bytes == mine.nbytes
        before = link.sent_bytes
        received = link.recv(torch.zeros_like(mine), (link.rank - 1) % link.size)
        link.send(mine, (link.rank + 1) % link.size).wait(LIMIT_S)
        received.wait(LIMIT_S)
        assert link.sent_bytes - before == mine.nbytes
        assert link.cost("send", mine.nbytes).bytes == mine.nbytes


def what_was_started_ends_though_nobody_waits(link: Link) -> None:
    mine = (link.rank + 1) * pattern(1 << 19)
    flying = [link.sum(mine), link.all_gather(mine[:7].clone(), even=True)]
    end = time.monotonic() + LIMIT_S
    while not all(handle.done() for handle in flying):
        assert time.monotonic() < end
        time.sleep(0.01)
    same(flying[0].wait(0.5), everyone(link) * pattern(1 << 19))


def a_late_peer_is_not_a_lost_one(link: Link) -> None:
    late = link.size - 1
    if link.rank == late:
        time.sleep(0.8)
    if link.size > 1 and link.rank == 0:
        same(link.recv(torch.zeros(1), late).wait(LIMIT_S), torch.ones(1), "received late")
    if link.size > 1 and link.rank == late:
        link.send(torch.ones(1), 0).wait(LIMIT_S)
    same(link.sum(torch.ones(1)).wait(LIMIT_S), torch.full((1,), float(link.size)), "added late")


def a_wait_ends_at_its_deadline(link: Link) -> None:
    if link.size > 1 and link.rank == 0:
        late = link.recv(torch.zeros(1), 1)
        start = time.monotonic()
        with contextlib.suppress(LinkError):
            late.wait(0.3)
            raise AssertionError("received what nobody had sent")
        assert 0.2 < time.monotonic() - start < 3.0
    link.sum(torch.ones(1)).wait(LIMIT_S)
    if link.size > 1 and link.rank == 1:
        link.send(torch.ones(1), 0).wait(LIMIT_S)
    if link.size > 1 and link.rank == 0:
        same(late.wait(LIMIT_S), torch.ones(1), "and the operation is still under way")
    link.sum(torch.ones(1)).wait(LIMIT_S)


def laws() -> list[Law]:
    """Each runs on every rank of a link, on a lane of its own."""
    return [
        Law(check)
        for check in (
            sum_adds,
            two_add_up_to_torchs_bits,
            sixteen_bits_are_rounded_once_where_that_is_promised,
            max_takes_the_largest,
            all_gather_keeps_rank_order,
            all_gather_of_ragged_rows,
            a_gather_is_the_same_over_a_quick_wire,
            all_gather_results_are_ones_own,
            reduce_scatter_gives_each_its_slice,
            shift_gives_what_the_rank_before_has,
            broadcast_from_every_root,
            send_reaches_the_peer_and_tag,
            many_are_in_flight_on_two_lanes,
            counted_bytes_are_the_declared_ones,
            what_was_started_ends_though_nobody_waits,
            a_late_peer_is_not_a_lost_one,
            a_wait_ends_at_its_deadline,
        )
    ]
