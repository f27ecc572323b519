"""Export of the weights alone, as a safetensors file that any tool can read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import atomic_write, tensor_file
from paceline.errors import CheckpointError


def export(path: Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
    """Writes the file completely or leaves it as it was. ``facts`` become its metadata, each as JSON.

    Tied weights are written under each of their names. Raises ValueError for tensors that safetensors cannot hold,
    CheckpointError when the operating system reports an error.
    """
    draft = tensor_file.Draft(weights, {name: json.dumps(fact) for name, fact in (facts or {}).items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.file(path, draft.write)
    except OSError as error:
        refusal = CheckpointError(
            f"cannot write {draft.num_bytes:,} bytes to {path}: {error.strerror or error}; "
            "make room or choose another place"
        )
        refusal.errno = error.errno
        raise refusal from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and metadata of an exported file. Raises ValueError for a file that is not complete safetensors."""
    try:
        weights, metadata, _ = tensor_file.read(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    facts = {}
    for name, text in metadata.items():
        try:
            facts[name] = json.loads(text)
        except ValueError:
            facts[name] = text  # written by another tool, not as JSON
    return weights, facts
