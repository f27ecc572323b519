"""A race: who runs, on what, over which links. Written for the nodes to read; what they measured is read again.

Runs a race, round after round, and says how its contenders compare.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline_bench.cluster import peers
from paceline_bench.cluster.driver import drive
from paceline_bench.cluster.work import Work
from paceline_bench.result import Finding, Show
from paceline_bench.single.paired import Spread

COLUMNS = ("contender", "rows/s, all nodes", "s/step, median", "quartiles", "turns", "MB per node and step")


@dataclass(frozen=True)
class Entry:
    """One contender. ``way``: "paceline", or the name of a file in benchmarks/peers.

    ``row``: an engine and numerics, of which peers take the numerics. ``options``: of `join`; ``environment``: while it
    joins. ``block``: steps of one turn, timed together and ended by a wait for all that is still on its way. ``most``:
    turns per phase, spread over it, for one whose step is slow. ``dealt``: rows come from a global batch by shares.
    """

    name: str
    way: str = "paceline"
    row: str = "sequential"
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    block: int = 1
    most: int = 10**6
    dealt: bool = False

    def plays(self, turn: int, turns: int) -> bool:
        often = min(self.most, turns)
        return (turn + 1) * often // turns > turn * often // turns


@dataclass(frozen=True)
class Phase:
    """So many turns over links of one rate. ``warm_up``: turns before them that are not counted."""

    rate: str | None = None
    turns: int = 20
    warm_up: int = 3


@dataclass(frozen=True)
class Race:
    """``batch``: rows per node. ``limit_s``: for all phases; a phase is cut short where its part is used up.

    ``held``: a node's number and the fraction of a core that it is held to, from the first phase on.
    ``delay_ms``: of the links, one way.
    """

    model: str
    batch: int
    nodes: int
    entries: tuple[Entry, ...]
    phases: tuple[Phase, ...]
    limit_s: float = 600.0
    held: tuple[int, float] | None = None
    delay_ms: float = 0.0

    @property
    def late(self) -> str:
        """How late the links are, to be added to their rate."""
        return f", {self.delay_ms:g} ms one way" if self.delay_ms else ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Race:
        said = json.loads(path.read_text())
        said["entries"] = tuple(Entry(**entry) for entry in said["entries"])
        said["phases"] = tuple(Phase(**phase) for phase in said["phases"])
        said["held"] = tuple(said["held"]) if said["held"] else None
        return cls(**said)


@dataclass
class Lap:
    """One contender in one phase, turn by turn. *Units*: seconds per step of the slowest node, bytes per step of the
    node that sends most. ``turns`` are numbered over all rounds, so that equal numbers ran side by side."""

    turns: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Result:
    """``laps``: of each phase, by contender. ``notes``: what the nodes have to say beside figures."""

    race: Race
    laps: list[dict[str, Lap]]
    notes: list[str] = field(default_factory=list)

    def rate(self, phase: int, name: str) -> float:
        """Rows per second over all nodes."""
        return self.race.batch * self.race.nodes / self.laps[phase][name].step_s

    def megabytes(self, phase: int, name: str) -> float:
        """Sent per node and step."""
        return statistics.median(self.laps[phase][name].sent) / 1e6

    def ratio(self, phase: int, slow: str, fast: str) -> Spread:
        """How often ``fast`` is as fast as ``slow``, by turns that both played."""
        one, other = self.laps[phase][slow], self.laps[phase][fast]
        both = sorted(set(one.turns) & set(other.turns))
        if not both:
            raise ValueError(f"{slow} and {fast} never ran in one turn; allow more time or turns")
        ones, others = (dict(zip(lap.turns, lap.seconds, strict=True)) for lap in (one, other))
        return Spread.of_ratios([ones[turn] for turn in both], [others[turn] for turn in both])

    def add(self, later: Result) -> None:
        """Another round of the same race."""
        for mine, theirs in zip(self.laps, later.laps, strict=True):
            first = 1 + max((turn for lap in mine.values() for turn in lap.turns), default=-1)
            for name, lap in theirs.items():
                mine[name].turns += [first + turn for turn in lap.turns]
                mine[name].seconds += lap.seconds
                mine[name].sent += lap.sent
        self.notes += [note for note in later.notes if note not in self.notes]

    def table(self) -> str:
        return "\n\n".join(self._phase(number) for number in range(len(self.laps)))

    def _phase(self, number: int) -> str:
        phase, race, laps = self.race.phases[number], self.race, self.laps[number]
        lead = next((entry.name for entry in race.entries if entry.way == "paceline"), race.entries[0].name)
        columns = [*COLUMNS, f"{lead} is faster by (90 %)"]
        lines = [
            f"{race.model}, {race.batch} rows per node and step, {race.nodes} nodes, links of "
            f"{phase.rate or 'no limited rate'}{race.late}",
            "",
            f"| {' | '.join(columns)} |",
            f"|{'---|' * len(columns)}",
        ]
        for name, lap in laps.items():
            low, high = quartiles(lap.seconds)
            block = next((entry.block for entry in race.entries if entry.name == name), 1)
            turns = f"{len(lap.turns)}, of {block} steps" if block > 1 else f"{len(lap.turns)}"
            lines.append(
                f"| {name} | {self.rate(number, name):.2f} | {lap.step_s:.3f} | {low:.3f} to {high:.3f} | "
                f"{turns} | {self.megabytes(number, name):.2f} | {self.ratio(number, name, lead)} |"
            )
        return "\n".join(lines)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def result(race: Race, said: Sequence[dict[str, Any]]) -> Result:
    """Of what each node has written: seconds are agreed among them already, bytes are each one's own."""
    laps: list[dict[str, Lap]] = []
    for phase in range(len(race.phases)):
        by_name = {}
        for entry in race.entries:
            each = [node["laps"][phase][entry.name] for node in said]
            most = [max(sent) for sent in zip(*(lap["sent"] for lap in each), strict=True)]
            if not most:
                raise ValueError(
                    f"{entry.name} had no turn within {race.limit_s:.0f} s at "
                    f"{race.phases[phase].rate}; allow more time"
                )
            by_name[entry.name] = Lap(each[0]["turns"], each[0]["seconds"], most)
        laps.append(by_name)
    return Result(race, laps, list(dict.fromkeys(note for node in said for note in node["notes"])))


