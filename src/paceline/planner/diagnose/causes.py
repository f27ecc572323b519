"""Diagnosis: why N processes do not train as one process does, each cause with its remedy.

The input is what `experiments` measured inside one process, and the notes of each process of each `EquivalenceRun`. A
cause follows from the result of an experiment, never from the name of a class or layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.planner.diagnose.saved_state import unequal
from paceline.registry import CODEC, EXCHANGE

Notes = Mapping[str, Any]
Named = tuple[str, str]  # the kind of a cause, and its text
FEW = 3


@dataclass(frozen=True)
class Cause:
    """``kind``: one of `KINDS`. ``text``: what differs, and where. ``remedy``: what to do."""

    kind: str
    text: str
    remedy: str

    @classmethod
    def of(cls, kind: str, text: str) -> Cause:
        return cls(kind, text, REMEDIES[kind])

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


REMEDIES = {
    "batch norm": "join(batch_norm='sync') makes it exact, GroupNorm or LayerNorm need no batch",
    "layer": "compute what it shares per sample, or run whole batches in one process",
    "layer by size": "use an operation that does not depend on the number of samples",
    "buffers": "join(buffers='broadcast') keeps rank 0's in every process, as DDP does; or update them after the step "
    "from sums over all processes",
    "momentum encoder": "update it once per step after pace.step, and not inside forward",
    "hidden state": "register it as a buffer, and update it after the step",
    "sum": "return the mean over samples, and multiply the learning rate by the batch size",
    "weighted mean": "return (sum, weight): the sum over the elements that count, and their total weight",
    "compares samples": "no division of the batch is exact: accept each process's loss over its own samples, as with "
    "DDP, or compute whole batches in one process",
    "loss by size": "divide by the number of samples only, and take the same branch for every batch size",
    "function of a mean": "return the mean itself, or (sum, weight), and apply the function to the reported value",
    "batch weights": "compute the weights from the whole data set, or return (sum, weight)",
    "gradient hook": "use join(clip=...) or pace.clip(norm), which see the whole gradient; a hook sees a part of it",
    "backward": "a backward pass must be linear in its gradient: clip or normalise the whole one by join(clip=...)",
    "update in backward": "update after the all-reduce, as join does",
    "random numbers": "each process draws its own numbers, as with dropout: the expectation is the same; to compare, "
    "switch them off",
    "unseeded randomness": "draw from torch's default generator, which torch.manual_seed sets",
    "state outside the model": "keep it in the model as a buffer, or draw from torch's default generator",
    "data": "give every process the same data set; paceline assigns the samples itself",
    "data drawn when read": "draw from (seed, sample) in the data set, or give pace.batches(workers=1), which seeds "
    "each sample",
    "data at each start": "make the data from a fixed seed: torch.Generator().manual_seed(0)",
    "rank": "do the same in every process; do not let work of rank 0 alone affect the training",
    "number of processes": "remove the scaling by WORLD_SIZE: join sums and divides once",
    "settings": "give every run the same global batch size and learning rate, whatever the number of processes",
    "update": "let the optimizer do the same in every process: no random numbers, no rank",
    "metric": "return a sum over samples, or (sum, weight)",
    "padding": "pad every batch to a fixed length, or let the model mask the padding",
    "synchronisation": f"use exchange={EXCHANGE!r} with codec {CODEC!r} to be exact",
    "float32": "this is rounding: compute the loss in the model's type, or accept it",
    "loop": "give pace.backward a mean over this process's samples, or (sum, weight)",
    "unknown": "compare the runs with fewer layers, or with fewer steps",
}
KINDS = tuple(REMEDIES)


def causes(
    found: Notes, distributed: Sequence[Notes], single: Notes, repeated: Notes | None, simulated: Sequence[Notes]
) -> list[Cause]:
    """``found``: the measurements of `experiments.examine`. Notes of runs: ``distributed``: of each of the N processes;
    ``single``: of one process; ``repeated``: of a second run of it; ``simulated``: with another rank or world size."""
    repeats = repeated is None or not _runs_differ(single, repeated)
    ranks = list(_ranks(found, distributed, single, simulated if repeats else ()))
    named = [
        *_declared(distributed),
        *_settings(distributed, single),
        *_data(found, distributed, single, repeated),
        *_randomness(found, repeats),
        *ranks,
        *_layers(found),
        *_state(found, () if any(kind == "rank" for kind, _ in ranks) else distributed, single),
        *_losses(found),
        *_gradients(found),
        *_metric_and_padding(found),
    ]
    if not named and distributed and distributed[0].get("own_loop"):
        named = [("loop", "model, state and data are the same, so the loss in the script's own loop differs")]
    return [Cause.of(kind, text) for kind, text in dict.fromkeys(named)]


def rounding_cause(found: Notes) -> Cause | None:
    """The cause "float32" if float64 becomes float32 anywhere."""
    narrow = list(found.get("narrow") or {})
    if not narrow:
        return None
    what = "the loss is computed" if "the loss" in narrow or "the model" in narrow else "a part is computed"
    return Cause.of("float32", f"{what} in float32 inside a float64 model ({_listed(narrow)})")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(name or "the model" for name in names[:FEW]) + more


def _layer(name: str) -> str:
    """The name of a module in a sentence."""
    return name if name == "the loss" else f"layer {name!r}" if name else "the model"


def _declared(distributed: Sequence[Notes]) -> Iterator[Named]:
    for notes in distributed[:1]:
        if notes.get("consensus", "step") != "step":
            yield "synchronisation", "the processes average weights periodically, and not gradients each step"
        if notes.get("codec", "exact") == "approximate":
            yield "synchronisation", "the gradient compression is lossy"


def _settings(distributed: Sequence[Notes], single: Notes) -> Iterator[Named]:
    if not distributed:
        return
    size, single_size = distributed[0].get("batch_size"), single.get("batch_size")
    if size != single_size:
        yield (
            "settings",
            f"the global batch size is {size} with {len(distributed)} processes and {single_size} with one",
        )
    rates = [notes.get("lr", []) for notes in distributed]
    if any(unequal(rates[0], each) for each in rates[1:]):
        yield "rank", "the learning rate differs between ranks"
    elif unequal(rates[0], single.get("lr", [])):
        both = "unlike"
        if rates[0] and single.get("lr"):
            both = f"{rates[0][0][0]:g} with {len(rates)} processes and {single['lr'][0][0]:g} with one"
        yield "settings", f"the learning rate is {both}"


def _data(found: Notes, distributed: Sequence[Notes], single: Notes, repeated: Notes | None) -> Iterator[Named]:
    if repeated and single.get("digests") != repeated.get("digests"):
        if found.get("drawn"):
            yield "data drawn when read", "reading the same samples twice gives other numbers"
        else:
            yield "data at each start", "two starts of one process train on different samples"
        return
    if found.get("drawn"):
        yield "data drawn when read", "reading the same samples from another random state gives other numbers"
        return
    expected = found.get("dealt")
    for rank, notes in enumerate(distributed):
        samples = expected[rank] if expected is not None and rank < len(expected) else []
        if any(a != b for a, b in zip(notes.get("digests", []), samples, strict=False)):
            yield "data", f"rank {rank} reads other samples than one process does for the same indices"
            return
    if expected is None and distributed and distributed[0].get("given"):
        for step, whole in enumerate(single.get("digests", [])):
            parts = [digest for notes in distributed for digest in (notes.get("digests", []) + [[]] * (step + 1))[step]]
            if sorted(parts) != sorted(whole):
                yield "data", "the processes' own batches are together not the one process's batch"
                return


def _randomness(found: Notes, repeats: bool) -> Iterator[Named]:
    where = [_layer(name) for name in found.get("repeats") or ()]
    drawn = found.get("random") or {}
    if not repeats and not found.get("drawn"):
        yield "unseeded randomness", f"two runs of one process differ: {_listed(where) or 'something'} ignores the seed"
    elif where:
        text = f"{_listed(where)} gives a different result each time, from the same weights, state and seed"
        yield "state outside the model", text
    elif drawn.get("differs"):
        yield "random numbers", f"forward draws random numbers ({_listed([_layer(name) for name in drawn['where']])})"


def _runs_differ(single: Notes, repeated: Notes) -> bool:
    return bool(unequal(single.get("losses", []), repeated.get("losses", []))) or any(
        _differing(a, b) for a, b in zip(single.get("state", []), repeated.get("state", []), strict=False)
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that differ between two noted states."""
    return [name for name in one if name in other and unequal(list(one[name]), list(other[name]))]


