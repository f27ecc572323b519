"""Equivalence test of two runs: one saves its first and last weights and losses, another starts from the first.

Both compute in float64, so that differences are mathematical and not rounding. Dropout is off, since N processes cannot
draw the masks of one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from paceline.contract import GlobalBatch, Share
from paceline.data.batches import Batch
from paceline.data.sampler import Assignment
from paceline.planner.diagnose.causes import Cause, causes, rounding_cause

Mapped = Callable[[Any, Callable[[Tensor], Tensor]], Any]
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
# tolerances relative to the movement of the weights, for float32 inside a float64 model; the second one for optimizers
# that divide by the size of a gradient, if no experiment finds another cause
ROUNDED, AMPLIFIED = 1e-5, 1e-3
UNKNOWN = "unknown"  # the kind of a cause that no experiment found
NOTED_STEPS = 3  # steps of which states and batches are noted

JOINS = itertools.count()  # calls of `join` in this process
FIRST, LAST, NOTES, FOUND = "first.safetensors", "last.safetensors", "said.json", "found.json"


@dataclass
class EquivalenceRun:
    """One `join` of a verified run. PACELINE_VERIFY is a JSON object: folder, steps, dtype; start: the folder of a run
    whose first weights are loaded, or none; ``examines``: the folder of a run, the causes of whose differences the
    experiments after the last step look for; told (``simulated``): [rank, world size] that a single process sees.

    Each `join` of a script has its own folder; the first one to take its steps ends the run.
    """

    folder: Path
    steps: int
    dtype: str
    start: str = ""
    examines: str = ""
    simulated: tuple[int, int] | None = None
    losses: list[float] = field(default_factory=list)
    batch_norm: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    evaluated: list[Any] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)  # of the first steps
    called: dict[str, Any] | None = None  # the arguments of the model's first call, if causes are wanted
    metric: Any = None  # the metric of `evaluate`

    @classmethod
    def of_environment(cls) -> EquivalenceRun | None:
        request = requested()
        if not request:
            return None
        join = f"join{next(JOINS)}"
        start, examines = (request.get(key, "") and os.path.join(request[key], join) for key in ("start", "examines"))
        simulated = tuple(request["told"]) if request.get("told") else None
        return cls(Path(request["folder"]) / join, request["steps"], request["dtype"], start, examines, simulated)

    def prepare(self, model: nn.Module) -> None:
        model.to(getattr(torch, self.dtype))
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):
                module.__dict__["dropout"] = 0.0  # attention and recurrent layers store the probability
            self.batch_norm = self.batch_norm or isinstance(module, nn.modules.batchnorm._BatchNorm)
        if self.examines:
            self._keep_first_call(model)
        if self.start:
            weights, current = load_file(os.path.join(self.start, FIRST)), model.state_dict()
            sparse = {name: each.sparse_dim() for name, each in current.items() if each.is_sparse}
            model.load_state_dict(weights | {name: weights[name].to_sparse(dims) for name, dims in sparse.items()})

    def _keep_first_call(self, model: nn.Module) -> None:
        def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.called = tree_map_only(Tensor, lambda each: each.detach().clone(), {"args": args, "kwargs": kwargs})
            handle.remove()

        handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def begin(self, state: dict[str, Tensor]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # below /tmp, on a host
        self._save(state, FIRST)

    def observe_batch(self, batch: GlobalBatch, mapped: Mapped) -> GlobalBatch:
        """The batch with its floating-point tensors cast to the comparison's type; notes the samples read from it."""
        reads = self.reads if len(self.losses) < NOTED_STEPS and len(self.reads) <= len(self.losses) else None
        return _CastBatch(batch, self, mapped, reads)

    def cast_loss(self, loss: Any) -> Any:
        """The loss with its class weights cast to that type: of a module, a partial or a bound method."""
        dtype = getattr(torch, self.dtype)
        if isinstance(loss, nn.Module):
            return loss.to(dtype)
        if isinstance(loss, partial):
            keywords = {name: _cast(value, dtype) for name, value in loss.keywords.items()}
            return partial(self.cast_loss(loss.func), *(_cast(value, dtype) for value in loss.args), **keywords)
        if isinstance(owner := getattr(loss, "__self__", None), nn.Module):  # of a bound method
            owner.to(dtype)
        return loss

    def cast(self, rows: Any, mapped: Mapped) -> Any:
        """Samples cast to the comparison's type."""
        dtype = getattr(torch, self.dtype)
        return None if rows is None else mapped(rows, lambda leaf: _cast(leaf, dtype))

    def evaluate(self, found: Any, metric: Any) -> None:
        """Notes the result of an evaluation and its metric."""
        values = found if isinstance(found, dict) else {"": found}
        self.evaluated.append({f"{name} {i}": each for name, value in values.items() for i, each in _listed(value)})
        self.metric = metric

    def all_notes(self) -> list[Any]:
        """The notes of each process of the examined run."""
        path = Path(self.examines, NOTES)
        return list(json.loads(path.read_text())["facts"]) if path.exists() else []

    def note(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> bool:
        """Notes a step; returns whether it was the last."""
        self.losses.append(loss)
        if len(self.losses) <= NOTED_STEPS:
            named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            floats = {name: each.detach() for name, each in named.items() if each.is_floating_point()}
            self.facts.setdefault("state", []).append({name: _norms(each) for name, each in floats.items()})
            weights = {name: "trained" if each.requires_grad else "frozen" for name, each in model.named_parameters()}
            self.facts["kinds"] = {name: weights.get(name, "buffer") for name in floats}
        self.facts.setdefault("lr", []).append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])
        return len(self.losses) >= self.steps

    def notes(self) -> dict[str, Any]:
        """The notes of this process."""
        ranges = [read.span for read in self.reads]
        noted = {"ranges": ranges, "digests": [read.digests for read in self.reads], "given": None in ranges}
        return {**self.facts, **noted, "losses": self.losses, "told": self.simulated}

    def end(self, everyone: list[Any], state: dict[str, Tensor] | None, found: dict[str, Any] | None = None) -> None:
        """Ends the run after the last step; ``state``: saved if given. Raises SystemExit on every process."""
        if state is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            notes = {"losses": self.losses, "batch_norm": self.batch_norm, "evaluated": self.evaluated}
            (self.folder / NOTES).write_text(json.dumps({**notes, "facts": everyone}))
            if found is not None:
                (self.folder / FOUND).write_text(json.dumps(found))
            self._save(state, LAST)
        raise SystemExit(0)

    def _save(self, state: dict[str, Tensor], name: str) -> None:
        # cloned, since safetensors refuses tied weights, which share storage
        plain = {key: value.detach().to_dense() if value.is_sparse else value for key, value in state.items()}
        save_file({key: value.detach().clone() for key, value in plain.items()}, self.folder / name)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def requested() -> dict[str, Any]:
    """The request in PACELINE_VERIFY; empty if nothing is verified."""
    text = os.environ.get("PACELINE_VERIFY")
    return dict(json.loads(text)) if text else {}


