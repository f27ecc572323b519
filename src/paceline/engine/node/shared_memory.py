"""Layout of the memory that the processes of a node share.

    weight NAME    once: every process's parameter is this memory
    grad BUCKET r  each process's gradient of a bucket: dense, or the rows of left and then those of right
    rows BUCKET    the factors of all nodes, after the synchronisation

Factors use the memory of the dense gradient: they are sent only where they are smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.engine.node.local_group import LocalGroup
from paceline.messages import Bucket, Gradient

LINE_BYTES = 64


class SharedBuffers:
    """Raises ValueError if the processes' models differ."""

    def __init__(self, local_group: LocalGroup, buckets: Sequence[Bucket], weights: Mapping[str, Tensor]):
        self.rank, self.size = local_group.rank, local_group.size
        self._starts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._num_bytes = 0
        for name, weight in weights.items():
            self._add(f"weight {name}", tuple(weight.shape), weight.dtype)
        for bucket in buckets:
            dtype = weights[bucket.names[0]].dtype
            for local_rank in range(self.size):
                self._add(f"grad {bucket.index} {local_rank}", (bucket.numel,), dtype)
            if bucket.linear:
                self._add(f"rows {bucket.index}", (bucket.numel,), dtype)
        sizes = {tuple(row) for row in local_group.gather([float(self._num_bytes), float(len(buckets))], "joining")}
        if len(sizes) > 1:
            raise ValueError(f"the processes of this node built different models (bytes, buckets: {sorted(sizes)})")
        self._memory = local_group.shared_memory(self._num_bytes)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._starts[name] = (self._num_bytes, shape, dtype)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._num_bytes += -(-num_bytes // LINE_BYTES) * LINE_BYTES

    def weight(self, name: str) -> Tensor:
        return tensor_at(self._memory, *self._starts[f"weight {name}"])

    def hold(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in this memory, which all processes share."""
        begin = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        return not tensor.numel() or begin <= tensor.data_ptr() < begin + self._num_bytes

    def flat(self, bucket: Bucket, local_rank: int = 0) -> Tensor:
        return tensor_at(self._memory, *self._starts[f"grad {bucket.index} {local_rank}"])

    def write(self, gradient: Gradient) -> None:
        """Copies this process's gradient into its own region."""
        place = self.flat(gradient.bucket, self.rank)
        if gradient.flat is not None:
            place.copy_(gradient.flat)
        elif gradient.output_grad is not None and gradient.layer_input is not None:
            left, right = _factors(gradient.bucket, place, len(gradient.output_grad))
            left.copy_(gradient.output_grad)
            right.copy_(gradient.layer_input)

    def factors(self, bucket: Bucket, local_rank: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """A process's output gradients and layer inputs. *Shapes*: (rows, out), (rows, in)."""
        return _factors(bucket, self.flat(bucket, local_rank), num_rows)

    def read_result(self, bucket: Bucket, num_rows: int) -> Gradient:
        """The synchronised gradient: ``num_rows`` rows of factors, or dense if negative."""
        if num_rows < 0:
            return Gradient(bucket, flat=self.flat(bucket))
        left, right = _factors(bucket, tensor_at(self._memory, *self._starts[f"rows {bucket.index}"]), num_rows)
        return Gradient(bucket, output_grad=left, layer_input=right)

    def publish(self, gradient: Gradient) -> tuple[Gradient, int]:
        """Copies a synchronised gradient into this memory; returns it there, and its ``num_rows``."""
        num_rows = -1 if gradient.output_grad is None else len(gradient.output_grad)
        shared = self.read_result(gradient.bucket, num_rows)
        for source, target in zip(gradient.parts, shared.parts, strict=True):
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
        return shared, num_rows


def tensor_at(memory: memoryview, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor that begins at this byte of ``memory``."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def _factors(bucket: Bucket, place: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Left (rows, out), then right (rows, in)."""
    out_features, in_features = bucket.shapes[0]
    middle, end = num_rows * out_features, num_rows * (out_features + in_features)
    return place[:middle].view(num_rows, out_features), place[middle:end].view(num_rows, in_features)