def _ranks(found: Notes, distributed: Sequence[Notes], single: Notes, simulated: Sequence[Notes]) -> Iterator[Named]:
    """Causes that depend on the rank: different weights on the ranks, or in a process with a simulated rank."""
    kinds = single.get("kinds", {})
    if distributed and distributed[0].get("consensus", "step") == "step":
        for notes in distributed[1:]:
            steps = zip(distributed[0].get("state", []), notes.get("state", []), strict=False)
            first: list[str] = next((_differing(a, b) for a, b in steps), [])
            if trained := [name for name in first if kinds.get(name) == "trained"]:
                yield "update", f"after one step the processes' weights differ ({_listed(trained)})"
                break
    for notes in simulated:
        if cause := _by_rank(found, notes, single):
            yield cause
            return


def _by_rank(found: Notes, notes: Notes, single: Notes) -> Named | None:
    """The difference that another rank, or a larger world size, makes to a single process."""
    random = (found.get("random") or {}).get("differs") or found.get("drawn")
    rank, size = notes.get("told") or (0, 1)
    kind, process = "rank" if rank else "number of processes", f"one process with RANK={rank} of {size}"
    if any(a != b for a, b in zip(notes.get("digests", []), single.get("digests", []), strict=False)):
        known = found.get("drawn") or found.get("dealt") is not None  # compared in `_data`
        return None if known else ("data", f"{process} reads different samples")
    if unequal(notes.get("lr", []), single.get("lr", [])) or notes.get("batch_size") != single.get("batch_size"):
        return None  # reported by `_settings`
    states = zip(notes.get("state", []), single.get("state", []), strict=False)
    differing: list[str] = next((names for names in (_differing(a, b) for a, b in states) if names), [])
    kinds = single.get("kinds", {})
    if still := [name for name in differing if kinds.get(name) in ("frozen", "buffer")]:
        return kind, f"{process} updates {_listed(still)} differently (a moving average that reads it)"
    losses = list(zip(notes.get("losses", []), single.get("losses", []), strict=False))
    if random or not losses:
        return None
    if unequal(losses[0][0], losses[0][1]):
        return kind, f"{process} has a different loss in the first step"
    if differing or any(unequal(a, b) for a, b in losses):
        return kind, f"{process} trains differently ({_listed(differing) or 'its loss'})"
    return None


