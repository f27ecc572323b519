"""Where everything lies in the memory that the processes of a node share.

    weight NAME    once: every process's parameter is this memory
    buffer I       once, in the order of `model.buffers()`, for handing local rank 0's buffers to the others
    grad SPEC r    each process's gradient of a spec: flat, or the rows of left and then those of right
    rows SPEC      everyone's factors, as agreed

Factors lie where the dense gradient would: they are used only while they are smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.contract import Piece, Spec
from paceline.engine.node.local_group import Crew

LINE_BYTES = 64


class Places:
    """Raises ValueError if the processes have built different models."""

    def __init__(self, crew: Crew, specs: Sequence[Spec], weights: Mapping[str, Tensor], buffers: Sequence[Tensor]):
        self.rank, self.size = crew.rank, crew.size
        self._starts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._num_bytes = 0
        for name, weight in weights.items():
            self._add(f"weight {name}", tuple(weight.shape), weight.dtype)
        for i, buffer in enumerate(buffers):
            self._add(f"buffer {i}", tuple(buffer.shape), buffer.dtype)
        for spec in specs:
            dtype = weights[spec.names[0]].dtype
            for local_rank in range(self.size):
                self._add(f"grad {spec.index} {local_rank}", (spec.numel,), dtype)
            if spec.linear:
                self._add(f"rows {spec.index}", (spec.numel,), dtype)
        sizes = {tuple(row) for row in crew.gather([float(self._num_bytes), float(len(specs))], "joining")}
        if len(sizes) > 1:
            raise ValueError(f"the processes of this node built different models (bytes, specs: {sorted(sizes)})")
        self._memory = crew.share(self._num_bytes)
        self._num_buffers = len(buffers)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._starts[name] = (self._num_bytes, shape, dtype)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._num_bytes += -(-num_bytes // LINE_BYTES) * LINE_BYTES

    def _at(self, name: str) -> Tensor:
        start, shape, dtype = self._starts[name]
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(shape)

    def weight(self, name: str) -> Tensor:
        return self._at(f"weight {name}")

    def twins(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each buffer with its shared place. None for weights, since they are shared themselves.

        Raises ValueError if forward has put buffers of another number or shape in their place.
        """
        begin = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        first = next((each for each in tensors if each.numel()), None)
        if first is not None and begin <= first.data_ptr() < begin + self._num_bytes:
            return []
        places = [self._at(f"buffer {i}") for i in range(self._num_buffers)]
        had, have = ([(tuple(t.shape), t.dtype) for t in some] for some in (places, tensors))
        if had != have:
            raise ValueError(
                f"the model's buffers were {had} at join() and are {have} now; buffers shared by the processes of a "
                f"node keep number, shape and type: register them as they will be before join()"
            )
        return list(zip(tensors, places, strict=True))

    def flat(self, spec: Spec, local_rank: int = 0) -> Tensor:
        return self._at(f"grad {spec.index} {local_rank}")

    def put(self, piece: Piece) -> None:
        """This process's piece into its own place."""
        place = self.flat(piece.spec, self.rank)
        if piece.flat is not None:
            place.copy_(piece.flat)
        elif piece.left is not None and piece.right is not None:
            left, right = _factors(piece.spec, place, len(piece.left))
            left.copy_(piece.left)
            right.copy_(piece.right)

    def get(self, spec: Spec, local_rank: int, num_rows: int) -> Piece:
        """A process's factors."""
        left, right = _factors(spec, self.flat(spec, local_rank), num_rows)
        return Piece(spec, left=left, right=right)

    def agreed(self, spec: Spec, num_rows: int) -> Piece:
        """What was agreed: ``num_rows`` of factors, or dense if negative."""
        if num_rows < 0:
            return Piece(spec, flat=self.flat(spec))
        left, right = _factors(spec, self._at(f"rows {spec.index}"), num_rows)
        return Piece(spec, left=left, right=right)

    def settle(self, piece: Piece) -> tuple[Piece, int]:
        """An agreed piece to where all can read it; the piece there, and its ``num_rows``."""
        num_rows = -1 if piece.left is None else len(piece.left)
        there = self.agreed(piece.spec, num_rows)
        for source, target in ((piece.flat, there.flat), (piece.left, there.left), (piece.right, there.right)):
            if source is not None and target is not None and source.data_ptr() != target.data_ptr():
                target.copy_(source)
        return there, num_rows


def _factors(spec: Spec, place: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Left (rows, out), then right (rows, in)."""
    out_features, in_features = spec.shapes[0]
    middle, end = num_rows * out_features, num_rows * (out_features + in_features)
    return place[:middle].view(num_rows, out_features), place[middle:end].view(num_rows, in_features)
