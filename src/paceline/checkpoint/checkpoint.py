"""A checkpoint: everything a run needs to resume, in one folder per step; no pickle, nothing evaluated.

    RUN/checkpoint-00001234/
      weights.safetensors    the model's state_dict under its plain names
      state.safetensors      every other tensor
      checkpoint.json        format, step, versions, size and sha256 of both files, the tree of the state

*Invariants*: if the writer is killed at any point, the newest checkpoint is complete, and is the last one that was
reported as written or a newer one. An error names each file that is missing, shortened or has a flipped byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import atomic_write, tensor_file
from paceline.checkpoint.async_writer import StagingBuffers
from paceline.checkpoint.state_tree import pack, unpack
from paceline.errors import CheckpointError

FORMAT = 1
WEIGHTS, STATE, TREE = "weights.safetensors", "state.safetensors", "checkpoint.json"
NAME = re.compile(r"checkpoint-(\d{8,})(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """``seal``: a hash of the content. ``damaged``: newer checkpoints that were skipped, with the reason."""

    path: Path
    step: int
    weights: dict[str, Tensor]
    state: Any
    versions: dict[str, str]
    seal: str
    damaged: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """The run's metadata, ``state["facts"]``; empty where the state has none."""
        found = self.state.get("facts") if isinstance(self.state, dict) else None
        return found if isinstance(found, dict) else {}


class Draft:
    """A checkpoint to be written, with the values that its tensors have at `write`, or had at `freeze`.

    ``state`` is any nesting of dict, list, tuple, tensors, NumPy values, numbers, str, bytes and None. All are read
    back bit-equal, on the CPU, without shared memory. Raises ValueError with the path of a value of another type.
    """

    def __init__(self, step: int, weights: Mapping[str, Tensor], state: Any):
        if step < 0:
            raise ValueError(f"a checkpoint needs step >= 0, got step={step}")
        others: dict[str, Tensor] = {}
        self.step = step
        self._tree = json.dumps(pack(state, "state", others), allow_nan=False)
        self._files = {WEIGHTS: tensor_file.Draft(weights), STATE: tensor_file.Draft(others)}

    @property
    def num_bytes(self) -> int:
        seals = {name: tensor_file.Seal(file.num_bytes, "0" * 64) for name, file in self._files.items()}
        return len(_sealed(self.step, seals, self._tree)) + sum(seal.num_bytes for seal in seals.values())

    def path(self, run: Path) -> Path:
        return run / f"checkpoint-{self.step:08d}"

    def freeze(self, copies: StagingBuffers, fixed: str | None = None) -> None:
        """Copies the tensors, which may change from then on. ``fixed``: the path of constant tensors in the state."""
        live = {
            (name, place): tensor
            for name, file in self._files.items()
            for place, tensor in file.tensors.items()
            if fixed is None or name == WEIGHTS or not place.startswith(fixed)
        }
        for (name, place), copy in copies.stage(live).items():
            self._files[name].tensors[place] = copy

    def write(self, run: Path, keep: int = 2, damaged: Collection[str] = ()) -> Path:
        """Returns the step's new checkpoint folder, synced to the disk.

        Of this and older steps the newest ``keep`` complete checkpoints stay, not counting those in ``damaged``. Newer
        ones, of a run that was resumed further back, stay too. A checkpoint of the same step is replaced. Raises
        CheckpointError when the operating system reports an error.
        """
        if keep < 1:
            raise ValueError(f"a run keeps at least one checkpoint, got keep={keep}")
        path = self.path(run)
        try:
            run.mkdir(parents=True, exist_ok=True)
            with atomic_write.locked(run):
                atomic_write.recover(run, "checkpoint-*")
                atomic_write.folder(path, self._fill)
                _retire(run, self.step, keep, set(damaged) - {path.name})
        except OSError as error:
            raise _refusal(run, self.step, self.num_bytes, error) from error
        return path

    def _fill(self, folder: Path) -> None:
        seals = {name: file.write(folder / name) for name, file in self._files.items()}
        with (folder / TREE).open("wb") as tree:
            tree.write(_sealed(self.step, seals, self._tree))
            tree.flush()
            os.fsync(tree.fileno())


def write(run: Path, step: int, weights: Mapping[str, Tensor], state: Any, keep: int = 2) -> Path:
    """Writes a checkpoint in one call."""
    return Draft(step, weights, state).write(run, keep)


