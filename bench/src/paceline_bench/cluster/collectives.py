"""Sums over processes of this machine: each algorithm against gloo's own, and against what its cost predicts.

    python -m paceline_bench.cluster.collectives ROUNDS ALGORITHM... FOLDER

is one process of them: by turns in the same processes, after a ping-pong that measures a message. They are over
loopback, or nodes of their own, as network namespaces behind cables of a limited rate.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.elastic.membership import connect
from paceline.launch import local
from paceline.link.net.collective_run import Collective, names, seconds
from paceline.planner.cluster_model import FRAME
from paceline.planner.teams import rate as bits_per_s
from paceline.transport import Link
from paceline_bench import result
from paceline_bench.cluster.driver import Desk, drive
from paceline_bench.cluster.namespaces import burst, check_delay, check_rate
from paceline_bench.result import Finding, Show

KIB = 1024
SIZES = (4 * KIB, 64 * KIB, 1024 * KIB, 16 * 1024 * KIB)  # bytes
PINGS = 10
OWN = "gloo"
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Cables:
    """Between ``nodes`` namespaces. ``rate``: in tc's words; ``delay_ms``: one way."""

    nodes: int
    rate: str | None = None
    delay_ms: float = 0.0

    @classmethod
    def asked(cls, nodes: int | None, rate: str | None, delay_ms: float) -> Cables | None:
        """None for loopback. Raises ValueError."""
        if nodes is None:
            if rate or delay_ms:
                raise ValueError(
                    f"--rate and --delay are of cables between nodes, and without --nodes all processes are on one; "
                    f"add it, as in --nodes 4 --rate {rate or '100mbit'}"
                )
            return None
        checked = check_rate(rate)
        return cls(nodes, checked, check_delay(delay_ms, checked))

    def __str__(self) -> str:
        late = f", {self.delay_ms:g} ms one way" if self.delay_ms else ""
        return f"{self.nodes} nodes, links of {self.rate or 'no limited rate'}{late}"


def run(
    only: Sequence[str], rounds: int, show: Show, processes: int = 4, cables: Cables | None = None
) -> Iterator[Finding]:
    """One finding for each size. Raises ValueError for an algorithm that is not known, or when a process fails."""
    chosen = [Collective(name).name for name in only or names()]
    size = cables.nodes if cables else processes
    if size < 2 or rounds < 1:
        raise ValueError(
            f"sums need 2 {'nodes' if cables else 'processes'} and 1 round or more, got {size} and {rounds}"
        )
    where = str(cables) if cables else f"{processes} processes"
    show(f"{where}, {rounds} rounds of {', '.join([OWN, *chosen])}")
    words = ["-m", __name__, str(rounds), *chosen]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        if cables:
            measured = drive(size, words, Path(folder), LIMIT_S, show, cables.delay_ms, cables.rate)[0]
        else:
            if code := local.start([sys.executable, *words, folder], "sequential", size, {}):
                raise ValueError(f"a process of the benchmark failed (exit code {code}); its error is above")
            measured = json.loads((Path(folder) / "0.json").read_text())
    for num_bytes in SIZES:
        yield _finding(measured, num_bytes, size, cables)


def _finding(measured: dict[str, Any], num_bytes: int, processes: int, cables: Cables | None = None) -> Finding:
    """A table of all algorithms: medians of the slowest process, and the bytes of the one that sends most."""
    alpha_s, beta_s, lines, medians, right = measured["alpha_s"], measured["beta_s_per_byte"], [], {}, True
    for name, turns in measured["turns"][str(num_bytes)].items():
        medians[name] = statistics.median(turn["seconds"] for turn in turns)
        sent, equal = {turn["sent_bytes"] for turn in turns}, all(turn["right"] for turn in turns)
        counted = "not counted" if name == OWN else ", ".join(f"{each:.0f}" for each in sorted(sent))
        cost = Collective("ring" if name == OWN else name).cost(processes, num_bytes, 4, _nodes(processes))
        right = right and equal and (name == OWN or sent == {cost.bytes})
        predicted_s = seconds(cost, alpha_s, beta_s)
        if cables and cables.rate:
            line_s = 8 / (bits_per_s(cables.rate) * FRAME)
            predicted_s += max(0.0, cost.in_sequence - burst(cables.rate)) * max(0.0, line_s - beta_s)
        if not cables:  # which carry messages beside each other; loopback is what the cores can do
            every_message_s = cost.messages * alpha_s + cost.total_bytes * beta_s
            predicted_s = max(predicted_s, every_message_s / measured["cores"])
        lines.append(
            f"| {name} | {medians[name] * 1e3:.3f} | {predicted_s * 1e3:.3f} | {medians[OWN] / medians[name]:.2f} | "
            f"{cost.steps:.0f} | {counted} | {cost.bytes:.0f} |"
        )
    columns = "", "ms", "predicted ms", "speed, gloo 1", "steps", "bytes of who sends most, counted", "by its cost"
    message = f"A message: {alpha_s * 1e6:.0f} us + {1e-9 / beta_s:.2f} GB/s (ping-pong)."
    fastest = min((name for name in medians if name != OWN), key=lambda name: medians[name])
    return Finding(
        "links",
        f"sum of {num_bytes // KIB} KiB over {cables or f'{processes} processes'}",
        f"{fastest} {medians[fastest] * 1e3:.3f} ms, gloo {medians[OWN] * 1e3:.3f} ms",
        "right everywhere, and bytes as by the cost",
        right,
        "\n".join([message, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines]),
    )


