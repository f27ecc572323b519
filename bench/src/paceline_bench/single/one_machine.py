"""One machine against its peers: torch by hand, DDP over two processes, and ours."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.report.record import read
from paceline_bench import result
from paceline_bench.result import Finding, Show
from paceline_bench.single.decode import decode
from paceline_bench.single.paired import Contender, PairedRun, Spread, fight
from paceline_bench.single.plan_search import search

LIMIT_S = 300.0  # of one command
HEATS = 2  # to find the row that meets the peers
STEPS = {"alexnet": (8, 1), "vgg16": (6, 1), "mlp": (40, 50)}  # turns in a round, steps in a turn
EXACT = tuple(
    f"{engine}{words}" for words in ("", "+channels_last") for engine in ("threads:2", "processes:2", "replicas:2")
)


def exact(rounds: int, show: Show) -> Iterator[Finding]:
    """Our best exact row against the best of torch's own threads and DDP, each in its best memory layout."""
    for model, batch in (("alexnet", 32), ("vgg16", 8)):
        heats = PairedRun(model, batch)
        mine = _best([Contender(row, "paceline", row) for row in EXACT], heats, show)
        peers = [_best(_layouts(way), heats, show) for way in ("torch", "ddp")]
        duel = fight(model, batch, [*peers, mine], rounds, STEPS[model], show)
        peer = min((one.name for one in peers), key=duel.step_s)
        ratio, what = duel.ratio(peer, mine.name), f"{model} b{batch}: {mine.name} against {peer}"
        heats.turns |= duel.turns
        yield Finding("exact", what, str(ratio), ">= 1.0", ratio.low >= 1.0, _table(heats))


def _layouts(way: str) -> list[Contender]:
    return [Contender(f"{way}{words}", f"{way}{words}") for words in ("", "+channels_last")]


def _best(contenders: Sequence[Contender], heats: PairedRun, show: Show) -> Contender:
    """One after the other, since together they need more memory than ordinary machines have."""
    for one in contenders:
        heats.turns |= fight(heats.model, heats.batch, [one], HEATS, STEPS[heats.model], show).turns
    return min(contenders, key=lambda one: min(turn.step_s for turn in heats.turns[one.name]))


def ddp(rounds: int, show: Show) -> Iterator[Finding]:
    """Two processes against two processes."""
    mine, peer = Contender("processes:2", "paceline", "processes:2"), Contender("ddp", "ddp")
    duel = fight("alexnet", 32, [mine, peer], rounds, STEPS["alexnet"], show)
    ratio, memory = duel.ratio("ddp", "processes:2"), duel.memory("ddp", "processes:2", "pss_bytes")
    yield Finding("ddp", "alexnet b32: processes:2 against ddp", str(ratio), ">= 1.2", ratio.low >= 1.2, _table(duel))
    what = "alexnet b32: memory of processes:2 over ddp's (PSS)"
    yield Finding("ddp", what, f"{memory:.2f}", "< 1", memory < 1.0)


def factors(rounds: int, show: Show) -> Iterator[Finding]:
    """SGD that takes a layer's factors against plain PyTorch, one process."""
    for threads, demanded in ((1, 1.12), (2, 1.18)):
        mine, plain = Contender("ours", "paceline", f"threads:{threads}"), Contender("torch", f"torch:{threads}")
        duel = fight("alexnet", 32, [mine, plain], rounds, STEPS["alexnet"], show)
        ratio, memory = duel.ratio("torch", "ours"), duel.memory("torch", "ours")
        what = f"alexnet b32, {threads} threads, factors in the momentum against SGD"
        yield Finding("factors", what, str(ratio), f">= {demanded}", ratio.low >= demanded, _table(duel))
        yield Finding("factors", f"{what}: peak memory", f"{memory:.2f}", "<= 0.83", memory <= 0.83)
        gap = abs(duel.turns["ours"][0].loss - duel.turns["torch"][0].loss)
        yield Finding("factors", f"{what}: difference of the loss", f"{gap:.1e}", "<= 1e-4", gap <= 1e-4)