def _norms(values: Tensor) -> list[float]:
    wide = values.double()
    return [float(wide.sum()), float(wide.norm())]


@dataclass
class Read:
    """What one process read of a global batch. ``span``: the range of its samples; None for the process's own batch."""

    batch: Any
    rows: Any = None
    span: tuple[int, int] | None = None
    digests: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Span(Assignment):
    """An assignment of a given range of samples."""

    start: int = 0
    stop: int = 0

    def rows(self, count: int) -> range:
        return range(self.start, self.stop)


class _CastBatch(GlobalBatch):
    """A batch whose floating-point tensors are cast to another type."""

    def __init__(self, batch: GlobalBatch, equivalence: EquivalenceRun, mapped: Mapped, reads: list[Read] | None):
        self.batch, self.equivalence, self.mapped, self.weight = batch, equivalence, mapped, batch.weight
        self.reads = reads

    def share(self, assignment: Share) -> Any:
        rows = self.equivalence.cast(self.batch.share(assignment), self.mapped)
        self.num_local_samples = self.batch.num_local_samples
        if self.reads is not None:
            span = assignment.rows(len(self.batch.indices)) if isinstance(self.batch, Batch) else None
            read = Read(self, None, (span.start, span.stop) if span is not None else None, digests(rows))
            read.rows = self.mapped(rows, torch.clone) if rows is not None else None
            self.reads.append(read)
            self.reads = None  # once only: a retried step reads again
        return rows

    def read(self, start: int, stop: int) -> Any:
        """A range of the samples, as the process to which they are assigned reads them."""
        assert isinstance(self.batch, Batch)
        return self.equivalence.cast(self.batch.fetch(Span(start=start, stop=stop)), self.mapped)