def _layers(found: Notes) -> Iterator[Named]:
    layers = found.get("layers") or []
    for kind, cause, text in (
        ("normalises", "batch norm", "{} normalises over the samples that its process has (local batch norm)"),
        ("size", "layer by size", "{} depends on the number of samples"),
        ("buffers", "buffers", "{} uses buffers in forward that the same batch has updated"),
        ("mixes", "layer", "{} mixes the samples of a batch"),
    ):
        matching = [each for each in layers if each["kind"] == kind]
        if matching and not (kind == "normalises" and found.get("sync")):
            names = [f"{_layer(each['name'])} ({each['type']})" for each in matching]
            branch = " (a branch: it calls other layers)" if any(each["path"] for each in matching) else ""
            yield cause, text.format(_listed(names)) + branch


def _state(found: Notes, distributed: Sequence[Notes], single: Notes) -> Iterator[Named]:
    state = found.get("state") or []
    for kind, cause, text in (
        ("buffer", "buffers", "forward updates the buffers {} from its own samples"),
        ("frozen", "momentum encoder", "forward updates the parameters {}, which do not train, from its own samples"),
        ("trained", "layer", "forward changes the weights {} from its own samples"),
        ("attribute", "hidden state", "forward keeps state of its own samples in {}, which is not a buffer"),
    ):
        names = [each["name"] for each in state if each["kind"] == kind]
        if names:
            read = " and reads them again" if any(each["feeds"] for each in state if each["kind"] == kind) else ""
            yield cause, text.format(_listed(names)) + read
    moved = [each["name"] for each in state if each["kind"] == "momentum"]
    first = (single.get("state") or [{}])[0]
    differing = {name for notes in distributed for name in _differing((notes.get("state") or [{}])[0], first)}
    if moved := [name for name in moved if name in differing]:
        yield "momentum encoder", f"each forward pass moves {_listed(moved)} once, and N make N of them a step"


