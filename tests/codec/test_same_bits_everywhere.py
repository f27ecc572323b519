"""What a node computes of what all have received has the same bits on every machine, or nodes would become unlike."""

import os
import subprocess
import sys

import pytest
import torch

from paceline import contract
from paceline.codec.encoding.low_rank import bases, product
from paceline.messages import SUM, Coded, Collective, Round
from paceline.registry import parse
from paceline.testing import codecs, in_process, laws

# One machine that stands for several: MKL and torch with the instructions of old processors, or several threads.
MACHINES = {
    "old": {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    "threads": {"OMP_NUM_THREADS": "3"},
    "avx2": {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"},
}
DIGEST = """
import hashlib, sys, torch
from paceline.messages import StepContext
from paceline.registry import parse
from paceline.testing.codecs import LARGE, SEED
from paceline.testing.in_process import replayed

codec, (values, state, received) = parse("codec", sys.argv[1]), torch.load(sys.argv[2])
total = replayed(codec.run(LARGE, values, state, StepContext(0, 0, 2)), received).total
other = torch.linalg.qr(torch.rand(200, 100, generator=torch.Generator().manual_seed(1))).Q
print(*(hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in (total, other)))
"""


OTHERS = "feedback/lowrank:2", "qsgd", "topk:keep=0.1", "half", "lossless/none"


@pytest.mark.parametrize("name", ["lowrank:4", *(pytest.param(name, marks=pytest.mark.dear) for name in OTHERS)])
def test_a_total_has_the_same_bits_on_unlike_machines(name, tmp_path):
    codec, received = parse("codec", name), [[], []]
    values = codecs.gradients(codecs.LARGE, torch.float32, 2)
    states = [codec.init(codecs.LARGE, codecs.SEED) for _ in values]
    runs = [
        codec.run(codecs.LARGE, flat.clone(), state, codecs.StepContext(0, rank, 2))
        for rank, (flat, state) in enumerate(zip(values, states, strict=True))
    ]
    in_process.in_process([in_process.recorded(run, own) for run, own in zip(runs, received, strict=True)])
    torch.save((values[0], states[0], received[0]), tmp_path / "received")
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST, name, str(tmp_path / "received")],
            env={**os.environ, **machine},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split()
        for machine in MACHINES.values()
    ]
    totals, others = zip(*digests, strict=True)
    assert len(set(totals)) == 1
    assert len(set(others)) > 1, "these machines compute alike, so that they prove nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_bases_are_orthonormal_and_span_the_matrix(dtype, scale):
    generator = torch.Generator().manual_seed(3)
    shapes = (5, 3), (1, 1), (64, 4), (1000, 2), (33, 33), (8, 8), (9, 1)
    matrices = [scale * torch.randn(*shape, dtype=dtype, generator=generator) for shape in shapes]
    column = matrices[-1]
    matrices += [torch.cat([column, 2 * column, -column], 1), torch.zeros(7, 3, dtype=dtype)]
    close = 100 * torch.finfo(dtype).eps
    for matrix, basis in zip(matrices, bases(matrices), strict=True):
        assert basis.shape == matrix.shape
        assert float((basis.mH @ basis - torch.eye(basis.shape[1])).abs().max()) < close
        assert float((basis @ (basis.mH @ matrix) - matrix).abs().max()) <= close * float(matrix.abs().max())


@pytest.mark.parametrize("shape", [(3, 2, 1), (300, 7, 4), (2, 70_000, 3), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_product_is_that_of_its_factors(shape, dtype):
    rows, columns, rank = shape
    generator = torch.Generator().manual_seed(4)
    left = torch.randn(rows, rank, dtype=dtype, generator=generator)
    right = torch.randn(columns, rank, dtype=dtype, generator=generator)
    out = torch.empty(rows, columns, dtype=dtype)
    product(left, right, out)
    torch.testing.assert_close(out, left @ right.mH, rtol=1e-13, atol=1e-13)


class Scaled(contract.Codec):
    """Computes of what it has received in an order of torch's choice."""

    def rounds(self, bucket, size, dtype):
        return [Round(SUM, bucket.numel * dtype.itemsize)]

    def run(self, bucket, values, state, context):
        total = yield Collective(SUM, values)
        return Coded(total * (total.sum() / total.sum()) + total.sum(), state)


def test_the_law_finds_a_codec_whose_bits_depend_on_threads():
    (law,) = (each for each in laws("codec") if str(each).startswith("a_total_has") and str(each).endswith("-2"))
    with pytest.raises(AssertionError, match="values differ"):
        law(Scaled)
