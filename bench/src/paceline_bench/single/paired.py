"""Contenders by turns: a round is a life of each, in fresh processes; only ratios within a round are compared.

Contenders that live at the same time and step by turns: what disturbs the machine for seconds disturbs them alike.

Each connects to a socket of its own, says of how many processes it is one, and takes as many steps as it is asked for.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Contender", "PairedRun", "Spread", "Turn", "fight"]

WARM_UP_TURNS = 3

STUDENT_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # by rounds - 1, two-sided


@dataclass(frozen=True)
class Spread:
    """The median over rounds, and the 90 % interval of the mean (Student's t): of a single one, everything."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Spread:
        mean, half = statistics.fmean(each), math.inf
        if len(each) > 1:
            student = STUDENT_90[min(len(each) - 2, len(STUDENT_90) - 1)]
            half = student * statistics.stdev(each) / len(each) ** 0.5
        return cls(statistics.median(each), mean - half, mean + half)

    @classmethod
    def of_ratios(cls, slow: Sequence[float], fast: Sequence[float]) -> Spread:
        """How often faster, round by round; the mean is that of logarithms."""
        logs = cls.of([math.log(a / b) for a, b in zip(slow, fast, strict=True)])
        return cls(math.exp(logs.median), math.exp(logs.low), math.exp(logs.high))

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.median:.3f} (once, so without an interval)"
        return f"{self.median:.3f} (90 %: {self.low:.3f} to {self.high:.3f})"


@dataclass
class PairedRun:
    """All turns of all contenders on one model and batch."""

    model: str
    batch: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def step_s(self, name: str) -> float:
        return statistics.median(turn.step_s for turn in self.turns[name])

    def ratio(self, slow: str, fast: str) -> Spread:
        return Spread.of_ratios([t.step_s for t in self.turns[slow]], [t.step_s for t in self.turns[fast]])

    def memory(self, more: str, less: str, what: str = "peak_bytes") -> float:
        """Median bytes of ``less`` over those of ``more``."""
        one, other = (statistics.median(getattr(t, what) for t in self.turns[name]) for name in (less, more))
        return float(one / other)


def fight(
    model: str,
    batch: int,
    contenders: Sequence[Contender],
    rounds: int,
    steps: tuple[int, int],
    show: Callable[[str], None] = lambda doing: None,
) -> PairedRun:
    """``steps``: turns of each contender in a round, and steps in a turn. Raises ValueError naming who failed."""
    duel = PairedRun(model, batch, {contender.name: [] for contender in contenders})
    names = ", ".join(duel.turns)
    for i in range(rounds):
        show(f"{model} b{batch}, round {i + 1} of {rounds}: {names}")
        lives = play(contenders, model, batch, *steps, random.Random(i).shuffle, WARM_UP_TURNS)
        for name, life in lives.items():
            duel.turns[name].append(life)
    return duel


LIMIT_S = 300.0  # of one turn, and of everything before the first


@dataclass(frozen=True)
class Contender:
    """``engine``: the row that ours computes with, or how many processes the other starts."""

    name: str
    way: str
    engine: str = "sequential"


@dataclass
class Turn:
    """One life. *Units*: seconds per step (the slowest process's), bytes over all processes."""

    step_s: float
    loss: float
    peak_bytes: int
    pss_bytes: int


class Player:
    """One contender, alive: warm when asked, one turn when asked. Raises ValueError where it fails."""

    def __init__(self, contender: Contender, model: str, batch: int):
        self.contender, self.job = contender, f"{model} with batch {batch}"
        self.steps_s: list[float] = []
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        place = str(Path(self._folder.name) / "turns")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(place)
        self._server.listen()
        self._server.settimeout(0.2)
        self._lines: list[Any] = []
        environment = {**os.environ, "PACELINE_BENCH": place}
        if contender.way.startswith(("torch", "paceline")):
            environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        engine = "processes:2" if contender.way.startswith("ddp") else contender.engine
        command = [sys.executable, "-m", "paceline", "run", "--plan", engine, "-m", "paceline_bench.single.contender"]
        self._process = subprocess.Popen(
            [*command, contender.way, model, str(batch)], env=environment, stdin=subprocess.DEVNULL
        )

    def meet(self) -> None:
        """Until all of its processes are there."""
        end, size = time.monotonic() + LIMIT_S, 1
        while len(self._lines) < size:
            try:
                line, _ = self._server.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise self._failed() from None
                continue
            line.settimeout(LIMIT_S)
            self._lines.append(line.makefile("rw"))
            line.close()  # the file holds it
            size = self._hear(self._lines[-1])["size"]

    def step(self, times: int) -> float:
        """Median seconds of ``times`` steps in a row, the slowest process's."""
        return max(float(said["step_s"]) for said in self._ask(times))

    def end(self) -> Turn:
        said = self._ask(0)
        return Turn(
            statistics.median(self.steps_s),
            said[0]["loss"],
            sum(one["peak_bytes"] for one in said),
            sum(one["pss_bytes"] for one in said),
        )

    def close(self) -> None:
        for line in self._lines:
            line.close()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._server.close()
        self._folder.cleanup()

    def _ask(self, times: int) -> list[dict[str, Any]]:
        try:
            for line in self._lines:
                line.write(f"{times}\n")
                line.flush()
        except OSError:
            raise self._failed() from None
        return [self._hear(line) for line in self._lines]

    def _hear(self, line: Any) -> dict[str, Any]:
        try:
            words = line.readline()
        except OSError:
            words = ""
        if not words:
            raise self._failed()
        said: dict[str, Any] = json.loads(words)
        return said

    def _failed(self) -> ValueError:
        self._process.terminate()
        try:
            code = str(self._process.wait(20.0))
        except subprocess.TimeoutExpired:
            code = f"none within {LIMIT_S:.0f} s"
        return ValueError(f"{self.contender.name} failed on {self.job} (exit code {code}); its error is above")


def play(
    contenders: Sequence[Contender],
    model: str,
    batch: int,
    turns: int,
    times: int,
    shuffle: Callable[[list[Player]], None],
    warm_up: int,
) -> dict[str, Turn]:
    """One life of each: ``warm_up`` turns that do not count, then ``turns``, each of ``times`` steps."""
    players: list[Player] = []
    try:
        for contender in contenders:
            players.append(Player(contender, model, batch))
        for player in players:
            player.meet()
        for i in range(warm_up + turns):
            order = list(players)
            shuffle(order)
            for player in order:
                step_s = player.step(times)
                if i >= warm_up:
                    player.steps_s.append(step_s)
        return {player.contender.name: player.end() for player in players}
    finally:
        for player in players:
            player.close()
