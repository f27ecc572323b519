"""Orthonormalisation and products of thin matrices, with the same bits on every processor and any number of threads.

Libraries for linear algebra order their sums by processor, version and threads. Here every value is a chain of single
additions, multiplications, divisions and roots, each rounded as IEEE 754 says: sums over rows add one half to the
other, and a product of rank r adds r outer products in order.

*Cost*: 4 r rows columns of memory traffic within the cache per product of rank r; some 30 r small operations per set of
matrices that have about as many rows.
*Invariants*: equal inputs give equal bits if their values are real (a processor multiplies complex numbers as it
likes); the columns of a basis are orthonormal, also where the matrix has less than full rank or is zero.
*Source*: Householder reflections: Golub & Van Loan, Matrix Computations, 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

CACHED = 1 << 16  # values of a product that are written at once on a CPU


def bases(matrices: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis (rows, r) of the columns of each matrix (rows, r), with r <= rows, all of one type."""
    alike: dict[int, list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault((len(matrix) - 1).bit_length(), []).append(i)
    found = list(matrices)
    for power, members in alike.items():
        rank = max(matrices[i].shape[1] for i in members)
        padded = [_padded(matrices[i].mT, rank, max(1 << power, rank)) for i in members]
        for i, basis in zip(members, _bases(torch.stack(padded)), strict=True):
            rows, r = matrices[i].shape
            found[i] = basis[:r, :rows].mT.contiguous()
    return found


def _padded(columns: Tensor, rank: int, rows: int) -> Tensor:
    return functional.pad(columns, (0, rows - columns.shape[1], 0, rank - columns.shape[0]))


def _bases(columns: Tensor) -> Tensor:
    """Of many matrices by columns: (matrices, r, rows), where rows of zeros may follow."""
    columns, reflections = _scaled(columns), []
    if columns.shape[1] == 1:
        length = _sum((columns * columns.conj()).real)[..., None].sqrt()
        columns[..., :1] += length == 0  # zeros have the first unit vector
        return columns / torch.where(length == 0, 1, length)
    for j in range(columns.shape[1]):
        reflection = columns[:, j].clone()
        reflection[:, :j] = 0
        length = _sum((reflection * reflection.conj()).real).sqrt()
        first = reflection[:, j]
        sign = first.sgn() + (first == 0)
        reflection[:, j] = first + sign * length
        squares = _sum((reflection * reflection.conj()).real)
        factor = torch.where(squares == 0, squares, 2 / squares)  # of a column of zeros nothing is reflected
        reflections.append((reflection, factor))
        columns = _reflected(columns, reflection, factor)
    basis = torch.zeros_like(columns)
    basis.diagonal(dim1=1, dim2=2).fill_(1)
    for reflection, factor in reversed(reflections):
        basis = _reflected(basis, reflection, factor)
    return basis


def _scaled(columns: Tensor) -> Tensor:
    """So that no square is too large or too small for the type."""
    largest = columns.abs().amax(dim=(1, 2), keepdim=True)
    return columns / torch.where(largest == 0, 1, largest)


def _reflected(columns: Tensor, reflection: Tensor, factor: Tensor) -> Tensor:
    """v - factor (w* v) w of each column v, and w the reflection."""
    inner = _sum(reflection.conj()[:, None] * columns)
    return columns - (factor[:, None] * inner)[:, :, None] * reflection[:, None]


def _sum(values: Tensor) -> Tensor:
    """Over the last dimension."""
    while (size := values.shape[-1]) > 1:
        half, odd = divmod(size, 2)
        added = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat([added, values[..., -1:]], -1) if odd else added
    return values[..., 0]


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left`` (rows, r) times ``right.mH``, of ``right`` (columns, r), into ``out`` (rows, columns)."""
    factors = right.mH.resolve_conj().contiguous()
    step = len(left) if left.is_cuda else max(1, CACHED // max(1, len(right)))
    for start in range(0, len(left), step):
        rows, values = left[start : start + step], out[start : start + step]
        torch.mul(rows[:, :1], factors[0], out=values)
        for k in range(1, len(factors)):
            values += rows[:, k : k + 1] * factors[k]