def digests(rows: Any) -> list[str]:
    """A hash per sample if every tensor has the samples first, else one hash of all tensors."""
    leaves = [leaf for leaf in tree_iter(rows) if isinstance(leaf, Tensor)]
    if not leaves:
        return []
    lengths = {len(leaf) for leaf in leaves if leaf.dim()}
    parts = zip(*leaves, strict=True) if len(lengths) == 1 and all(leaf.dim() for leaf in leaves) else [leaves]
    return [_digest(part) for part in parts]


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        if each.layout == torch.strided:
            found.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences between two runs: of a loss, a metric, and a parameter (``worst``) relative to its
    norm. ``moved``: the difference of all parameters relative to their movement in training."""

    steps: int
    loss: float
    weight: float
    worst: str
    tolerance: float
    moved: float = 0.0
    metric: float = 0.0
    rounding: float = 0.0  # tolerance for float32 inside a float64 model, as ``moved``
    causes: tuple[Cause, ...] = ()

    @property
    def close(self) -> bool:
        """Whether the differences are within the tolerance, without any cause."""
        return max(self.loss, self.weight) <= self.tolerance and self.metric <= max(self.tolerance, ROUNDED)

    @property
    def unknown(self) -> bool:
        """Whether the runs differ and no experiment found a cause."""
        return any(cause.kind == UNKNOWN for cause in self.causes)

    @property
    def same(self) -> bool:
        return self.close or max(self.loss, self.moved, self.metric) <= self.rounding


def finished(folder: Path) -> list[str]:
    """The joins of a run that took all their steps, from its folder."""
    return sorted(path.parent.name for path in folder.glob(f"join*/{LAST}"))


def compare(one: Path, other: Path, dtype: str) -> Comparison:
    """Compares two runs by their folders. Raises ValueError if they are not comparable, or if no weight moved."""
    join, *more = finished(one)
    if more:
        raise ValueError(
            f"verify: {', '.join([join, *more])} all took their steps, since the script continued after the SystemExit "
            f"that ends it; let it pass: catch Exception, and neither BaseException nor SystemExit"
        )
    if finished(other) != [join]:
        raise ValueError(
            f"verify: {join} took its steps first on all nodes, {', '.join(finished(other))} in one process"
        )
    one, other = one / join, other / join
    a, b = _read_notes(one), _read_notes(other)
    pairs = list(zip(a["losses"], b["losses"], strict=True))
    loss = max(abs(x - y) / max(1e-30, abs(y)) for x, y in pairs)
    first, second = (load_file(folder / LAST) for folder in (one, other))
    begin = load_file(one / FIRST)
    floats = {name: want for name, want in second.items() if want.is_floating_point()}
    gaps = {name: float((first[name] - want).norm()) for name, want in floats.items()}
    moves = {name: float((want - begin[name]).norm()) for name, want in floats.items()}
    difference, moved = (sum(each**2 for each in of.values()) ** 0.5 for of in (gaps, moves))
    if not moved:
        raise ValueError("verify: no weight moved in these steps, so nothing was compared; is the learning rate 0?")
    # relative at least to the largest movement: some weights are pure rounding, such as the bias of attention's keys
    largest = max(moves.values())
    gaps = {name: gap / max(float(floats[name].norm()), largest) for name, gap in gaps.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    metric = _metric(a.get("evaluated", []), b.get("evaluated", []))
    return Comparison(len(pairs), loss, gaps[worst], worst, TOLERANCE[dtype], difference / moved, metric)


def explain(
    compared: Comparison, distributed: Path, single: Path, repeated: Path, simulated: Sequence[Path]
) -> Comparison:
    """The comparison with its causes, from a repeated run of one process and from runs with simulated ranks."""
    (join,) = finished(distributed)
    found = json.loads((repeated / join / FOUND).read_text()) if (repeated / join / FOUND).exists() else {}
    rounding = rounding_cause(found)
    if rounding and (close := replace(compared, rounding=ROUNDED, causes=(rounding,))).same:
        return close
    first, second, *others = [
        _read_notes(run / join)["facts"][0] if join in finished(run) else {} for run in (single, repeated, *simulated)
    ]
    named = causes(found, _read_notes(distributed / join)["facts"], first, second or None, [n for n in others if n])
    if rounding and not named and (close := replace(compared, rounding=AMPLIFIED, causes=(rounding,))).same:
        return close
    unknown = Cause.of(UNKNOWN, "no experiment found the cause")
    return replace(compared, causes=(*named, *([rounding] if rounding else [])) or (unknown,))


def _read_notes(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / NOTES).read_text()))


def _listed(value: Any) -> Iterable[tuple[int, float]]:
    return enumerate(value.reshape(-1).tolist() if isinstance(value, Tensor) else [value])


def _metric(one: list[Any], other: list[Any]) -> float:
    """The largest relative difference of two runs' metrics."""
    largest = 0.0
    for a, b in zip(one, other, strict=False):
        named = [(a[name], b[name]) for name in a if name in b]
        largest = max([largest, *(abs(x - y) / max(1e-30, abs(y)) for x, y in named if abs(x - y) > 1e-12)])
    return largest
