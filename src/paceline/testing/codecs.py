"""Laws of a codec: its collectives are as declared, all nodes get one sum, and it keeps no secrets."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.contract import Codec
from paceline.exchange.flow.together import declared
from paceline.messages import FACTORS, Bucket, Coded, Collective, StepContext
from paceline.testing.in_process import in_process, recorded, replayed
from paceline.testing.law import Law

Make = Callable[[], Codec]
SEED = 5


def bucket_of(*shapes: tuple[int, ...], index: int = 0) -> Bucket:
    return Bucket(index, tuple(f"weight{i}" for i in range(len(shapes))), tuple(shapes))


BUCKETS = {
    "one": bucket_of((1,)),
    "few": bucket_of((7,)),
    "matrix": bucket_of((40, 25)),
    "layers": bucket_of((12, 3, 3, 3), (12,), (5, 60), (), (3, 0), index=4),
}
LARGE = bucket_of((512, 512), (512,), (200, 300))  # is computed by several threads where there are some
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.complex64
SIZES = 1, 2, 3
CLOSE = {torch.float64: 1e-12, torch.bfloat16: 2.0**-7}  # one rounding per node, of the sum's type; else 1e-5
SIXTEEN_BITS = 2.0**-6  # where a codec rounds to 16 bits, and more than two nodes add in them


def noise(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def collected(
    codec: Codec,
    values: Sequence[Tensor],
    step: int = 0,
    bucket: Bucket | None = None,
    states: Sequence[Any] | None = None,
) -> tuple[list[Coded], list[list[Collective]]]:
    """(each node's result, its collectives) of a step in which each node has one of ``values``."""
    bucket = bucket or bucket_of((values[0].numel(),))
    states = [codec.init(bucket, SEED) for _ in values] if states is None else states
    return in_process(
        [
            declared(codec, bucket, flat.clone(), state, StepContext(step, rank, len(values), wants_residual=True))
            for rank, (flat, state) in enumerate(zip(values, states, strict=True))
        ]
    )


def gradients(bucket: Bucket, dtype: torch.dtype, size: int, step: int = 0) -> list[Tensor]:
    return [noise(bucket.numel, dtype, 10 * step + rank) for rank in range(size)]


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, through tuples, lists and dictionaries."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def used(codec: Codec, bucket: Bucket, dtype: torch.dtype, size: int) -> list[Any]:
    """The states that two applied steps have left."""
    states = [codec.init(bucket, SEED) for _ in range(size)]
    for step in range(2):
        coded, _ = collected(codec, gradients(bucket, dtype, size, step), step, bucket, states)
        states = [each.state for each in coded]
    return states


def collectives_are_as_declared_and_all_nodes_get_one_sum(
    make: Make, bucket: Bucket, dtype: torch.dtype, size: int
) -> None:
    codec = make()
    coded, collectives = collected(codec, gradients(bucket, dtype, size), bucket=bucket)
    rounds = codec.rounds(bucket, size, dtype)
    for each in collectives:
        for one, said in zip(each, rounds, strict=True):
            assert one.payload.nbytes > 0
            if said.even:
                assert one.payload.nbytes == said.max_bytes
                assert one.payload.dim() == 1, "it could not be sent in one message with others"
    for result in coded:
        assert result.total.shape == (bucket.numel,)
        assert result.total.dtype == dtype
        assert result.total.any(), "nothing arrived"
        assert equal(result.total, coded[0].total)
        owed = result.residual
        assert owed is None or (owed.shape, owed.dtype) == ((bucket.numel,), dtype)


def equal_inputs_give_equal_payloads_from_two_codecs(make: Make, bucket: Bucket) -> None:
    found = []
    for codec in (make(), make()):
        states = used(codec, bucket, torch.float32, 3)
        coded, collectives = collected(codec, gradients(bucket, torch.float32, 3, 2), 2, bucket, states)
        payloads = [one.payload for each in collectives for one in each]
        found.append(([(each.total, each.residual, each.state) for each in coded], payloads))
    assert equal(*found)


def a_run_changes_no_state_and_not_itself(make: Make, bucket: Bucket, dtype: torch.dtype) -> None:
    codec = make()
    states = used(codec, bucket, dtype, 2)
    before, own = copy.deepcopy(states), copy.deepcopy({k: v for k, v in vars(codec).items() if k != "inner"})
    collected(codec, gradients(bucket, dtype, 2, 2), 2, bucket, states)
    assert equal(states, before)
    assert {k: v for k, v in vars(codec).items() if k != "inner"} == own


def zeros_arrive_as_finite_numbers(make: Make, bucket: Bucket, dtype: torch.dtype) -> None:
    codec = make()
    coded, _ = collected(codec, [torch.zeros(bucket.numel, dtype=dtype)], 0, bucket)
    assert coded[0].total.isfinite().all()
    # and do no harm to the step after
    coded, _ = collected(codec, gradients(bucket, dtype, 1, 1), 1, bucket, [coded[0].state])
    assert coded[0].total.isfinite().all()


def what_is_not_finite_arrives_as_such(make: Make, bad: float, size: int) -> None:
    """A sum that looked finite would be applied."""
    bucket = BUCKETS["matrix"]
    values = gradients(bucket, torch.float32, size)
    values[-1][3] = bad
    coded, _ = collected(make(), values, bucket=bucket)
    assert not any(each.total.isfinite().all() for each in coded)


def whole_numbers_arrive_as_their_sum(make: Make, bucket: Bucket, dtype: torch.dtype, size: int) -> None:
    """Unless the codec is approximate. Up to 15 each, so that their sums are exact in any 16-bit float."""
    codec = make()
    values = [((rank + 1) * (torch.arange(bucket.numel) % 5 + 1)).to(dtype) for rank in range(size)]
    want = torch.stack(values).sum(0)
    coded, _ = collected(codec, values, bucket=bucket)
    assert codec.fidelity == "approximate" or all(torch.equal(each.total, want) for each in coded)


def an_exact_codec_is_the_identity(make: Make, bucket: Bucket, dtype: torch.dtype) -> None:
    codec, (flat,) = make(), gradients(bucket, dtype, 1)
    (coded,), _ = collected(codec, [flat], bucket=bucket)
    assert codec.fidelity != "exact" or (torch.equal(coded.total, flat) and coded.residual is None)


def all_that_was_sent_is_the_sum(make: Make, bucket: Bucket, dtype: torch.dtype, size: int) -> None:
    """Or else a residual is kept that is not owed."""
    codec, values = make(), gradients(bucket, dtype, size)
    coded, _ = collected(codec, values, bucket=bucket)
    sent = [flat if each.residual is None else flat - each.residual for flat, each in zip(values, coded, strict=True)]
    rounds_sums = codec.fidelity == "rounded" and size > 2
    close = SIXTEEN_BITS if rounds_sums else CLOSE.get(dtype, 1e-5)
    largest = sum(float(each.abs().max()) for each in values)
    assert float((coded[0].total - torch.stack(sent).sum(0)).abs().max()) <= 3 * close * largest


def factors_of_all_nodes_lie_one_below_the_other(make: Make, size: int) -> None:
    """If the codec is one for factors. Nodes may have unlike numbers of rows, or none; 16 bits hold these values."""
    codec, layer = make(), Bucket(3, ("weight",), ((5, 4),), linear=True)
    parts = [torch.arange(9.0 * rows).view(rows, 9) + rows for rows in (3, 0, 2)[:size]]
    if FACTORS in codec.kinds:
        coded, _ = in_process(
            [
                declared(codec, layer.as_factors(len(part)), part, codec.init(layer, SEED), StepContext(0, rank, size))
                for rank, part in enumerate(parts)
            ]
        )
        assert all(torch.equal(each.total, torch.cat(parts)) for each in coded)


def states_are_redistributed_to_any_number_of_nodes(make: Make, size: int) -> None:
    codec, bucket = make(), BUCKETS["matrix"]
    states = used(codec, bucket, torch.float32, 3)
    redistributed = [codec.redistribute(states, rank, size) for rank in range(size)]
    if size == len(states):
        assert equal(redistributed, states)
    coded, _ = collected(codec, gradients(bucket, torch.float32, size, 2), 2, bucket, redistributed)
    assert all(each.total.isfinite().all() for each in coded)


def with_other_nodes_all_have_one_sum_again(make: Make) -> None:
    """Two nodes that have trained, and one that joins and has no state yet."""
    codec, bucket = make(), BUCKETS["matrix"]
    states = [codec.on_view_change(bucket, state, SEED) for state in used(codec, bucket, torch.float32, 2)]
    states.append(codec.init(bucket, SEED))
    values = gradients(bucket, torch.float64, 3, 2)
    coded, _ = collected(codec, [each.float() for each in values], 2, bucket, states)
    assert all(equal(each.total, coded[0].total) for each in coded)


def a_total_has_the_same_bits_with_any_number_of_threads(make: Make, size: int) -> None:
    """Given what was received: nodes that compute in other ways must not become unlike."""
    codec, threads, found = make(), torch.get_num_threads(), []
    values, received = gradients(LARGE, torch.float32, size), [list[Any]() for _ in range(size)]
    runs = [
        declared(codec, LARGE, flat.clone(), codec.init(LARGE, SEED), StepContext(0, rank, size))
        for rank, flat in enumerate(values)
    ]
    coded, _ = in_process([recorded(run, own) for run, own in zip(runs, received, strict=True)])
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            run = declared(codec, LARGE, values[0].clone(), codec.init(LARGE, SEED), StepContext(0, 0, size))
            found.append(replayed(run, received[0]).total)
    finally:
        torch.set_num_threads(threads)
    for total in found:
        assert equal(total, coded[0].total), f"{int((total != coded[0].total).sum())} of {LARGE.numel} values differ"


def laws() -> list[Law]:
    return list(_laws())


def _laws() -> Iterator[Law]:
    buckets = [(name, {"bucket": bucket}) for name, bucket in BUCKETS.items()]
    types = [(str(dtype).removeprefix("torch."), {"dtype": dtype}) for dtype in DTYPES]
    sizes = [(str(size), {"size": size}) for size in SIZES]
    bad = [(str(value), {"bad": value}) for value in (math.nan, math.inf)]
    over: list[tuple[Callable[..., None], list[list[tuple[str, dict[str, Any]]]]]] = [
        (collectives_are_as_declared_and_all_nodes_get_one_sum, [buckets, types, sizes]),
        (equal_inputs_give_equal_payloads_from_two_codecs, [buckets]),
        (a_run_changes_no_state_and_not_itself, [buckets, types]),
        (zeros_arrive_as_finite_numbers, [buckets, types]),
        (what_is_not_finite_arrives_as_such, [bad, sizes]),
        (whole_numbers_arrive_as_their_sum, [buckets, types[:2], sizes]),
        (an_exact_codec_is_the_identity, [buckets, types]),
        (all_that_was_sent_is_the_sum, [buckets, types, sizes]),
        (factors_of_all_nodes_lie_one_below_the_other, [sizes]),
        (states_are_redistributed_to_any_number_of_nodes, [sizes]),
        (with_other_nodes_all_have_one_sum_again, []),
        (a_total_has_the_same_bits_with_any_number_of_threads, [sizes]),
    ]
    for check, axes in over:
        for values in itertools.product(*axes):
            merged = {key: value for _, each in values for key, value in each.items()}
            yield Law(check, merged, tuple(name for name, _ in values))
