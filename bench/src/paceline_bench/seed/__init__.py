"""The experiment of the work that this package began with, whole: both tasks over all its setups.

Lerat, Mahmoudi and Mahmoudi, "Distributed Deep Learning: From Single-Node to Multi-Node Architecture", Electronics
11(10):1525 (2022): find the fastest form of parallelism on each machine, then run one task per machine. A speedup is
the time of the task on one core by plain PyTorch over that of a setup, both from the start of the first process to the
end of the last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline_bench import result
from paceline_bench.cluster import mpirun
from paceline_bench.cluster.namespaces import unavailable
from paceline_bench.result import Finding, Show
from paceline_bench.seed import crossover, photographs
from paceline_bench.seed.job import Job
from paceline_bench.seed.trial import Outcome, Setup
from paceline_bench.seed.trial import run as run_one

RATE = "1gbit"
CROSSOVER = "-crossover"  # after a task's name: this part of it alone
SOME = "/"  # after a task's name: before a part of the names of setups, which are run alone, beside the baseline
FASTER, LIGHTER, NEAR = 1.3, 0.15, 0.25  # than Horovod, than its bytes, to what was predicted


@dataclass(frozen=True)
class Task:
    """``batch``: of all processes together. ``images``: to train on, for one epoch. ``most``: of those that exist."""

    name: str
    model: str
    batch: int
    images: int
    most: int


TASKS = {
    "complex-small": Task("ComplexSmall", "vgg16", 8, 64, 128),
    "simple-big": Task("SimpleBig", "alexnet", 32, 960, 1536),
}
BASELINE = Setup("sequential, plain PyTorch: the baseline", "torch")
ONE_CORE = (
    Setup("sequential", "paceline"),
    Setup("sequential+channels_last", "paceline", "sequential+channels_last"),
)
LOCAL = (
    Setup("multithreaded kernels, plain PyTorch", "torch", cores=2),
    Setup("multithreaded kernels", "paceline", "threads:2", 2),
    Setup("multithreaded data parallel", "paceline", "replicas:2", 2),
    Setup("multi-process data parallel, DDP", "ddp", cores=2, processes=2),
    Setup("multi-process data parallel", "paceline", "processes:2", 2),
    Setup("multi-process data parallel, channels_last", "paceline", "processes:2+channels_last", 2),
    Setup("model parallel, cut as in the article", "paceline", "pipeline:2,micros=1,cut=preset", 2),
    Setup("pipelined, cut as in the article", "paceline", "pipeline:2,micros=4,cut=preset", 2),
    Setup("pipelined, cut where measured", "paceline", "pipeline:2,micros=4", 2),
    Setup("hybrid: two groups, each cut in two", "paceline", "processes:2/pipeline:2,micros=2", 2),
)


def distributed(row: str) -> tuple[Setup, ...]:
    """One task per node, which computes by ``row``; of half a core each, so that four nodes are no dream here."""
    halves = tuple(Setup(f"paceline, {n} of half a core", "paceline", row, nodes=n, part=0.5) for n in (1, 2, 4))
    return (
        Setup("paceline over gloo, 1 node", "paceline", row, nodes=1),
        Setup("paceline over gloo, 2 nodes", "paceline", row, nodes=2),
        Setup("paceline over MPI, 1 node", "paceline", row, nodes=1, mpi=True),
        Setup("paceline over MPI, 2 nodes", "paceline", row, nodes=2, mpi=True),
        Setup("paceline over MPI, 4 nodes on two cores", "paceline", row, nodes=4, mpi=True),
        Setup("Horovod, 2 nodes", "horovod", nodes=2),
        Setup("Horovod, 2 nodes, a whole batch on each", "horovod", nodes=2, over=2),
        Setup("DDP, 2 nodes", "ddp", nodes=2),
        *halves,
        Setup("Horovod, 4 of half a core", "horovod", nodes=4, part=0.5),
    )


def lacking(setup: Setup) -> str:
    """Why it cannot run here, or an empty string."""
    if setup.way == "horovod":
        try:
            import horovod.torch  # type: ignore[import-untyped,import-not-found,unused-ignore]  # noqa: F401
        except ImportError as error:
            return f"needs the package horovod: {error}"
    return mpirun.unavailable() if setup.mpi else ""


def run(names: Sequence[str], rounds: int, show: Show) -> Iterator[Finding]:
    """Raises ValueError for a task that is not known, and where no cluster can be made."""
    known = [*TASKS, *(f"{name}{CROSSOVER}" for name in TASKS)]
    if strange := [name for name in names if name.partition(SOME)[0] not in known]:
        raise ValueError(f"no task named {', '.join(strange)}; known: {', '.join(known)}")
    if why := unavailable():
        raise ValueError(f"`paceline bench seed` makes its nodes on this machine, as network namespaces: {why}")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for wanted in names or TASKS:
            name, _, some = wanted.partition(SOME)
            task = TASKS[name.removesuffix(CROSSOVER)]
            images = photographs.write(Path(folder) / name, task.most)
            job = Job("", task.model, str(images), "", task.batch, task.images)
            if not name.endswith(CROSSOVER):
                yield from _setups(task, job, rounds, show, some)
            if not some:
                yield from _crossover(task, job, rounds, show)


def _setups(task: Task, job: Job, rounds: int, show: Show, some: str) -> Iterator[Finding]:
    outcomes: dict[str, list[Outcome]] = {}
    absent = []

    def measure(setups: Sequence[Setup]) -> None:
        for _ in range(rounds):
            for setup in setups:
                if some not in setup.name and setup is not BASELINE:
                    continue
                if why := lacking(setup):
                    absent.append(f"{setup.name}: {why}")
                else:
                    outcomes.setdefault(setup.name, []).append(run_one(setup, job, RATE, show))

    measure([BASELINE, *ONE_CORE, *LOCAL])
    local = [setup for setup in (*ONE_CORE, *LOCAL) if setup.way == "paceline"]
    best, one_core = (_fastest(outcomes, setups) for setups in (local, ONE_CORE))
    measure(distributed(one_core.row))
    base = _middle(outcomes[BASELINE.name])
    said = f"{task.model}, {task.images} images, {task.batch} in a batch"
    table = [said if some else f"{said}; best on this machine: {best.name}", ""]
    table += [*HEAD, *(_row(_middle(each), base) for each in outcomes.values())]
    table += ["", *dict.fromkeys(f"Not run: {text}." for text in absent)]
    raw = {name: [asdict(one) for one in each] for name, each in outcomes.items()}
    yield Finding(task.name, f"{task.name}: speedups", "see below", "-", True, "\n".join(table), raw)
    for nodes in ("2 nodes", "4 of half a core"):
        there = {name: _middle(each) for name, each in outcomes.items() if nodes in name}
        yield from _against_horovod(f"{task.name}, {nodes}, {RATE}", task, there)


def _against_horovod(what: str, task: Task, there: Mapping[str, Outcome]) -> Iterator[Finding]:
    """Our best against it with the same global batch; and, with nothing demanded, against what it trains otherwise."""
    ours = [each for name, each in there.items() if name.startswith("paceline")]
    for name, rival in there.items() if ours else ():
        if name.startswith("Horovod"):
            fast, (_, *other) = min(ours, key=_whole), name.split(", ")[1:]
            alike, suffix = not other, "".join(f" ({each})" for each in other)
            ratio, share = rival.whole_s / fast.whole_s, fast.sent_bytes / rival.sent_bytes
            least, most = (f">= {FASTER}", f"<= {LIGHTER}") if alike else ("-", "-")
            faster, lighter = ratio >= FASTER or not alike, share <= LIGHTER or not alike
            yield Finding(task.name, f"{what}: speedup over Horovod's{suffix}", f"{ratio:.2f}", least, faster)
            yield Finding(task.name, f"{what}: bytes over Horovod's{suffix}", f"{share:.3f}", most, lighter)


def _fastest(outcomes: Mapping[str, Sequence[Outcome]], setups: Sequence[Setup]) -> Setup:
    """Of those that were run, if any was; else the last one."""
    ran = [setup for setup in setups if setup.name in outcomes]
    return min(ran, key=lambda setup: _middle(outcomes[setup.name]).whole_s) if ran else setups[-1]


HEAD = (
    "| setup | seconds | speedup | until the first step | training | %CPU | memory MB | MB sent | per step |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _whole(one: Outcome) -> float:
    return one.whole_s


def _middle(each: Sequence[Outcome]) -> Outcome:
    return sorted(each, key=_whole)[len(each) // 2]


def _row(one: Outcome, base: Outcome) -> str:
    return (
        f"| {one.setup} | {one.whole_s:.1f} | {base.whole_s / one.whole_s:.2f} | {one.until_first_s:.1f} | "
        f"{one.training_s:.1f} | {one.cpu_percent:.0f} | {one.memory_bytes / 1e6:.0f} | "
        f"{one.sent_bytes / 1e6:.1f} | {one.step_bytes / 1e6:.2f} |"
    )


def _crossover(task: Task, job: Job, rounds: int, show: Show) -> Iterator[Finding]:
    told = crossover.predicted(job, RATE, show)
    expected = crossover.crossing(told[1], told[crossover.NODES])
    sizes = crossover.sizes_around(min(expected, task.most), task.batch, task.most)
    points = crossover.measured(job, sizes, rounds + 3, lambda setup, one: run_one(setup, one, RATE, show))
    seen = {count: crossover.Line.through(each) for count, each in points.items()}
    found = crossover.crossing(seen[1], seen[crossover.NODES])
    lines = ["| nodes | | start s | ms per image | runs: images in seconds |", "|---|---|---|---|---|"]
    for count in told:
        each = " ".join(f"{size} in {seconds:.1f}" for size, seconds in points[count])
        lines.append(f"| {count} | predicted | {told[count].start_s:.2f} | {1e3 * told[count].image_s:.1f} | |")
        lines.append(f"| {count} | measured | {seen[count].start_s:.2f} | {1e3 * seen[count].image_s:.1f} | {each} |")
    what = f"{task.name}: images before a second node pays over {RATE}"
    yield Finding(task.name, f"{what}: lines", "see below", "-", True, "\n".join(lines), points)
    figure = f"{found:.0f} (predicted {expected:.0f}, {expected / found - 1:+.0%})" if found else "0"
    near = bool(found) and abs(expected / found - 1) <= NEAR
    yield Finding(task.name, what, figure, f"predicted within {NEAR:.0%}", near)


def write(findings: Sequence[Finding], rounds: int, out: Path) -> None:
    how = (
        f"as root, {rounds} run(s) of each. Seconds are from the start of the first process to the end of the last; "
        f"nodes are network namespaces of one pinned core each, with cables of {RATE}; memory is the sum of "
        f"proportional set sizes, its maximum; bytes are the network card's."
    )
    result.write(out, "Two tasks over every setup", how, findings)
