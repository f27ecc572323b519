"""Shards: many images in few files (ArrayRecord), and a manifest with their sizes and hashes.

Opening compares file sizes and numbers of records. Every record has a hash, which is checked when it is read. `verify`
hashes whole files. Records are in the folder's order, so index i is the same sample in both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter  # type: ignore[import-untyped]

from paceline.data.encoded_images import EncodedImages, listing

MANIFEST, JOURNAL, SUFFIX = "manifest.json", "packing.jsonl", ".array_record"
FORMAT, VERSION = "paceline shards", 1
MAX_OPEN_FILES = 256  # of one source at a time
WRITER_OPTIONS = "group_size:1,uncompressed"  # each record is a hashed block; encoded images are not compressible


class Shards(EncodedImages):
    """One part (train or test) of a packed folder."""

    packed = True

    def __init__(
        self, root: Path, part: dict[str, Any], classes: list[str], train: bool, seed: int, threads: int | None = None
    ):
        labels = np.repeat(np.arange(len(classes)), part["counts"])
        super().__init__(labels, classes, train, seed, threads)
        self._root = root
        self._names = [entry["name"] for entry in part["shards"]]
        self._hashes = [entry["sha256"] for entry in part["shards"]]
        self._starts = [0, *accumulate(entry["records"] for entry in part["shards"])]
        self._readers: dict[str, Any] = {}

    def data(self, index: int) -> bytes:
        name, record = self._locate(index)
        try:
            data: bytes = self._reader(name).read([record])[0]
        except (RuntimeError, IndexError, OSError) as error:
            raise ValueError(f"the shard is damaged or missing: {error}") from error
        return data

    def path(self, index: int) -> str:
        return str(self._root / self._locate(index)[0])

    def name(self, index: int) -> str:
        name, record = self._locate(index)
        return f"record {record} of {self._root / name}"

    def identities(self) -> Iterable[str]:
        return self._hashes

    def _locate(self, index: int) -> tuple[str, int]:
        shard = bisect_right(self._starts, index) - 1
        return self._names[shard], index - self._starts[shard]

    def _reader(self, name: str) -> Any:
        reader = self._readers.get(name)  # two threads may open a file twice, which is harmless
        if reader is None:
            if len(self._readers) >= MAX_OPEN_FILES:
                self._readers.clear()
            reader = self._readers[name] = open_records(self._root / name)
        return reader

    def _remedy(self) -> str:
        return "Copy these shards again from an intact copy, or remove them and pack again."

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": {}}


def load(root: Path, seed: int = 0, threads: int | None = None, verify: bool = False) -> tuple[Shards, Shards]:
    """The training and the test part. ``verify`` hashes every file, which takes as long as reading them.

    Raises ValueError with every file that is missing, damaged or not in the manifest.
    """
    manifest = read_manifest(root)
    errors = {error for entry in _entries(manifest) for error in _errors(root, entry, verify)}
    listed = {entry["name"] for entry in _entries(manifest)}
    errors |= {f"- {path.name}: not in {MANIFEST}" for path in root.glob(f"*{SUFFIX}") if path.name not in listed}
    if errors:
        raise ValueError(
            f"the shards in {root} are not those that were packed:\n{listing(errors)}\n"
            f"Copy these files again from an intact copy, or remove the folder and pack again."
        )
    return (
        Shards(root, manifest["parts"]["train"], manifest["classes"], True, seed, threads),
        Shards(root, manifest["parts"]["test"], manifest["classes"], False, seed, threads),
    )


def packed(root: Path) -> bool:
    """Whether the folder has shards, also of an unfinished pack; other programs also write a manifest.json."""
    if (root / JOURNAL).exists() or any(root.glob(f"*{SUFFIX}")):
        return True
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads((root / MANIFEST).read_bytes())
        return isinstance(manifest, dict) and {"format", "parts", "hash"} <= manifest.keys()
    return False


def read_manifest(root: Path) -> dict[str, Any]:
    """Raises ValueError for a missing, damaged or newer manifest, and for an unfinished pack."""
    if not (root / MANIFEST).exists():
        problem = "was not finished; pack again to resume" if (root / JOURNAL).exists() else f"has no {MANIFEST}"
        raise ValueError(f"{root} {problem}")
    try:
        manifest: dict[str, Any] = json.loads((root / MANIFEST).read_bytes())
        body = {name: value for name, value in manifest.items() if name != "hash"}
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise ValueError(
                f"it is {manifest['format']!r} version {manifest['version']}, this paceline reads {FORMAT!r} {VERSION}"
            )
        if manifest["hash"] != hash_of(body):
            raise ValueError("it was changed after packing")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"cannot read {root / MANIFEST}: {error or type(error).__name__}; copy it again, or pack again"
        ) from error
    return manifest


def hash_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def entry_of(path: Path) -> dict[str, Any]:
    """The manifest's entry for a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"records": open_records(path).num_records(), "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _entries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for part in manifest["parts"].values() for entry in part["shards"]]


def _errors(root: Path, entry: dict[str, Any], verify: bool) -> list[str]:
    path = root / entry["name"]
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return [f"- {path.name}: {size} bytes, {entry['bytes']} were packed"]
        found = entry_of(path) if verify else {"records": open_records(path).num_records()}
    except FileNotFoundError:
        return [f"- {path.name}: missing"]
    except (RuntimeError, OSError) as error:
        return [f"- {path.name}: damaged ({error})"]
    if found["records"] != entry["records"]:
        return [f"- {path.name}: damaged ({found['records']} records, {entry['records']} were packed)"]
    if verify and found["sha256"] != entry["sha256"]:
        return [f"- {path.name}: damaged (its hash is not that of the packed file)"]
    return []


def open_records(path: Path) -> Any:
    # without read-ahead: records are read in random order
    return ArrayRecordReader(os.fspath(path), "readahead_buffer_size:0")


def write_records(path: Path, records: Iterable[bytes]) -> None:
    writer = ArrayRecordWriter(os.fspath(path), WRITER_OPTIONS)
    try:
        for record in records:
            writer.write(record)
    finally:
        writer.close()
