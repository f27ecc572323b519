"""One training, struck again and again until it ends. Where a fault ends it, it is started again from its checkpoint.

start      `paceline run --detach -H node0,... --nodes 2:N`, as a user would
strike     at a random moment, when all have trained for a while
settle     until every process that is left has applied AFTER steps more; the fault is taken back in its time
again      with another number of nodes and another engine, where too few are left or nobody is
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from paceline.launch.detach import Detached
from paceline.launch.local import num_processes
from paceline_bench import SOURCES
from paceline_bench.chaos import journal, training
from paceline_bench.chaos.faults import ENDING, LAUNCHER_KILLED, LOSING, Fault, strike
from paceline_bench.chaos.hosts import Machines
from paceline_bench.chaos.journal import Life
from paceline_bench.chaos.ways import ALLREDUCE, WAYS

MIN_NODES = 2
AFTER = 10  # steps that say that a fault is over
HANG_S = 15.0  # without a step, on a process that is left: nobody should wait longer
BEGIN_S, SETTLE_S, END_S = 60.0, 60.0, 40.0
POLL_S = 0.01
AT_ONCE_S = 1.0  # what was on its way may still end some steps
FEW = MIN_NODES + 1  # nodes that may have several processes each, on few cores: one of them can be lost
LAST_LINES, MAX_STARTS = 8, 40


@dataclass
class Outcome:
    """What a fault came to. ``way``, ``engine``: how those trained that it struck. ``nodes``, ``step``: when.
    ``recovery_s``: without a step on those who are left, from the fault on; for a fault that ends the run, until its
    next start has got further. ``lost``: steps that were computed again. ``left``: the nodes that go on. ``back``: how
    many came back before the next fault. ``wrong``: by the laws."""

    seed: int
    launch: int
    fault: Fault
    nodes: int
    step: int
    struck_s: float
    way: str = ALLREDUCE
    engine: str = ""
    recovery_s: float | None = None
    lost: int = 0
    left: tuple[int, ...] = ()
    back: int = 0
    ended: str = ""  # the run's last words, where the fault ended it and should not have
    hung: str = ""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        trained = f"{self.way} {self.engine}".strip()
        parts = [f"seed {self.seed}, step {self.step}, {self.nodes} nodes, {trained}: {self.fault}"]
        parts += [f"recovered in {self.recovery_s:.2f} s"] if self.recovery_s is not None else []
        parts += [f"{self.lost} steps again"] if self.lost else []
        parts += [f"{len(self.left)} nodes go on"] if self.left else []
        parts += [f"HUNG: {self.hung}"] if self.hung else []
        parts += [f"ENDED THE RUN: {self.ended}"] if self.ended else []
        return "; ".join([*parts, *(f"WRONG: {each}" for each in self.wrong)])


class FaultRun:
    """``disk``: a small one, for the run's folder. ``folder``: for journals. What happens is ``seed``'s, and the
    moment's."""

    def __init__(
        self,
        machines: Machines,
        folder: Path,
        disk: Path,
        seed: int,
        kinds: Sequence[str],
        epochs: int,
        show: Callable[[str], None],
        planned: Sequence[Fault] = (),
        name: str = ALLREDUCE,
    ):
        self.machines, self.cluster, self.folder, self.disk = machines, machines.cluster, folder, disk
        self.seed, self.kinds, self.epochs, self.show = seed, kinds, epochs, show
        self.dice, self.planned, self.name, self.way = Random(seed), list(planned), name, WAYS[name]
        self.known: dict[str, Life] = {}
        self.outcomes: list[Outcome] = []
        self.launches, self.count, self.engine = 0, 0, ""
        self._run: Detached | None = None

    def run(self, most: int) -> None:
        """Until the training has ended, whole. After ``most`` faults it is left in peace."""
        try:
            while not self._over():
                self._start()
                while len(self.outcomes) < most and self._newest() < self.epochs * training.STEPS - 3 * AFTER:
                    self._wait(self.dice.uniform(0.3, 1.5))
                    nodes = self._nodes()
                    if not nodes or not (fault := self._next(nodes)):
                        break
                    self._play(fault, nodes)
                self._wait_for_end()
            self._note_ends()
            self._note_returns()
        finally:
            self._kill()

    # who is there

    @property
    def lives(self) -> list[Life]:
        """The processes of this launch, as far as is known, that have begun."""
        return [life for life in self.known.values() if life.launch == self.launches and life.applied]

    def _read(self) -> None:
        journal.read(self.folder, self.known)

    def _living(self) -> list[Life]:
        self._read()
        return [life for life in self.lives if life.lives and not life.ended]

    def _nodes(self) -> list[int]:
        return sorted({life.node for life in self._living()})

    def pids(self, node: int) -> list[int]:
        return [life.pid for life in self._living() if life.node == node]

    def launcher(self) -> int | None:
        """None: it has gone."""
        return int((self._run.folder / "pid").read_text()) if self._run and self._run.running else None

    def _over(self) -> bool:
        return any(life.ended for life in self.known.values())

    def _newest(self) -> int:
        return max((life.newest for life in self.known.values()), default=-1)

    # start and end

    def _start(self) -> None:
        self.launches += 1
        self.count, self.engine = self._next_team()
        words = [
            *(sys.executable, "-m", "paceline", "run", "--detach", "-H", self.machines.hosts(self.count)),
            *("--ssh", self.machines.ssh, "--nodes", f"{MIN_NODES}:{self.count}", "--plan", self.engine),
            *(("--restarts", "0") if self.way.ends else ()),  # it is started here, where it can be counted
            *("--out", str(self.disk / "run"), "-m", training.__name__),
            *(str(self.folder), str(self.launches), str(self.epochs), "", self.name),
        ]
        self.show(f"seed {self.seed}: start {self.launches}, {self.count} nodes, {self.engine}")
        paths = os.pathsep.join(filter(None, (*SOURCES, os.environ.get("PYTHONPATH", ""))))
        environment = {"XDG_STATE_HOME": str(self.folder), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        before = set(self._runs())
        done = subprocess.run(
            words, env={**os.environ, **environment}, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(f"the run did not start: {(done.stdout + done.stderr).strip()[-2000:]}")
        (name,) = set(self._runs()) - before
        self._run = Detached(name)
        self._wait_for_begin(self.count * num_processes(self.engine))

    def _next_team(self) -> tuple[int, str]:
        """All nodes at first; then another number than before, and another engine."""
        if self.launches > MAX_STARTS:
            raise ValueError(f"the training was started {MAX_STARTS} times, and has not ended")
        nodes = self.cluster.num_nodes
        if self.launches == 1:
            return nodes, self.way.engines[0] if nodes > FEW else self.way.engines[-1]
        count = self.dice.choice([n for n in range(MIN_NODES, nodes + 1) if n != self.count] or [self.count])
        return count, self.dice.choice(self.way.engines[1:] if count <= FEW else self.way.engines[1:2])

    def _wait_for_begin(self, size: int) -> None:
        end = time.monotonic() + BEGIN_S
        while True:
            runs = self._run is not None and self._run.running
            self._read()
            if self._over() or sum(len(life.applied) > 2 for life in self.lives) >= size:
                return
            if time.monotonic() > end or not runs:
                raise ValueError(f"the run did not begin to train within {BEGIN_S:.0f} s; it said:\n{self._words()}")
            time.sleep(POLL_S)

    def _runs(self) -> list[Path]:
        return list((self.folder / "paceline" / "detached").glob("*"))

    def _words(self) -> str:
        assert self._run
        return "\n".join((self._run.folder / "output").read_text().strip().splitlines()[-LAST_LINES:])

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._living():
            time.sleep(POLL_S)

    def _wait_for_end(self) -> None:
        assert self._run
        end = time.monotonic() + END_S + self.epochs * training.STEPS * training.STEP_S * 4
        while self._run.running or any(life.lives for life in self.lives):
            if time.monotonic() > end:
                self._hung(f"the run did not end: {self._words()}")
                self._kill()
                return
            time.sleep(POLL_S)
        self._read()

    def _kill(self) -> None:
        self._read()
        pids = [life.pid for life in self.known.values() if life.lives]
        if pid := self.launcher():
            pids.append(pid)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        end = time.monotonic() + END_S
        while (self._run and self._run.running) or any(life.lives for life in self.known.values()):
            if time.monotonic() > end:
                raise ValueError("the run could not be ended")
            time.sleep(POLL_S)

    def _hung(self, words: str) -> None:
        if self.outcomes:
            self.outcomes[-1].hung = self.outcomes[-1].hung or words

    # faults

    def _next(self, nodes: Sequence[int]) -> Fault | None:
        """What was planned, then what the dice say; None: nothing that was asked for can be played now."""
        if self.planned:
            return self.planned.pop(0)
        few = len(nodes) <= MIN_NODES
        gone = () if self.launcher() else (LAUNCHER_KILLED,)
        possible = [kind for kind in self.kinds if kind not in gone and not (few and kind in LOSING)]
        ending = [kind for kind in possible if kind in ENDING]
        if not possible:
            return None
        # where nobody may be lost any more, a new start makes the rest possible again
        kind = self.dice.choice(ending if few and ending and self.dice.random() < 0.5 else possible)
        return Fault.of(self.dice, kind, nodes, nodes[0])  # nodes keep their order

    def _play(self, fault: Fault, nodes: Sequence[int]) -> None:
        when = self._newest(), time.monotonic()
        outcome = Outcome(self.seed, self.launches, fault, len(nodes), *when, self.name, self.engine)
        self.outcomes.append(outcome)
        undo, undone = strike(fault, self), False
        end = outcome.struck_s + fault.lasts_s + SETTLE_S
        try:
            while not (undone and self._settled(outcome)):
                now = time.monotonic()
                if not undone and now - outcome.struck_s >= fault.lasts_s:
                    undone = True
                    undo()
                if now > end:
                    outcome.hung = f"after {SETTLE_S:.0f} s: {self._words()}"
                    self._kill()
                    break
                time.sleep(POLL_S)
        finally:
            if not undone:
                undo()
        self._measure(outcome)
        self.show(str(outcome))

    def _settled(self, outcome: Outcome) -> bool:
        living = self._living()
        if not living:
            assert self._run
            return self._over() or not self._run.running
        return outcome.fault.kind not in ENDING and all(life.newest >= outcome.step + AFTER for life in living)

    def _measure(self, outcome: Outcome) -> None:
        left = self._living() or [life for life in self.lives if life.ended]
        if outcome.hung:
            return
        if not left:
            words = self._words()
            if outcome.fault.kind not in ENDING and not (self.way.ends and self.way.ends in words):
                outcome.ended = words
            return
        outcome.left = tuple(sorted({life.node for life in left}))
        pauses = [self._pause(life, outcome) for life in left]
        outcome.recovery_s = max(pauses)
        if outcome.recovery_s > HANG_S:
            outcome.hung = f"{outcome.recovery_s:.1f} s without a step"
        tries = {key for life in left for key in life.tried if key[0] >= outcome.step}
        outcome.lost = len(tries) - len({step for step, _ in tries})

    def _pause(self, life: Life, outcome: Outcome) -> float:
        """The longest of this process's pauses that end after the fault; one that begins with a fault that loses nodes
        counts from the fault. Who came later has not waited for it."""
        times = [each.t for each in life.applied.values()]
        if min(times) > outcome.struck_s:
            return 0.0
        ends = [(before, after) for before, after in itertools.pairwise(times) if after > outcome.struck_s]
        if not ends:
            return 0.0
        before, after = max(ends, key=lambda pair: pair[1] - pair[0])
        at_once = outcome.fault.kind in LOSING and before < outcome.struck_s + AT_ONCE_S
        return after - (outcome.struck_s if at_once else max(before, outcome.struck_s))

    def _note_returns(self) -> None:
        for outcome, later in itertools.zip_longest(self.outcomes, self.outcomes[1:]):
            end = later.struck_s if later else math.inf
            firsts = [min(e.t for e in life.applied.values()) for life in self._trained(outcome.launch)]
            outcome.back = sum(outcome.struck_s < first < end for first in firsts)

    def _trained(self, launch: int) -> list[Life]:
        return [life for life in self.known.values() if life.launch == launch and life.applied]

    def _note_ends(self) -> None:
        """What the faults that ended the run have cost, until a later start has got further."""
        for outcome in self.outcomes:
            if outcome.recovery_s is None:
                later = [life for life in self.known.values() if life.launch > outcome.launch]
                again = {step for life in later if life.launch == outcome.launch + 1 for step in life.applied}
                outcome.lost = sum(step <= outcome.step for step in again)
                further = [each.t for life in later for step, each in life.applied.items() if step > outcome.step]
                outcome.recovery_s = min(further) - outcome.struck_s if further else None
