"""`paceline bench`: benchmarks against baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.cli.options import console

if TYPE_CHECKING:
    from paceline_bench.result import Finding, Show

    Write = Callable[[list[Finding], int, Path], None]

SUITES = (
    "local: this machine, against hand-written PyTorch and DDP. links: all-reduce algorithms, against gloo's. cluster: "
    "several nodes, as network namespaces of this machine (needs root), against DDP and no communication. seed: two "
    "tasks, VGG16 on few images and AlexNet on many, over every setup on one machine and on nodes (needs root)."
)


def bench(
    suite: Annotated[str, typer.Argument(help=SUITES)],
    only: Annotated[str | None, typer.Option(help="Only these tasks or algorithms, separated by commas.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per configuration; cluster: fresh starts (1).")] = None,
    processes: Annotated[int, typer.Option(help="links: processes that all-reduce over loopback.")] = 4,
    nodes: Annotated[
        int | None,
        typer.Option(help="cluster: how many, one core each (2). links: instead of --processes (needs root)."),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Bandwidth between --nodes: 10gbit, 1gbit, 100mbit, none.")] = None,
    delay: Annotated[
        float, typer.Option(help="One-way delay between --nodes in ms, for --model or links, at 200mbit or less.")
    ] = 0.0,
    model: Annotated[
        str | None, typer.Option(help="cluster: benchmark this model, such as alexnet, resnet50v2@128, transformer.")
    ] = None,
    batch_per_node: Annotated[int, typer.Option(help="cluster: samples per node and step.")] = 32,
    against: Annotated[
        str, typer.Option(help="cluster: baselines in benchmarks/peers, such as ddp,ddp-tuned,none.")
    ] = "ddp,none",
    fidelity: Annotated[str, typer.Option(help="cluster: exact, or rounded (bf16).")] = "exact",
    steps: Annotated[int | None, typer.Option(help="cluster: timed blocks; default: each task's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the record.")] = None,
) -> None:
    """Benchmarks paceline and its baselines in interleaved rounds, and writes a record.

    Examples:

    paceline bench local --only exact,factors --out benchmarks/mine

    paceline bench links --processes 8

    paceline bench links --nodes 4 --rate 1gbit

    paceline bench cluster --model alexnet --rate 1gbit --against ddp,ddp-tuned,none

    paceline bench cluster --model alexnet --rate 100mbit --delay 5

    paceline bench cluster --only alexnet-1gbit,rounded --out benchmarks/mine
    """
    check_installed()
    from paceline_bench import cluster, seed
    from paceline_bench.cluster import collectives, namespaces
    from paceline_bench.cluster.race import Pace
    from paceline_bench.cluster.tasks import asked
    from paceline_bench.single import one_machine as one_machine

    turns = Pace(1 if rounds is None else rounds, steps)

    def several(names: list[str], _: int, show: Show) -> Iterator[Finding]:
        if delay and not model:
            raise ValueError(
                f"--delay {delay:g} needs the benchmark of --model; give both, or --only latency without it"
            )
        if not model:
            return cluster.run(names, turns, show)
        if names:
            raise ValueError(f"--model selects one benchmark and --only {only} others; give one of them")
        link, peers = namespaces.check_rate(rate), tuple(filter(None, against.split(",")))
        late_ms = namespaces.check_delay(delay, link)
        return asked(model, batch_per_node, 2 if nodes is None else nodes, link, peers, fidelity, turns, show, late_ms)

    def sums(names: list[str], rounds: int, show: Show) -> Iterator[Finding]:
        return collectives.run(names, rounds, show, processes, collectives.Cables.asked(nodes, rate, delay))

    suites: dict[str, tuple[Callable[[list[str], int, Show], Iterator[Finding]], Write]] = {
        "local": (one_machine.run, one_machine.write),
        "links": (sums, collectives.write),
        "cluster": (several, cluster.write),
        "seed": (seed.run, seed.write),
    }
    if suite not in suites:
        raise ValueError(f"no suite named {suite!r}; known: {', '.join(suites)}")
    start, write = suites[suite]
    number = rounds if rounds is not None else 1 if suite in ("cluster", "seed") else 7
    with Console(stderr=True).status("measuring") as status:
        record(start(only.split(",") if only else [], number, status.update), write, number, out)
    if out:
        console.print(f"record: {out}")


def check_installed() -> None:
    """Raises ValueError if the package of the benchmarks is not installed."""
    try:
        import paceline_bench  # noqa: F401 - only to test the import
    except ModuleNotFoundError as error:
        if error.name != "paceline_bench":
            raise
        raise ValueError(
            "`paceline bench` needs the package paceline-bench, which is not installed here; "
            "in a clone of paceline's repository: pip install ./bench"
        ) from None


def record(found: Iterator[Finding], write: Write, number: int, out: Path | None) -> None:
    """Prints each result as it arrives; the record in ``out`` always holds all results so far."""
    findings = []
    for finding in found:
        findings.append(finding)
        if finding.demanded == "-":
            console.print(f"{finding.what}: {finding.figure}" if not finding.details else f"\n{finding.details}\n")
        else:
            mark = "reached" if finding.reached else "NOT reached"
            console.print(f"{finding.what}: {finding.figure}, demanded {finding.demanded}: {mark}")
        if out:
            write(findings, number, out)
