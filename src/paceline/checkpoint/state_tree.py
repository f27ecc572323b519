"""Serialisation of any nesting of plain values as JSON, with its tensors beside it; reading evaluates no code.

    None, bool, str, int, finite float, list      as JSON has them
    {"int": "0x..."}                              integers beyond 64 bits
    {"float": "7ff8000000000000"}                 the bits of an infinity or a NaN
    {"tuple": [...]}
    {"dict": {...}} or {"dict": [[key, value]]}   the second where a key is not str; likewise OrderedDict, Counter
    {"tensor": name}                              with dtype and shape where the file holds plain bytes
    {"array": name, "dtype": "<f8", "shape": []}  NumPy, as plain bytes
    {"scalar": "00ff", "dtype": "<i2"}            NumPy
    {"bytes": name}

A tensor's name is its path: ``state['optimizer'][0]``.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.tensor_file import CODES, as_bytes, unsupported

DICTS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
NUMERIC = "biufcmMSU"  # NumPy's codes for the kinds of dtypes whose values are plain bytes
MAX_DEPTH = 100
ACCEPTED = (
    "dict, OrderedDict and Counter with str or int keys, list, tuple, Tensor, NumPy arrays and scalars, "
    "int, float, bool, None, str, bytes"
)


def pack(value: Any, where: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """The tree for ``value``; large values go into ``tensors``. Raises ValueError with the path of other types."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where[:200]}... is nested over {MAX_DEPTH} levels deep, or contains itself; make it flat")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 1 << 63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is list:
        return [pack(part, f"{where}[{i}]", tensors, depth + 1) for i, part in enumerate(value)]
    if kind is tuple:
        return {"tuple": [pack(part, f"{where}[{i}]", tensors, depth + 1) for i, part in enumerate(value)]}
    if kind in DICTS.values():
        for key in value:
            if type(key) not in (str, int):
                raise ValueError(f"{where} has the key {key!r}, a {type(key).__name__}; accepted: str and int")
        pairs = [(key, pack(part, f"{where}[{key!r}]", tensors, depth + 1)) for key, part in value.items()]
        if all(type(key) is str for key in value):
            return {kind.__name__: dict(pairs)}
        return {kind.__name__: [[pack(key, where, tensors), part] for key, part in pairs]}
    if isinstance(value, Tensor):
        if problem := unsupported(value):
            raise ValueError(f"{where} {problem}")
        if value.dtype in CODES or value.layout is torch.sparse_coo:
            tensors[where] = value
            return {"tensor": where}
        tensors[where] = as_bytes(value)
        return {"tensor": where, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, np.generic) and value.dtype.kind in NUMERIC:
        return {"scalar": value.tobytes().hex(), "dtype": value.dtype.str}
    if kind is np.ndarray and value.dtype.kind in NUMERIC:
        tensors[where] = _from_bytes(value.tobytes())
        return {"array": where, "dtype": value.dtype.str, "shape": list(value.shape)}
    if kind is bytes:
        tensors[where] = _from_bytes(value)
        return {"bytes": where}
    detail = f" of {value.dtype}" if isinstance(value, np.ndarray | np.generic) else ""
    raise ValueError(f"{where} is a {kind.__module__}.{kind.__qualname__}{detail}; accepted: {ACCEPTED}; convert it")


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of `pack`. Raises ValueError, LookupError or TypeError for a tree that `pack` cannot have made."""
    if isinstance(tree, list):
        return [unpack(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    tag, content = next(iter(tree.items()))
    if tag in DICTS:
        pairs = content.items() if isinstance(content, dict) else content
        return DICTS[tag]({unpack(key, tensors): unpack(part, tensors) for key, part in pairs})
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == "tuple":
        return tuple(unpack(part, tensors) for part in content)
    if tag == "tensor":
        if "dtype" not in tree:
            return tensors[content]
        return tensors[content].view(_dtype(tree["dtype"])).view(tree["shape"])
    if tag == "scalar":
        return _array(bytes.fromhex(content), {**tree, "shape": ()})[()]
    if tag == "array":
        return _array(tensors[content].numpy(), tree)
    if tag == "bytes":
        return tensors[content].numpy().tobytes()
    raise ValueError(f"unknown tag {tag!r}")


def _from_bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _array(data: Any, tree: Mapping[str, Any]) -> Any:
    dtype = np.dtype(tree["dtype"])
    if dtype.kind not in NUMERIC:
        raise ValueError(f"NumPy values of dtype {dtype} are not plain bytes")
    return np.ndarray(tree["shape"], dtype, data)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype named {name!r}")
    return dtype