SETUP_S = 400.0  # to start, to make all models and to send their first weights


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long to measure. ``turns``: instead of each race's own, with as much warm-up at most."""

    rounds: int = 1
    turns: int | None = None

    def of(self, race: Race) -> Race:
        if self.turns is None:
            return race
        phases = tuple(
            dataclasses.replace(phase, turns=self.turns, warm_up=min(phase.warm_up, self.turns))
            for phase in race.phases
        )
        return dataclasses.replace(race, phases=phases)


def run(race: Race, pace: Pace, show: Show, files: Sequence[Path] = ()) -> Result:
    """``files``: timelines that the nodes replay.

    Raises ValueError for a model, a row or a peer that is not known, and where a node fails."""
    race = pace.of(race)
    for entry in race.entries:
        if entry.way != "paceline":
            peers.check(entry.way)
        if not entry.row.startswith("emulated"):
            Work(race.model, 1, row=entry.row)
    if race.nodes < 2 or race.batch < 1 or pace.rounds < 1 or min(phase.turns for phase in race.phases) < 1:
        raise ValueError(
            f"a race needs 2 nodes, 1 row, 1 step and 1 round or more; got {race.nodes} nodes, {race.batch} rows, "
            f"{min(phase.turns for phase in race.phases)} steps, {pace.rounds} rounds"
        )
    whole: Result | None = None
    for number in range(pace.rounds):
        show(f"{race.model} on {race.nodes} nodes, round {number + 1} of {pace.rounds}: starting")
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            race.write(Path(folder) / "race.json")
            for file in files:
                shutil.copy(file, folder)
            command = ["-m", "paceline_bench.cluster.node"]
            limit_s = race.limit_s + SETUP_S
            one = result(race, drive(race.nodes, command, Path(folder), limit_s, show, race.delay_ms))
        if whole:
            whole.add(one)
        else:
            whole = one
    assert whole
    return whole


def faster(task: str, got: Result, phase: int, mine: str, peer: str, demanded: float) -> Finding:
    """``mine`` over ``peer``, turn by turn: the lower bound counts."""
    ratio = got.ratio(phase, peer, mine)
    what = f"{where(got, phase)}: {mine} over {peer}"
    return Finding(task, what, str(ratio), f">= {demanded:g}", ratio.low >= demanded)


def light(task: str, got: Result, phase: int, mine: str, most_mb: float) -> Finding:
    megabytes = got.megabytes(phase, mine)
    what = f"{where(got, phase)}: MB per node and step of {mine}"
    return Finding(task, what, f"{megabytes:.2f}", f"<= {most_mb:g}", megabytes <= most_mb)


def lighter(task: str, got: Result, phase: int, mine: str, peer: str, most: float) -> Finding:
    ratio = got.megabytes(phase, mine) / got.megabytes(phase, peer)
    what = f"{where(got, phase)}: bytes of {mine} over those of {peer}"
    return Finding(task, what, f"{ratio:.3f}", f"<= {most:g}", ratio <= most)


def where(got: Result, phase: int) -> str:
    race = got.race
    link = f"{race.phases[phase].rate or 'same host'}{race.late}"
    return f"{race.model} b{race.batch}, {race.nodes} nodes, {link}"
