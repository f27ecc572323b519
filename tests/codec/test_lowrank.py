"""Low-rank sums: exact at full width, the bytes of DDP's hook, a warm start that all nodes share."""

import math

import pytest
import torch

from paceline.registry import parse
from paceline.testing.codecs import bucket_of, collected, noise

LAYERS = bucket_of((64, 27), (64,), (10, 512), (10,), (512, 64))


def low(rows, columns, rank, seed):
    """A matrix of this rank, flat."""
    left = noise(rows * rank, torch.float64, seed).view(rows, rank)
    return (left @ noise(rank * columns, torch.float64, seed + 1).view(rank, columns)).reshape(-1)


@pytest.mark.parametrize("shape", [(40, 25), (25, 40), (6, 3, 5, 5)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_full_width_is_exact(shape, size):
    codec, bucket = parse("codec", "lowrank:rank=64,min_rate=0"), bucket_of(shape)
    values = [noise(bucket.numel, torch.float64, rank) for rank in range(size)]
    want = sum(values)
    coded, collectives = collected(codec, values, bucket=bucket)
    assert len(collectives[0]) == 2
    assert float((coded[0].total - want).norm() / want.norm()) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sum_of_that_rank_is_exact(size):
    codec, bucket = parse("codec", f"lowrank:{size}"), bucket_of((60, 50))
    values = [low(60, 50, 1, 7 * rank) for rank in range(size)]
    want = sum(values)
    coded, _ = collected(codec, values, bucket=bucket)
    assert float((coded[0].total - want).norm() / want.norm()) < 1e-12


def test_vectors_and_small_matrices_are_sent_whole():
    codec, bucket = parse("codec", "lowrank:2"), bucket_of((3, 3), (50,), (40, 40), ())
    values = [noise(bucket.numel, torch.float64, rank) for rank in range(2)]
    want = sum(values)
    (coded, _), _ = collected(codec, values, bucket=bucket)
    matrix = slice(9 + 50, 9 + 50 + 1600)
    assert torch.equal(coded.total[: matrix.start], want[: matrix.start])
    assert torch.equal(coded.total[matrix.stop :], want[matrix.stop :])
    assert torch.linalg.matrix_rank(coded.total[matrix].view(40, 40)) == 2


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_bytes_are_those_of_the_hook_of_ddp(rank):
    """Its rule (torch 2.13, powerSGD_hook._should_compress): compressed if (rows + columns) * rank * rate < numel."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

    codec, numel = parse("codec", f"lowrank:{rank}"), 0
    for shape in LAYERS.shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        compress, before, after = _should_compress(rows, columns, rank, 2) if len(shape) > 1 else (False, rows, 0)
        numel += after if compress else before
    (_, collectives) = collected(codec, [noise(LAYERS.numel)], bucket=LAYERS)
    assert sum(each.payload.nbytes for each in collectives[0]) == 4 * numel
    assert sum(each.max_bytes for each in codec.rounds(LAYERS, 2, torch.float32)) == 4 * numel


def test_the_warm_start_finds_the_largest_directions():
    """Steps with one gradient are power iterations: the error falls to that of the best approximation."""
    bucket = bucket_of((30, 20))
    matrix = noise(600, torch.float64).view(30, 20)
    _, s, _ = torch.linalg.svd(matrix)
    best, codec = float(s[2:].norm()), parse("codec", "lowrank:2")
    states, errors = [codec.init(bucket, 0)] * 2, []
    for step in range(60):
        coded, _ = collected(codec, [matrix.reshape(-1) / 2] * 2, step, bucket, states)
        states = [each.state for each in coded]
        errors.append(float((coded[0].total.view(30, 20) - matrix).norm()))
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_gradients_of_any_size_for_many_steps(scale):
    """What is kept does not grow or vanish with the gradient, step by step."""
    bucket, codec = bucket_of((30, 20)), parse("codec", "lowrank:2")
    states = [codec.init(bucket, 0)]
    for step in range(50):
        (coded,), _ = collected(codec, [noise(600) * scale], step, bucket, states)
        states = [coded.state]
    assert 0.3 < float((coded.total / scale).norm()) / 600**0.5 < 1


def test_zeros_do_not_stop_it():
    bucket, codec = bucket_of((30, 20)), parse("codec", "lowrank:2")
    states = [codec.init(bucket, 0)]
    for step in range(3):
        (coded,), _ = collected(codec, [torch.zeros(600)], step, bucket, states)
        states = [coded.state]
        assert not coded.total.any()
    for step in range(30):
        (coded,), _ = collected(codec, [noise(600)], step, bucket, states)
        states = [coded.state]
    _, s, _ = torch.linalg.svd(noise(600).view(30, 20))
    assert float((coded.total - noise(600)).norm()) < 1.02 * float(s[2:].norm())


def test_with_other_nodes_all_begin_anew_alike():
    """A joining node has no warm start, and P of unlike Q would be no sum."""
    bucket, codec = LAYERS, parse("codec", "feedback/lowrank:2")
    states = [codec.init(bucket, 3)] * 2
    coded, _ = collected(codec, [noise(bucket.numel, seed=rank) for rank in range(2)], 0, bucket, states)
    after = [codec.on_view_change(bucket, each.state, 3) for each in coded]
    fresh = codec.init(bucket, 3)
    for each, state in zip(coded, after, strict=True):
        assert torch.equal(state[0], each.state[0]), "the residual is kept"
        (*_, again), (*_, first), (*_, warm) = state[1], fresh[1], each.state[1]
        assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(warm, first, strict=True))


def test_a_state_of_other_options_is_not_used():
    """Resumed with another rank, a checkpoint's matrices would keep their own."""
    bucket, values = LAYERS, [noise(LAYERS.numel)]
    (before,), _ = collected(parse("codec", "lowrank:1"), values, 0, bucket)
    codec = parse("codec", "lowrank:4")
    (found,), _ = collected(codec, values, 1, bucket, [before.state])
    (fresh,), _ = collected(codec, values, 1, bucket, [codec.init(bucket, 5)])
    assert torch.equal(found.total, fresh.total)
    assert found.state[1] == 4


@pytest.mark.parametrize("bad", ["rank=0", "rank=1.5", "min_rate=-1"])
def test_wrong_options_are_refused(bad):
    with pytest.raises(ValueError, match="codec 'lowrank'"):
        parse("codec", f"lowrank:{bad}")