def all_of(run: Path) -> list[Path]:
    """The folders of all checkpoints, newest first; their content is not read."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        paths = [entry for entry in run.iterdir() if NAME.fullmatch(entry.name)]
        return sorted(paths, key=lambda path: (step_of(path), path.suffix == ""), reverse=True)
    return []


def newest(run: Path) -> Path | None:
    """The folder of the newest checkpoint; its content is not read."""
    return next(iter(all_of(run)), None)


def step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def read(path: Path) -> Checkpoint:
    """Raises CheckpointError with the name of a damaged file, ValueError for another format or no checkpoint."""
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint {path}; accepted: a folder RUN/checkpoint-NNNNNNNN")
    facts = _facts(path / TREE)
    if facts["format"] != FORMAT:
        raise ValueError(
            f"{path / TREE} has format {facts['format']}, written by paceline {facts['versions']['paceline']}; "
            f"this paceline reads format {FORMAT}: install the one that wrote it"
        )
    weights = _tensors(path / WEIGHTS, facts)
    others = _tensors(path / STATE, facts)
    try:
        state = unpack(facts["state"], others)
    except (LookupError, TypeError, ValueError) as error:
        raise _damage(path / TREE, f"does not match {STATE} ({error!r})") from error
    return Checkpoint(path, facts["step"], weights, state, facts["versions"], facts["sha256"])


def read_newest(run: Path, most: int | None = None) -> Checkpoint | None:
    """The newest complete checkpoint, with the damage of newer ones. None where the run has no checkpoint.

    ``most``: the latest step accepted. Raises CheckpointError when all are damaged, ValueError for another format.
    """
    damaged: list[str] = []
    for path in all_of(run):
        if most is not None and step_of(path) > most:
            continue
        try:
            return replace(read(path), damaged=tuple(damaged))
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"no checkpoint in {run} is complete:\n" + "\n".join(f"- {error}" for error in damaged))
    return None


def _retire(run: Path, step: int, keep: int, damaged: Collection[str]) -> None:
    """Removes checkpoints older than the newest ``keep`` complete ones; completeness is judged by file sizes."""
    for path in all_of(run):
        if step_of(path) > step:
            continue
        if not keep:
            atomic_write.remove(path)
        elif path.name not in damaged and _looks_whole(path):
            keep -= 1


def _looks_whole(path: Path) -> bool:
    try:
        files = _facts(path / TREE)["files"]
        return all((path / name).stat().st_size == seal["num_bytes"] for name, seal in files.items())
    except (OSError, LookupError):
        return False


def _sealed(step: int, seals: Mapping[str, tensor_file.Seal], tree: str) -> bytes:
    """One line for each entry; the last one is the hash of the lines before it."""
    try:
        version = importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    facts = {
        "format": FORMAT,
        "step": step,
        "versions": {"paceline": version, "torch": str(torch.__version__)},
        "files": {name: seal._asdict() for name, seal in seals.items()},
    }
    lines = [f'"{name}": {json.dumps(fact)},\n' for name, fact in facts.items()]
    body = ("{" + "".join(lines) + f'"state": {tree},\n').encode()
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def _facts(path: Path) -> dict[str, Any]:
    with _reading(path):
        data = path.read_bytes()
    length = len(_seal(b""))
    if data[-length:] != _seal(data[:-length]):
        raise _damage(path, "is damaged: its content does not match its sha256")
    facts: dict[str, Any] = json.loads(data)
    return facts


def _tensors(path: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    expected = tensor_file.Seal(**facts["files"][path.name])
    with _reading(path):
        if (num_bytes := path.stat().st_size) != expected.num_bytes:
            raise _damage(path, f"is damaged: it has {num_bytes} bytes, {expected.num_bytes} were written")
        found, _, seal = tensor_file.read(path)
    if seal != expected:
        raise _damage(path, "is damaged: its sha256 is not the one that was written")
    return found


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise _damage(path, "is missing") from error
    except OSError as error:
        raise _damage(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _damage(path, f"is damaged: {error}") from error


def _damage(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; take another checkpoint of the run")


def _refusal(run: Path, step: int, num_bytes: int, error: OSError) -> CheckpointError:
    earlier = None
    with contextlib.suppress(OSError):
        earlier = newest(run)
    # os.path, because Path.is_dir raises where this process may not read a folder
    existing = next(folder for folder in (run, *run.absolute().parents) if os.path.isdir(folder))
    refusal = CheckpointError(
        f"cannot write the checkpoint of step {step} to {run}: {error.strerror or error}; "
        f"it needs {num_bytes:,} bytes, {shutil.disk_usage(existing).free:,} are free; "
        + (f"{earlier.name} is untouched" if earlier else "there is no earlier one")
        + "; make room or choose another folder"
    )
    refusal.errno = error.errno
    return refusal
