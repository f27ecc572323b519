"""Stochastic 8-bit sums: unbiased, bounded, the same on a repeated step, unlike on each node."""

import pytest
import torch

from paceline.registry import parse
from paceline.testing.codecs import bucket_of, collected, noise

COUNT, BLOCK = 1000, 64
BUCKET = bucket_of((COUNT,))


def level(values):
    """The step between two integers, for each value."""
    largest = torch.nn.functional.pad(torch.stack(values).abs().amax(0), (0, -COUNT % BLOCK)).view(-1, BLOCK).amax(1)
    return (largest / (127 // len(values)))[:, None].expand(-1, BLOCK).reshape(-1)[:COUNT]


@pytest.mark.parametrize("size", [1, 3])
def test_its_mean_is_the_sum(size):
    """Every value's mean over 400 steps, against its deviation in closed form."""
    codec, steps = parse("codec", f"qsgd:block={BLOCK}"), 400
    values = [noise(COUNT, torch.float64, rank) for rank in range(size)]
    runs = [collected(codec, [v.clone() for v in values], step, BUCKET)[0][0].total for step in range(steps)]
    up = [(v / level(values)).remainder(1) for v in values]  # the probability to be rounded up
    deviation = level(values) * (sum(p * (1 - p) for p in up) / steps).sqrt()
    z = (torch.stack(runs).mean(0) - sum(values)) / deviation.clamp(min=1e-9)
    assert float(z.square().mean()) == pytest.approx(1.0, abs=0.2)
    assert abs(float(z.mean())) < 4 / COUNT**0.5


@pytest.mark.parametrize("size", [1, 2, 5, 127])
def test_each_error_is_less_than_a_level_per_node(size):
    values = [noise(COUNT, torch.float64, rank) for rank in range(size)]
    (coded, *_), collectives = collected(parse("codec", f"qsgd:block={BLOCK}"), [v.clone() for v in values], 0, BUCKET)
    assert ((coded.total - sum(values)).abs() <= size * level(values) * (1 + 1e-12)).all()
    assert all(each[1].payload.dtype == torch.int8 for each in collectives)
    whole = sum(each[1].payload.int() for each in collectives)
    assert int(whole.abs().max()) <= 127, "the sum fits into 8 bits"


def test_a_repeated_step_sends_the_same_and_no_other_does():
    codec = parse("codec", "qsgd")

    def sent(step, index=0):
        _, collectives = collected(codec, [noise(COUNT)] * 2, step, bucket_of((COUNT,), index=index))
        return [each[1].payload for each in collectives]

    one, again = sent(3), sent(3)
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], one[1]), "errors of two nodes with the same noise would add up"
    assert not torch.equal(one[0], sent(4)[0])
    assert not torch.equal(one[0], sent(3, index=1)[0])


def test_more_nodes_than_eight_bits_can_count_are_refused():
    with pytest.raises(ValueError, match="of at most 127 nodes; there are 128"):
        parse("codec", "qsgd").rounds(BUCKET, 128, torch.float32)


@pytest.mark.parametrize("bad", ["0", "1.5"])
def test_wrong_blocks_are_refused(bad):
    with pytest.raises(ValueError, match="blocks of at least one value"):
        parse("codec", f"qsgd:{bad}")
