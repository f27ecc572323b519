"""Safetensors files, hashed while they are written and read.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, data_offsets (counted from the header's end); padded to 8 bytes
    data      the tensors without gaps, row-major, widest dtype first so that each is aligned

Tensors are written one at a time, so a file needs no second copy of the model in memory.
Source: the description of the format at github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
COO = ".coo_indices", ".coo_values", ".coo_shape"  # suffixes of the names of a sparse tensor's parts
CHUNK_BYTES = 1 << 22  # small enough to be hashed while it is in the processor's cache


class Seal(NamedTuple):
    """Size and hash by which a file is recognised as the one that was written."""

    num_bytes: int
    sha256: str


class Draft:
    """A file to be written, with the values that ``tensors`` have at `write`.

    Raises ValueError for tensors that a safetensors file cannot hold.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None):
        tensors = split_sparse(tensors)
        for name, tensor in tensors.items():
            if not isinstance(name, str) or name == "__metadata__":
                raise ValueError(f"a tensor cannot be named {name!r}: accepted is any str but '__metadata__'")
            if problem := unsupported(tensor):
                raise ValueError(f"tensor {name!r} {problem}")
            if tensor.dtype not in CODES:
                accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
                raise ValueError(f"tensor {name!r} is {tensor.dtype}, which safetensors cannot hold; it can {accepted}")
        # tied weights are written under each of their names: a reader need not know that they are tied
        self.tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        offsets, end = {}, 0
        for name, tensor in self.tensors.items():
            start, end = end, end + tensor.numel() * tensor.element_size()
            offsets[name] = start, end
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            entries[name] = {"dtype": CODES[tensor.dtype], "shape": shape, "data_offsets": offsets[name]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._header = len(header).to_bytes(8, "little") + header
        self.num_bytes = len(self._header) + end

    def write(self, path: Path) -> Seal:
        """Writes the file and syncs it to the disk."""
        digest = hashlib.sha256(self._header)
        with path.open("wb") as file:
            file.write(self._header)
            for tensor in self.tensors.values():
                _in_chunks(as_bytes(tensor).numpy().data, file.write, digest.update)
            file.flush()
            os.fsync(file.fileno())
        return Seal(self.num_bytes, digest.hexdigest())

    def parts(self) -> Iterator[bytes | memoryview]:
        """The content of the file, tensor by tensor."""
        yield self._header
        for tensor in self.tensors.values():
            yield as_bytes(tensor).numpy().data


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str], Seal]:
    """Tensors, metadata and seal. Raises ValueError for a file that its own header shows to be incomplete."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        try:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > num_bytes - 8:
                raise ValueError(f"it ends in its header, after {num_bytes} bytes")
            header = file.read(length)
            entries = json.loads(header)
            metadata = entries.pop("__metadata__", {})
            tensors = _empty(entries, num_bytes - 8 - length)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError) as error:
            raise ValueError(f"its header is not that of a safetensors file ({error!r})") from None
        digest = hashlib.sha256(prefix + header)
        for name in sorted(tensors, key=lambda name: entries[name]["data_offsets"]):
            _in_chunks(as_bytes(tensors[name]).numpy().data, file.readinto, digest.update)
    return join_sparse(tensors), metadata, Seal(num_bytes, digest.hexdigest())


def of_bytes(data: bytearray, start: int = 0) -> dict[str, Tensor]:
    """The tensors of a complete file in memory, as views of ``data``. Raises ValueError."""
    length = int.from_bytes(data[start : start + 8], "little")
    begin = start + 8 + length
    try:
        entries = json.loads(data[start + 8 : begin])
        entries.pop("__metadata__", {})
        data_bytes, tensors = torch.frombuffer(data, dtype=torch.uint8)[begin:], {}
        for name, entry in entries.items():
            first, end = entry["data_offsets"]
            tensors[name] = data_bytes[first:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])
        return join_sparse(tensors)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no safetensors file ({error!r})") from None


def split_sparse(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Replaces each sparse (COO) tensor by three dense ones: indices, values, shape with coalesced flag."""
    found: dict[str, Tensor] = {}
    for name, each in tensors.items():
        if isinstance(each, Tensor) and each.layout is torch.sparse_coo:
            shape = torch.tensor([*each.shape, each.is_coalesced()])
            found |= dict(zip((name + end for end in COO), (each._indices(), each._values(), shape), strict=True))
        else:
            found[name] = each
    return found


def join_sparse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `split_sparse`. Raises ValueError for parts that do not make a sparse tensor."""
    for end in [name for name in tensors if name.endswith(COO[2]) and name.removesuffix(COO[2]) + COO[0] in tensors]:
        name = end.removesuffix(COO[2])
        indices, values, shape = (tensors.pop(name + end) for end in COO)
        *size, coalesced = shape.tolist()
        try:
            tensors[name] = torch.sparse_coo_tensor(
                indices, values, size, is_coalesced=bool(coalesced), check_invariants=True
            )
        except RuntimeError as error:
            raise ValueError(f"tensor {name!r} is no sparse tensor ({error})") from None
    return tensors


def as_bytes(tensor: Tensor) -> Tensor:
    """*Shapes*: (bytes,) uint8; a view of the tensor's memory where the tensor is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # a contiguous tensor with at most one element may still have any strides
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def unsupported(tensor: Any) -> str:
    """The reason why this cannot be written as a dense array, or ''."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}, not a tensor"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.is_quantized or tensor.is_nested:
        return f"is {'quantized' if tensor.is_quantized else 'sparse or nested'}; make it dense"
    return ""


def _empty(entries: Mapping[str, Any], num_bytes: int) -> dict[str, Tensor]:
    """Uninitialised tensors for all entries, in order. Raises where entries do not cover the data without gaps."""
    spans = []
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        size = torch.Size(entry["shape"]).numel() * DTYPES[entry["dtype"]].itemsize
        if size != end - start:
            raise ValueError(f"tensor {name!r} has {end - start} bytes, but its shape needs {size}")
        spans.append((start, end))
    reached = 0
    for start, end in sorted(spans):
        if start != reached:
            raise ValueError(f"its tensors leave a gap or overlap at byte {reached} of the data")
        reached = end
    if reached != num_bytes:
        raise ValueError(f"its tensors need {reached} bytes, {num_bytes} are there")
    return {name: torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]]) for name, entry in entries.items()}


def _in_chunks(memory: memoryview, move: Callable[[memoryview], int], update: Callable[[memoryview], None]) -> None:
    for start in range(0, len(memory), CHUNK_BYTES):
        part = memory[start : start + CHUNK_BYTES]
        if move(part) != len(part):
            raise ValueError("the file became shorter while it was read")
        update(part)
