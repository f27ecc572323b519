"""Candidate configurations of a machine and a model, such as "processes:2+bf16+channels_last", simplest first.

ENGINE[:k][/ENGINE:k][+option...]  channels_last  torch.channels_last memory format for images (exact)
                                   fused          fused optimizer kernel (exact)
                                   compile        torch.compile (exact up to reassociation)
                                   bf16, fp16     autocast (rounded)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.launch.machine import Machine
from paceline.registry import BASELINE, PROCESSES, current, heads, names, refuse_unknown, says

ROUNDED = ("bf16", "fp16")
WORDS = (*ROUNDED, "channels_last", "fused", "compile")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
MARGIN = 0.9  # of the memory: a candidate that needs more is refused
RUNTIME_BYTES = 300 << 20  # of a process that has imported torch, where that was not measured
ALLOWED = {"exact": 0, "rounded": 1, "approximate": 2}


@dataclass(frozen=True)
class JobFacts:
    """Properties of a model and optimizer that candidates depend on. *Units*: bytes, activations of one of `parts`."""

    rows: int = 1
    device: str = "cpu"
    images: bool = False  # the model has 2D convolutions
    batch_norm: bool = False
    can_fuse: bool = False
    weight_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    division: str = ""  # how the optimizer's work is sharded among processes
    parts: int = 1  # micro-batches per step
    runtime_bytes: int = RUNTIME_BYTES  # of a process with torch and its data
    max_stages: int = 0  # into which the model can be cut; 0: not known
    cuts: str = ""  # why not into more

    @property
    def part_rows(self) -> int:
        """Samples of the largest micro-batch."""
        return -(-self.rows // self.parts)


@dataclass(frozen=True)
class EngineSpec:
    """A parsed configuration: ``copies`` of the model, each with a share of the batch, or ``stages`` of one; each of
    them has ``threads``. ``micros``: micro-batches of a copy's share; ``turn_s``: `EngineTraits.turn_s`."""

    engine: str
    copies: int
    threads: int
    words: tuple[str, ...]
    stages: int = 1
    micros: int = 1
    turn_s: float = 0.0

    @property
    def at_once(self) -> int:
        """How many compute at the same time."""
        return self.copies * self.stages

    def stretch(self, largest: float) -> float:
        """The time of all micro-batches, in that of one by itself. ``largest``: the longest stage's part."""
        return 1 + (self.micros - 1) * largest

    @property
    def held(self) -> float:
        """The activations held at once, in those of a whole share: one micro-batch for each stage in flight, and one of
        the first step. Fewer layers are in use at once, but a thread keeps what it freed."""
        return min(1.0, (self.stages + 1) / self.micros) if self.stages > 1 else 1.0

    @property
    def processes(self) -> int:
        return self.copies if says("engine", self.engine, "starts_processes") else 1


