"""Real trainings that go below the minimum of nodes, or lose all of them, and must end as if nothing had happened.

Each is `paceline run --nodes M:N`, whose processes are killed by SIGKILL:

    below      so many nodes at once that too few are left; they return
    all        all at once; the launcher resumes the run from its newest checkpoint
    twice      as below, and those that return are killed again: while they start, ask, are sent the state, or train
    forming    one, and within a second others, while the next generation forms
    transfer   as below, and the node that leads once another returns: where no other has the state, the run is resumed
    parted     on machines of a network: one of three is cut off, the others go on without it; one side dies, the cables
               are plugged again, and the other side dies
    ending     all others, once one node has finished; the launcher resumes the run, so that all finish

*Laws*: those of `laws`, batch norm over all nodes and clipping on; the command ends with exit code 0; nobody waits for
longer than HANG_S besides waiting for nodes that are still to be started. Where the launcher has resumed the run, the
checkpoint that it found is resumed once more by hand, in peace, and has to come to the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from paceline.launch.machine import survey
from paceline_bench import SOURCES
from paceline_bench.chaos import journal, training
from paceline_bench.chaos.faults import part, rejoin
from paceline_bench.chaos.hosts import Machines, unavailable
from paceline_bench.chaos.invariants import breaches, unlike
from paceline_bench.chaos.journal import Life

BELOW, ALL, TWICE, FORMING = "below", "all", "twice", "forming"
TRANSFER, PARTED, ENDING = "transfer", "parted", "ending"
STORIES = BELOW, ALL, TWICE, FORMING, TRANSFER, PARTED, ENDING
EPOCHS = 6
HANG_S = 15.0  # without a step, once all that were killed have been started again
LIMIT_S, WAIT_S, POLL_S = 240.0, 120.0, 0.02
PART_S = 30.0  # until those who are not cut off go on: silence has to be told from slowness first
CLIP = 0.5


@dataclass
class History:
    """``killed``: (seconds, node, newest step) of each. ``pause_s``: the longest time without a step after the last
    process was started. ``starts``: of all nodes. ``by_hand``: steps that were compared with a resume by hand."""

    seed: int
    story: str
    nodes: int
    minimum: int
    killed: list[tuple[float, int, int]] = field(default_factory=list)
    pause_s: float = 0.0
    seconds: float = 0.0
    starts: int = 1
    by_hand: int = 0
    wrong: list[str] = field(default_factory=list)
    hung: str = ""

    def __str__(self) -> str:
        kills = ", ".join(f"node {node} at step {step}" for _, node, step in self.killed)
        parts = [f"seed {self.seed}, {self.story}: {self.nodes} nodes, at least {self.minimum}; killed {kills}"]
        if self.starts > 1:
            parts.append(f"{self.starts} starts, {self.by_hand} steps as resumed by hand")
        parts += [f"{self.seconds:.0f} s, longest pause {self.pause_s:.1f} s"]
        parts += [f"HUNG: {self.hung}"] if self.hung else []
        return "; ".join([*parts, *(f"WRONG: {each}" for each in self.wrong)])


class Waits:
    """One training."""

    def __init__(self, seed: int, folder: Path):
        self.dice, self.folder = Random(f"waits {seed}"), folder
        story = STORIES[seed % len(STORIES)]
        nodes = self.dice.choice((2, 3, 3))
        minimum = self.dice.choice((nodes, max(2, nodes - 1)))
        if story == PARTED:
            nodes, minimum = 3, 2
        self.history = History(seed, story, nodes, minimum)
        self.known: dict[str, Life] = {}
        self.begin_s = time.monotonic()
        self.machines: Machines | None = None

    def play(self) -> History:
        """Raises ValueError where its machines cannot be made."""
        if self.history.story != PARTED:
            return self._play()
        if why := unavailable():
            raise ValueError(f"its nodes are network namespaces with an sshd each: {why}")
        with Machines(self.history.nodes) as self.machines:
            self.begin_s = time.monotonic()
            return self._play()

    def _play(self) -> History:
        history, output = self.history, self.folder / "output"
        step = self.dice.randint(3, 60)
        with output.open("w") as file:
            run = subprocess.Popen(self._command(), env=self._environment(), stdout=file, stderr=file)
            try:
                self._wait(run, lambda: self._all_at(step))
                self._strike(run)
                run.wait(max(1.0, LIMIT_S - (time.monotonic() - self.begin_s)))
            except (subprocess.TimeoutExpired, TimeoutError):
                history.hung = f"it did not end within {LIMIT_S:.0f} s: {output.read_text()[-800:]}"
            finally:
                run.terminate()
                self._end(run)
        history.seconds = time.monotonic() - self.begin_s
        self._read()
        if not history.hung:
            if run.returncode:
                history.wrong.append(f"exit code {run.returncode}: {output.read_text()[-800:]}")
            found = breaches(list(self.known.values()), self.folder, EPOCHS * training.STEPS, CLIP)
            history.wrong += [what for *_, what in found]
            history.pause_s = self._pause()
            for launch in range(2, len(training.starts(self.folder)) + 1):
                self._compare(launch)
            if history.pause_s > HANG_S:
                history.hung = f"{history.pause_s:.1f} s without a step: {output.read_text()[-800:]}"
        history.starts = len(training.starts(self.folder))
        return history

    def _command(self) -> Sequence[str]:
        where = [] if not self.machines else ["-H", self.machines.hosts(self.history.nodes), "--ssh", self.machines.ssh]
        return command(self.folder, f"{self.history.minimum}:{self.history.nodes}", where)

    def _compare(self, launch: int) -> None:
        """This start with a resume by hand from what it found, on as many nodes as it began with."""
        history, home = self.history, self.folder / f"by-hand-{launch}"
        lives = [life for life in self.known.values() if life.launch == launch and life.applied]
        if not lives:  # it was struck before its first step
            return
        first = min(lives, key=lambda life: min(life.applied)).applied
        shutil.copytree(training.found(self.folder, launch), home / "run")
        words, output = command(home, str(first[min(first)].nodes)), home / "output"
        try:
            with output.open("w") as file:
                done = subprocess.run(
                    words, env=self._environment(), stdout=file, stderr=file, check=False, timeout=LIMIT_S
                )
        except subprocess.TimeoutExpired:
            history.hung = f"start {launch} by hand, {LIMIT_S:g} s: {output.read_text()[-800:]}"
            return
        if done.returncode:
            history.wrong.append(f"start {launch} by hand: exit code {done.returncode}: {output.read_text()[-800:]}")
            return
        known: dict[str, Life] = {}
        journal.read(home, known)
        count, what = unlike(lives, known.values())
        history.by_hand += count
        if what or not count:
            history.wrong.append(f"start {launch}: {what or 'nothing of it could be compared with a resume by hand'}")

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, (*SOURCES, os.environ.get("PYTHONPATH", ""))))
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    # who is there

    def _read(self) -> None:
        journal.read(self.folder, self.known)

    def _living(self) -> list[Life]:
        self._read()
        return [life for life in self.known.values() if life.lives and not life.ended]

    def _all_at(self, step: int, those: Sequence[Life] = ()) -> bool:
        living = self._living()
        return len(living) == self.history.nodes and all(life.newest >= step for life in those or living)

    def _one_has_finished(self) -> bool:
        self._read()
        return any(life.ended for life in self.known.values())

    def _wait(self, run: subprocess.Popen[bytes], until: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
        """Whether it came to that before the run, or the time, was over."""
        end = time.monotonic() + limit_s
        while run.poll() is None and not until():
            if time.monotonic() > end:
                if limit_s < LIMIT_S:
                    return False
                raise TimeoutError
            time.sleep(POLL_S)
        return run.poll() is None

    # what strikes

    def _strike(self, run: subprocess.Popen[bytes]) -> None:
        history, dice = self.history, self.dice
        few = history.nodes - history.minimum + 1
        lives = dice.sample(self._living(), history.nodes)
        if history.story == PARTED:
            self._part(run, lives)
        elif history.story == ENDING:
            self._wait(run, self._one_has_finished)
            first = next((life for life in lives if life.ended), None)  # the others may have, and not be gone yet
            self._kill([life for life in lives if life is not first], 0.0)
        elif history.story == ALL:
            self._kill(lives, 0.0)
        elif history.story == FORMING:
            self._kill(lives[:1], 0.0)
            time.sleep(dice.uniform(0.0, 1.0))
            self._kill(lives[1 : max(few, 2)], 0.2)
        else:
            most = max(few, history.nodes - 1)  # of whom one is left
            self._kill(lives[: dice.randint(few, most)], 0.3)
        if history.story in (TWICE, TRANSFER):
            for _ in range(dice.randint(1, 2) if history.story == TWICE else 1):
                before = set(self.known)
                if not self._wait(run, lambda before=before: self._begun(before), 60.0):  # type: ignore[misc]
                    return
                time.sleep(dice.uniform(0.0, 4.0))
                new = [life for life in self._living() if life.path.name not in before]
                old = sorted((life for life in self._living() if life.path.name in before), key=lambda one: one.node)
                self._kill(new if history.story == TWICE else old[:1], 0.0)

    def _part(self, run: subprocess.Popen[bytes], lives: Sequence[Life]) -> None:
        """``lives``: whose first is cut off."""
        assert self.machines
        dice, sides, cut_off = self.dice, [lives[:1], lives[1:]], [lives[0].node]
        further = max(life.newest for life in lives) + dice.randint(2, 8)
        part(self.machines.cluster, cut_off)
        try:
            self._wait(run, lambda: self._all_at(further, sides[1]), PART_S)
            dice.shuffle(sides)
            self._kill(sides[0], 0.3)
            time.sleep(dice.uniform(0.0, 4.0))
        finally:
            rejoin(self.machines.cluster, cut_off)
        time.sleep(dice.uniform(0.0, 4.0))
        self._kill(sides[1], 0.3)

    def _begun(self, before: set[str]) -> bool:
        self._read()
        return bool(self.known.keys() - before)

    def _kill(self, lives: Sequence[Life], within_s: float) -> None:
        for life in lives:
            self.history.killed.append((time.monotonic() - self.begin_s, life.node, life.newest))
            try:
                os.kill(life.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            time.sleep(self.dice.uniform(0.0, within_s))

    def _end(self, run: subprocess.Popen[bytes]) -> None:
        try:
            run.wait(60.0)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
        for life in self._living():
            try:
                os.kill(life.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _pause(self) -> float:
        """After the last process had begun (its journal lies there before it joins)."""
        last = max((life.began_s for life in self.known.values()), default=0.0)
        times = sorted(each.t for life in self.known.values() for each in life.applied.values() if each.t > last)
        return max((after - before for before, after in zip([last, *times], times, strict=False)), default=0.0)


def command(folder: Path, nodes: str, where: Sequence[str] = ()) -> list[str]:
    return [
        *(sys.executable, "-m", "paceline", "run", "--nodes", nodes, *where),
        *("--plan", "sequential", "--out", str(folder / "run"), "--wait", f"{WAIT_S:g}"),
        *("-m", training.__name__, str(folder), training.AUTO, str(EPOCHS), str(CLIP)),
    ]


def waits(count: int, seed: int, folder: Path | None, words: str, show: Callable[[str], None]) -> int:
    """Plays so many, from ``seed`` on. Returns 1 where any was wrong, or hung."""
    found, begin = list[History](), time.monotonic()
    for each in range(seed, seed + count):
        with tempfile.TemporaryDirectory(prefix="paceline-waits-") as home:
            try:
                found.append(Waits(each, Path(home)).play())
            except ValueError as error:
                show(f"seed {each} was not played: {error}")
                continue
        show(str(found[-1]))
    text = told(found)
    print(text)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        machine = survey()
        body = f"{text}\n\n**Environment.** {machine.cpu}, {machine.cores} cores; {time.monotonic() - begin:.0f} s."
        (folder / "README.md").write_text(f"{body}\n\n**Command**: `{words}`\n")
        (folder / "raw.json").write_text(json.dumps([asdict(each) for each in found]) + "\n")
    return int(any(each.wrong or each.hung for each in found))


def told(found: Sequence[History]) -> str:
    wrong, hung = (sum(bool(getattr(each, name)) for each in found) for name in ("wrong", "hung"))
    lines = [
        f"# {len(found)} real histories below the minimum of nodes: {wrong} wrong, {hung} hung",
        "",
        "| history | trainings | kills | starts of all nodes | steps as by hand | longest pause, s | wrong | hung |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for story in STORIES:
        some = [each for each in found if each.story == story]
        kills, starts = sum(len(each.killed) for each in some), sum(each.starts for each in some)
        by_hand = sum(each.by_hand for each in some)
        pause_s = max((each.pause_s for each in some), default=0.0)
        bad = [sum(bool(getattr(each, name)) for each in some) for name in ("wrong", "hung")]
        lines.append(
            f"| {story} | {len(some)} | {kills} | {starts} | {by_hand} | {pause_s:.1f} | {bad[0]} | {bad[1]} |"
        )
    return "\n".join([*lines, "", *(str(each) for each in found if each.wrong or each.hung)])
