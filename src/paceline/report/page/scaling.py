"""Scaling of one job over numbers of nodes: throughput, speedup and efficiency.

    strong    the same global batch on more nodes: less time per step
    weak      the same samples per node, a larger global batch: more samples per second

*Source*: speedup is throughput over that of the fewest nodes; efficiency is speedup over the ratio of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from paceline.report.page import bars
from paceline.report.page.charts import Axis, Line, chart, number, quantity, table
from paceline.report.page.run import Run
from paceline.report.page.summary import exposed, per_step, throughput

SHARED_COLOUR = 6  # the colour of curves over all runs: after those of single runs


@dataclass(frozen=True)
class Point:
    """One run. *Units*: samples/s, NaN where unknown."""

    run: Run
    nodes: int
    batch: int
    per_s: float
    predicted_per_s: float


def scaling(runs: Sequence[Run]) -> str:
    """A chart and bars for each kind of scaling among these runs; empty where there is none."""
    points = [point for run in runs if (point := _point(run))]
    parts: list[str] = []
    for kind, what, key in (
        ("strong", "global batch {:g}", lambda p: float(p.batch)),
        ("weak", "{:g} rows per node", lambda p: p.batch / p.nodes),
    ):
        for size, group in _groups(points, key):
            parts.append(_group(kind, f"{kind} scaling, {what.format(size)}", group, len(parts)))
    return "".join(parts)


def _point(run: Run) -> Point | None:
    nodes, batch, per_s = run.join.get("num_nodes"), run.join.get("batch_size"), throughput(run)
    if not (isinstance(nodes, int) and isinstance(batch, int) and nodes > 0 and per_s > 0):
        return None
    seconds = bars.predicted_s(run)
    return Point(run, nodes, batch, per_s, batch / seconds if seconds else math.nan)


def _groups(points: Sequence[Point], key: Callable[[Point], float]) -> list[tuple[float, list[Point]]]:
    """Groups of points with equal ``key`` and different numbers of nodes, fewest nodes first."""
    found: dict[float, list[Point]] = {}
    for point in sorted(points, key=lambda p: p.nodes):
        found.setdefault(key(point), []).append(point)
    return [(size, group) for size, group in sorted(found.items()) if group[0].nodes < group[-1].nodes]


def speedup(point: Point, base: Point) -> float:
    return point.per_s / base.per_s


def efficiency(point: Point, base: Point) -> float:
    return speedup(point, base) * base.nodes / point.nodes


def predicted(point: Point, base: Point) -> float:
    """The predicted speedup; with two predictions an error common to both cancels out. 0 without a prediction."""
    over = base.predicted_per_s if base.predicted_per_s > 0 else base.per_s
    return point.predicted_per_s / over if point.predicted_per_s > 0 else 0.0


def _group(kind: str, title: str, group: Sequence[Point], index: int) -> str:
    base = group[0]
    gains = [(speedup(p, base), predicted(p, base)) for p in group]
    scale_max = 1.04 * max(1.0, *(value for pair in gains for value in pair))
    items = "".join(
        bars.bar({"engine": _label(p, kind), "reason": _reason(p, base)}, *pair, scale_max, chosen=False)
        for p, pair in zip(group, gains, strict=True)
    )
    over = "1 node" if base.nodes == 1 else f"{base.nodes} nodes"
    style = f"--one:{100 / scale_max:.2f}%"
    return f"""{_throughput(title, group, index)}<figure class="card bars speedups scaling" style="{style}">
<figcaption><h3>Speedup: {escape(title)}</h3><p>throughput over that of {over}</p></figcaption>
<ul class="key"><li class="measured">measured</li><li class="predicted">predicted</li></ul>
<ol>{items}</ol>
<details><summary>Values</summary>{_table(group)}</details>
</figure>
"""


def _label(point: Point, kind: str) -> str:
    parts = "1 node" if point.nodes == 1 else f"{point.nodes} nodes"
    parts += f", batch {point.batch}" * (kind == "weak")
    return parts + ", emulated" * bool(point.run.join.get("emulated"))


def _reason(point: Point, base: Point) -> str:
    parts = [f"{100 * efficiency(point, base):.0f} % efficient"] if point is not base else []
    sent, (_, share) = per_step(point.run, "sent_bytes"), exposed(point.run)
    parts += [f"{quantity(sent, 'B')} per node and step"] if sent > 0 else []
    parts += [f"{100 * share:.0f} % exposed"] if share > 0 else []
    return ", ".join(parts)


def _throughput(title: str, group: Sequence[Point], index: int) -> str:
    """Measured throughput, and dashed the ideal: proportional to the nodes."""
    base, nodes = group[0], np.array([float(p.nodes) for p in group])
    measured, ideal = np.array([p.per_s for p in group]), base.per_s / base.nodes * nodes
    forecast = np.array([p.predicted_per_s for p in group])
    lines = [
        Line(SHARED_COLOUR, "measured", nodes, measured, dots=True),
        Line(SHARED_COLOUR, "in proportion", nodes, ideal, dashed=True),
    ]
    if np.isfinite(forecast).any():
        lines.append(Line(SHARED_COLOUR, "predicted", nodes, forecast, dashed=True, dots=True))
    all_values = np.concatenate([line.y for line in lines])
    scale_max = int(nodes.max())
    tick_step = max(1, -(-scale_max // 8))
    x_axis = Axis(0.0, float(scale_max), "nodes", 1.0, tuple(float(n) for n in range(0, scale_max + 1, tick_step)))
    note = "dashed: in proportion to the nodes" + "; dashed with dots: predicted" * (len(lines) > 2)
    return chart(
        *(f"scaling-{index}", f"Throughput: {title}", note, x_axis, Axis.up(all_values, "samples/s", "", True), lines),
        num_points=len(group),
    )


def _table(group: Sequence[Point]) -> str:
    base, rows = group[0], []
    for p in group:
        sent, (exposed_s, share), gain = per_step(p.run, "sent_bytes"), exposed(p.run), predicted(p, base)
        rows.append(
            [
                *(str(p.nodes), str(p.batch), number(p.per_s)),
                number(p.predicted_per_s) if p.predicted_per_s > 0 else "",
                *(f"{speedup(p, base):.2f}x", f"{gain:.2f}x" if gain else "", f"{100 * efficiency(p, base):.0f} %"),
                quantity(sent, "B") if sent > 0 else "",
                f"{quantity(exposed_s, 's')}, {100 * share:.0f} %" if share > 0 else "",
                *(str(p.run.join.get("engine", "")), p.run.name),
            ]
        )
    headers = (
        *("nodes", "global batch", "samples/s", "predicted", "speedup", "predicted", "efficiency"),
        *("sent per node and step", "exposed per step", "engine", "run"),
    )
    return table(headers, rows, "runs by their nodes")
