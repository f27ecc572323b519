"""As many trainings as so many faults need, one after the other, each on nodes of its own."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline_bench.chaos import training
from paceline_bench.chaos.fault_run import FaultRun, Outcome
from paceline_bench.chaos.faults import Fault
from paceline_bench.chaos.hosts import Machines, unavailable
from paceline_bench.chaos.invariants import Breach, breaches
from paceline_bench.chaos.ways import ALLREDUCE

DISK = "size=48m"
PER_TRAINING = 10  # faults


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Raises ValueError where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", DISK, "none", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise ValueError(f"a small disk could not be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=20)


def suffer(
    num_faults: int,
    seed: int,
    kinds: Sequence[str],
    nodes: int,
    epochs: int,
    show: Callable[[str], None],
    planned: Sequence[Fault] = (),
    ways: Sequence[str] = (ALLREDUCE,),
) -> tuple[list[Outcome], int]:
    """(what each fault came to, how many trainings there were); ``planned`` come first; ``ways`` take turns.

    Raises ValueError where no nodes can be made.
    """
    if why := unavailable():
        raise ValueError(f"chaos makes its nodes on this machine, as network namespaces with an sshd each: {why}")
    outcomes: list[Outcome] = []
    trainings = 0
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-chaos-")))
        disk = stack.enter_context(small_disk(home / "disk"))  # before the nodes, that they see it
        while len(outcomes) < num_faults:
            folder = home / f"{trainings}"
            folder.mkdir()
            with Machines(nodes) as machines:
                way, place = ways[trainings % len(ways)], disk / f"{trainings}"
                one = FaultRun(machines, folder, place, seed + trainings, kinds, epochs, show, planned, way)
                one.disk.mkdir()
                try:
                    one.run(min(PER_TRAINING, num_faults - len(outcomes)))
                    found = breaches(list(one.known.values()), folder, epochs * training.STEPS, way=one.way)
                except KeyboardInterrupt:
                    return outcomes, trainings
                except ValueError as error:  # it could not be started, or ended; what the others came to is kept
                    show(f"seed {one.seed}: {error}")
                    if not one.outcomes:
                        raise
                    found, one.outcomes[-1].ended = [], str(error)
            blame(one.outcomes, found, show)
            outcomes, planned = [*outcomes, *one.outcomes], one.planned
            trainings += 1
            if trainings > num_faults:
                raise ValueError(f"{trainings} trainings met {len(outcomes)} faults; give them more --epochs")
    return outcomes, trainings


def blame(outcomes: Sequence[Outcome], found: Sequence[Breach], show: Callable[[str], None]) -> None:
    """Each breach on the last fault before it. Raises ValueError where nothing had struck."""
    for launch, step, what in found:
        show(f"start {launch}: WRONG: {what}")
        before = [each for each in outcomes if (each.launch, each.step) <= (launch, step)] or outcomes
        if not before:
            raise ValueError(f"the training was wrong, and nothing had struck it: {what}")
        before[-1].wrong.append(what)