def write(findings: Sequence[Finding], rounds: int, out: Path) -> None:
    how = (
        f"by turns in the same processes, medians of {rounds} rounds of the slowest process. Predicted from a ping- "
        f"pong between two of them, the others idle: steps * latency + bytes in sequence / bandwidth, or, over "
        f"loopback, all messages and bytes divided among the cores, whichever is longer; gloo as a ring of such "
        f"messages. Nodes, where there are any, are network namespaces on a bridge, shaped by tc tbf in both "
        f"directions, which lets a first burst through (1 MiB of 1 Gbit/s and more, else 256 KiB); what follows it "
        f"is predicted at {FRAME:.0%} of the shaped rate. `two_level`: as if half of the processes were on another "
        f"node."
    )
    result.write(out, "Sums over processes of one machine", how, findings)


# One process of them.


def main(rounds: str, *words: str) -> None:
    *algorithms, folder = words
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    link = connect("gloo", rank, size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).link
    alpha_s, beta_s = fit(SIZES, [_ping(link, num_bytes) for num_bytes in SIZES])
    turns: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for num_bytes in SIZES:
        turns[num_bytes] = {name: [] for name in (OWN, *algorithms)}
        for i in range(int(rounds) + 1):  # the first warms up
            order = list(turns[num_bytes])
            random.Random(i).shuffle(order)
            for name in order:
                turn = _turn(link, name, num_bytes // 4)
                turns[num_bytes][name] += [turn] if i else []
    cores = len(os.sched_getaffinity(0))
    measured = {"alpha_s": alpha_s, "beta_s_per_byte": beta_s, "cores": cores, "turns": turns}
    Desk(Path(folder), rank).tell(measured)
    link.sum(torch.zeros(1)).wait()
    link.close()


def fit(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of ``alpha + bytes * beta``: least squares of the relative error."""
    weights = 1 / np.array(times_s)
    columns = np.stack([weights, np.array(sizes) * weights], 1)
    alpha_s, beta_s = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    return max(float(alpha_s), 0.0), max(float(beta_s), 1e-15)


def _ping(link: Link, num_bytes: int) -> float:
    """Seconds of one message between ranks 0 and 1: half of the best way there and back. Elsewhere meaningless."""
    ball, best_s = torch.zeros(num_bytes // 4), float("inf")
    for _ in range(PINGS):
        start = time.perf_counter()
        if link.rank == 0:
            link.send(ball, 1).wait()
            link.recv(ball, 1).wait()
        elif link.rank == 1:
            link.recv(ball, 0).wait()
            link.send(ball, 0).wait()
        best_s = min(best_s, (time.perf_counter() - start) / 2)
    link.sum(torch.zeros(1)).wait()
    return best_s


def _turn(link: Link, name: str, count: int) -> dict[str, Any]:
    """One sum of rank-valued numbers, checked on every rank."""
    pattern = torch.arange(count, dtype=torch.float32) % 7 + 1
    mine = (link.rank + 1) * pattern
    link.sum(torch.zeros(1)).wait()  # all begin together
    before, start = link.sent_bytes, time.perf_counter()
    if name == OWN:
        link.sum(mine).wait()
    else:
        Collective(name).run(link, mine, _nodes(link.size))
    took_s, sent = time.perf_counter() - start, link.sent_bytes - before
    right = torch.equal(mine, link.size * (link.size + 1) // 2 * pattern)
    worst = link.max(torch.tensor([took_s, sent, not right], dtype=torch.float64)).wait()
    return {"seconds": float(worst[0]), "sent_bytes": float(worst[1]), "right": not worst[2]}


def _nodes(size: int) -> list[int]:
    """As if half of the processes were on another node."""
    return [2 * rank // size for rank in range(size)]


if __name__ == "__main__":
    main(*sys.argv[1:])