def split(candidate: str, cores: int) -> EngineSpec:
    """Parses a configuration. Raises ValueError for an invalid one."""
    present = current("engine", candidate)
    words, parts = present.split("+")[1:], [(name, *_arguments(given)) for name, given in heads(present)]
    unknown = [word for word in words if word not in WORDS]
    if (
        unknown
        or not all(_is_name(name) and (not count or (count.isdigit() and int(count))) for name, count, _ in parts)
        or (parts[1:] and not (says("engine", parts[0][0], "starts_processes") and len(parts) == 2))
        or not all(says("engine", name, "composes") for name, *_ in parts[1:])
    ):
        raise ValueError(
            f"configuration {candidate!r} is not of the form ENGINE[:k][,option=value...][/ENGINE:k][+option...], as "
            f"in '{PROCESSES}:2+channels_last', ENGINE a name or package.module:Class; options after a +: "
            f"{', '.join(WORDS)}" + (f"; unknown: {', '.join(unknown)}" if unknown else "")
        )
    for name, *_ in parts:
        refuse_unknown("engine", name)
    copies = stages = micros = 1
    threads, turn_s = 0, 0.0
    for name, count, options in parts:
        counts = says("engine", name, "counts")
        k = int(count) if count else {"": 1, "thread": cores}.get(counts, 2)
        copies *= k if counts == "copy" else 1
        if counts == "stage" and k > 1:
            given = options.get("micros", "")
            micros = int(given) if given.isdigit() and int(given) else says("engine", name, "micros_per_stage") * k
            stages, turn_s = k, says("engine", name, "turn_s")
        threads = threads or {"copy": 0, "stage": 0, "share": cores}.get(counts, k)
    threads = threads or max(1, cores // (copies * stages))
    return EngineSpec(parts[0][0], copies, threads, tuple(words), stages, micros, turn_s)


def _arguments(given: str) -> tuple[str, dict[str, str]]:
    """(the count, the options) of an engine: "2,micros=8" is ("2", {"micros": "8"})."""
    words = [word.partition("=") for word in given.split(",") if word]
    return ",".join(key for key, equals, _ in words if not equals), {k.strip(): v for k, equals, v in words if equals}


def _is_name(engine: str) -> bool:
    """That of an engine, or package.module:Class."""
    return all(part.isidentifier() for part in engine.replace(":", ".").split("."))


def fidelity(candidate: str, facts: JobFacts | None = None) -> str:
    """The fidelity column of the plan's table: "exact", "exact, local BN" or "rounded"."""
    level = "rounded" if set(candidate.split("+")) & set(ROUNDED) else "exact"
    spec = split(candidate, 1)
    shared = spec.copies * spec.micros > 1 and facts is not None and facts.batch_norm
    return f"{level}, local BN" if shared else level


def allowed(candidate: str, level: str) -> bool:
    return ALLOWED[fidelity(candidate).partition(",")[0]] <= ALLOWED[level]


def check(level: str) -> None:
    """Raises ValueError for an unknown fidelity."""
    if level not in ALLOWED:
        raise ValueError(f"fidelity must be one of {', '.join(ALLOWED)}, got {level!r}")


def planned() -> tuple[str, ...]:
    """The engines that the planner tries, simplest first."""

    known = "", "thread", "copy", "stage"

    def complexity(name: str) -> tuple[int, bool]:
        counts = says("engine", name, "counts")  # an engine of another package may count anything
        return [*known, counts].index(counts), says("engine", name, "starts_processes")

    return tuple(sorted((name for name in names("engine") if says("engine", name, "planned")), key=complexity))


def predictable(engine: str) -> bool:
    """Whether the planner knows what a configuration of it computes at once."""
    counts = says("engine", engine, "counts")
    return bool(says("engine", engine, "planned")) and (engine == BASELINE or counts in ("thread", "copy", "stage"))


def candidates(
    level: str, machine: Machine, facts: JobFacts, engines: tuple[str, ...], compile_too: bool = False
) -> list[str]:
    """The baseline first, then every engine, then the engines with options; candidates beyond ``level`` come last.

    ``engines``: the engines with several model copies that may be tried. Candidates beyond the allowed fidelity stay in
    the list to show what they would gain.
    """
    found = [BASELINE, *_engines(machine, facts, engines)]
    numerics = list(_numerics(machine, facts))
    whole = [head for head in found if not _uncut(head, machine, facts)]
    found += [f"{head}+{words}" for words in numerics for head in whole if words]
    if compile_too and machine.compiler:
        found += [
            f"{head}+compile"
            for head in found
            if "+" not in head and head != BASELINE and split(head, machine.cores).stages == 1
        ]
    return sorted(found, key=lambda candidate: not allowed(candidate, level))


def _engines(machine: Machine, facts: JobFacts, engines: tuple[str, ...]) -> Iterator[str]:
    cores, halves = machine.cores, machine.cores // 2
    if facts.device != "cpu" or cores == 1:
        return
    for engine in planned():
        counts = says("engine", engine, "counts")
        if counts == "thread" and 1 < machine.physical_cores < cores:
            yield f"{engine}:{machine.physical_cores}"
        if counts == "thread":
            yield f"{engine}:{cores}"
        for count in (cores, halves) if counts == "copy" and engine in engines else ():
            if 1 < count <= facts.rows:
                yield f"{engine}:{count}"
        if counts == "stage" and says("engine", engine, "micros_per_stage") * cores <= facts.part_rows:
            yield f"{engine}:{cores}"
            if PROCESSES in engines and cores > 2 and cores % 2 == 0:
                yield f"{PROCESSES}:{halves}/{engine}:2"


def _numerics(machine: Machine, facts: JobFacts) -> Iterator[str]:
    on_gpu = facts.device != "cpu"
    layouts = ["", "channels_last"] if facts.images else [""]
    yield from layouts
    if facts.can_fuse:
        yield from ("+".join(filter(None, (layout, "fused"))) for layout in layouts)
    halves = [word for word, can in (("bf16", on_gpu or BF16_FLAGS & set(machine.flags)), ("fp16", on_gpu)) if can]
    yield from ("+".join(filter(None, (half, layout))) for half in halves for layout in layouts)


def needed_bytes(candidate: str, facts: JobFacts, cores: int) -> int:
    """Approximate memory of all processes together: weights and optimizer state once, gradients once per copy, and the
    activations of the micro-batches in flight."""
    spec = split(candidate, cores)
    bytes_ = spec.processes * facts.runtime_bytes + facts.weight_bytes + facts.state_bytes
    return bytes_ + spec.copies * facts.gradient_bytes + round(facts.activation_bytes * spec.held)


def refusal(candidate: str, facts: JobFacts, machine: Machine) -> str:
    """Why it cannot be used; empty where it can. What fits into a GPU's memory is found by trying."""
    needed, usable = needed_bytes(candidate, facts, machine.cores), int(MARGIN * machine.memory_bytes)
    if facts.device == "cpu" and needed > usable:
        return f"out of memory: needs {needed >> 20} MiB, {usable >> 20} MiB can be used"
    return f"refused: {facts.cuts}" if _uncut(candidate, machine, facts) else ""


def _uncut(candidate: str, machine: Machine, facts: JobFacts) -> bool:
    return 0 < facts.max_stages < split(candidate, machine.cores).stages


def fits_timed(copies: int, rows: int, facts: JobFacts, machine: Machine, added: bool = False) -> bool:
    """Whether so many copies of a process can time layers at once, which keep their inputs beside a whole forward.
    ``added``: or a micro-batch, whose gradients they keep."""
    others = needed_bytes(BASELINE, replace(facts, activation_bytes=0), machine.cores)
    each = facts.runtime_bytes + 2 * facts.activation_bytes * rows / facts.part_rows + added * facts.gradient_bytes
    return facts.device != "cpu" or others + copies * each <= MARGIN * machine.memory_bytes


def fitting_rows(facts: JobFacts, machine: Machine) -> int:
    """The most samples of a micro-batch that the baseline computes at once in this memory."""
    if facts.device != "cpu":
        return facts.part_rows
    others = needed_bytes(BASELINE, replace(facts, activation_bytes=0), machine.cores)
    part = (MARGIN * machine.memory_bytes - others) / max(1, facts.activation_bytes)
    return int(facts.part_rows * min(1.0, max(0.0, part)))