def _losses(found: Notes) -> Iterator[Named]:
    for notes in found.get("laws") or []:
        if not notes["exact"]:
            term = f"the loss's term {notes['term']!r}" if notes["term"] else "the loss"
            yield _loss_cause(term, notes)


def _loss_cause(term: str, notes: Notes) -> Named:
    factors, residual, grows = notes["factors"], notes["residual"], notes["grows"]
    steady = not unequal(float(grows[0]), float(grows[-1]), 1e-3)
    size_invariant = all(abs(each - 1.0) < 1e-3 for each in grows)
    if residual < 1e-4:
        if all(abs(factor - 1.0) < 1e-4 for factor in factors) and steady and not size_invariant:
            return "sum", f"{term} is a sum over samples, and not a mean: it doubles with the batch"
        if notes["weighed"]:
            return "weighted mean", f"{term} comes as (sum, weight), but its sum is not over the elements that count"
        if abs(sum(factors) - 1.0) < 1e-4 and size_invariant:
            if notes["counts"]:
                return "weighted mean", f"{term} is a mean over something other than samples: over {notes['counts']}"
            of = "samples weighted by class" if notes["by_class"] else "something else, such as tokens or class weights"
            return "weighted mean", f"{term} is a mean over something other than samples: {of}"
        if size_invariant:
            return "function of a mean", f"{term} is not a mean but a function of a mean, such as its root"
    if notes["others"]:
        return "compares samples", f"{term} compares each sample with the others of its batch (in-batch negatives)"
    if not size_invariant:
        return "loss by size", f"{term} depends on the size of the batch (a branch or a divisor)"
    if not notes["by_output"] and not notes["by_class"]:
        return "compares samples", f"{term} depends on which samples share a batch"
    return "batch weights", f"{term} weights samples by the rest of the batch"


def _gradients(found: Notes) -> Iterator[Named]:
    hooks, backward = found.get("hooks") or {}, found.get("backward") or {}
    if hooks.get("updates"):
        yield "update in backward", f"a hook changes the weights {_listed(hooks['updates'])} during backward"
    if names := hooks.get("names"):
        yield "gradient hook", f"a hook changes each process's gradient of {_listed(names)} by its size (clipping)"
    if names := backward.get("names"):
        if backward["how"] == "hook":
            yield "gradient hook", f"a hook inside the model changes each process's gradient of {_listed(names)}"
        else:
            yield "backward", f"the backward pass of {_listed(names)} is not linear in its gradient"


def _metric_and_padding(found: Notes) -> Iterator[Named]:
    if names := found.get("metric"):
        yield "metric", f"{_listed(names)} depends on the number of samples per call: it is not a sum over samples"
    if found.get("padding"):
        yield "padding", "the result depends on the length to which a process's samples are padded"
