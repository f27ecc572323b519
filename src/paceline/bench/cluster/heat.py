"""Runs a race, round after round, and says how its contenders compare."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.bench.cluster import peers
from paceline.bench.cluster.driver import drive
from paceline.bench.cluster.race import Race, Result, result
from paceline.bench.cluster.work import Work
from paceline.bench.finding import Finding, Show

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
        if not entry.row.startswith("replay"):
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
            command = ["-m", "paceline.bench.cluster.node"]
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


def where(got: Result, phase: int) -> str:
    race = got.race
    link = f"{race.phases[phase].rate or 'same host'}{race.late}"
    return f"{race.model} b{race.batch}, {race.nodes} nodes, {link}"