def rounded(rounds: int, show: Show) -> Iterator[Finding]:
    """bf16 where the processor has it, against torch's own fp32."""
    rows = [f"{row}+bf16+channels_last" for row in ("threads:2", "processes:2", "replicas:2")]
    for model, batch, demanded in (("alexnet", 32, 1.5), ("vgg16", 8, 2.0)):
        mine = [Contender(row, "paceline", row) for row in rows]
        peer = _best(_layouts("torch"), PairedRun(model, batch), show)
        duel = fight(model, batch, [peer, *mine], rounds, STEPS[model], show)
        best = min(rows, key=duel.step_s)
        ratio = duel.ratio(peer.name, best)
        what = f"{model} b{batch}: {best} against {peer.name} in fp32"
        yield Finding("rounded", what, str(ratio), f">= {demanded}", ratio.low >= demanded, _table(duel))


def overhead(rounds: int, show: Show) -> Iterator[Finding]:
    """`pace.step` against the same loop by hand."""
    mine, plain = Contender("ours", "paceline", "threads:2"), Contender("torch", "torch:2")
    duel = fight("alexnet", 32, [mine, plain], rounds, STEPS["alexnet"], show)
    ratio = duel.ratio("ours", "torch")
    yield Finding("overhead", "alexnet b32: time of pace.step over by hand", str(ratio), "<= 1.02", ratio.high <= 1.02)
    mine, plain = Contender("ours", "paceline", "threads:1"), Contender("torch", "torch:1")
    duel = fight("mlp", 32, [mine, plain], 3 * rounds, STEPS["mlp"], show)  # short ones: a life takes seconds
    extra = Spread.of(
        [(a.step_s - b.step_s) * 1e3 for a, b in zip(duel.turns["ours"], duel.turns["torch"], strict=True)]
    )
    reached, figure = extra.high <= 0.2, f"{extra} ms"
    yield Finding("overhead", "3-layer MLP: pace.step more than by hand", figure, "<= 0.2 ms", reached)


def start(rounds: int, show: Show) -> Iterator[Finding]:
    """`paceline train` with a plan made before, to its first step, beyond importing torch."""
    show("cold start")
    extra = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for i in range(rounds + 1):  # the first makes the plan
            out, begin = Path(folder) / str(i), time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=LIMIT_S)
            import_s, begin_s = time.perf_counter() - begin, time.time()
            command = [sys.executable, "-m", "paceline", "train", "--epochs", "1", "--out", str(out)]
            subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=LIMIT_S)
            first = next(event for event in read(out) if event["event"] == "step")
            extra.append(first["time"] - begin_s - import_s)
    extra = sorted(extra[1:])
    figure = f"{extra[len(extra) // 2]:.2f} s (most {extra[-1]:.2f})"
    yield Finding("start", "first step, beyond importing torch", figure, "<= 2 s", extra[-1] <= 2.0)


TASKS = {
    "exact": exact,
    "ddp": ddp,
    "factors": factors,
    "rounded": rounded,
    "overhead": overhead,
    "search": search,
    "decode": decode,
    "start": start,
}


def run(names: Sequence[str], rounds: int, show: Show) -> Iterator[Finding]:
    """Each finding as soon as it is made. Raises ValueError for a task that is not known, or a contender that fails."""
    if strange := [name for name in names if name not in TASKS]:
        raise ValueError(f"no task named {', '.join(strange)}; known: {', '.join(TASKS)}")
    for name in names or TASKS:
        yield from TASKS[name](rounds, show)


def write(findings: Sequence[Finding], rounds: int, out: Path) -> None:
    how = (
        f"contenders step by turns, {rounds} rounds of fresh processes; ratios within a round, their median and the "
        f"90 % interval of the mean."
    )
    result.write(out, "One machine against its peers", how, findings)


def _table(duel: PairedRun) -> str:
    lines = ["| contender | s/step, median of each round | images/s | peak MB | PSS MB |", "|---|---|---|---|---|"]
    for name, turns in duel.turns.items():
        each = " ".join(f"{turn.step_s:.3f}" for turn in turns)
        last = turns[-1]
        lines.append(
            f"| {name} | {each} | {duel.batch / duel.step_s(name):.1f} | {last.peak_bytes / 1e6:.0f} | "
            f"{last.pss_bytes / 1e6:.0f} |"
        )
    return "\n".join(lines)
