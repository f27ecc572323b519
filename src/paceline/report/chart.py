"""A few lines become a chart: an SVG that stretches, words beside it that do not, and a table of the same values.

Axes and words are HTML, so that they keep their size on a phone; the curves are an SVG
that fills what is left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from paceline.report.axis import SIZE, Axis, Values, number
from paceline.report.table import table

NUM_TABLE_ROWS = 12


@dataclass(frozen=True)
class Line:
    """One curve of one run. ``dashed`` is the second of two quantities in a chart; ``dots`` marks each value."""

    run: int
    name: str
    x: Values
    y: Values
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Thin:
    """At most so many points: the median of each bucket, and between what the values in it lay."""

    x: Values
    low: Values
    mid: Values
    high: Values

    @classmethod
    def of(cls, x: Values, y: Values, num_points: int) -> Thin:
        known = np.isfinite(x) & np.isfinite(y)
        x, y = x[known], y[known]
        if len(x) <= num_points:
            return cls(x, y, y, y)
        parts = np.array_split(np.arange(len(x)), num_points)
        rows = [(x[p[len(p) // 2]], y[p].min(), float(np.median(y[p])), y[p].max()) for p in parts]
        return cls(*np.array(rows).T)

    @property
    def is_thinned(self) -> bool:
        return self.low is not self.mid


def chart(
    key: str,
    title: str,
    note: str,
    x_axis: Axis,
    y_axis: Axis,
    lines: Sequence[Line],
    num_points: int,
    marks: Sequence[tuple[int, float]] = (),
    kind: str = "",
) -> str:
    """A figure. ``marks`` are (run, x) where a run was resumed. ``key`` is its id in the page, ``kind`` a class."""
    thins = [Thin.of(line.x, line.y, num_points) for line in lines]
    ticks_y = "".join(
        f'<span class="y" style="bottom:{y_axis.place(np.array(t * y_axis.per)) / 10:.4g}%">{number(t)}</span>'
        for t in y_axis.ticks
    )
    ticks_x = "".join(
        f'<span class="x" style="left:{x_axis.place(np.array(t * x_axis.per)) / 10:.4g}%">{number(t)}</span>'
        for t in x_axis.ticks
    )
    grid = "".join(f"M0 {SIZE - y_axis.place(np.array(t * y_axis.per)):.0f}h{SIZE}" for t in y_axis.ticks)
    curves = "".join(_curve(line, thin, x_axis, y_axis) for line, thin in zip(lines, thins, strict=True))
    joins = "".join(f'<path class="mark run-{run}" d="M{x_axis.place(np.array(x)):.0f} 0v{SIZE}"/>' for run, x in marks)
    seen = ", ".join(
        f"{line.name}: {_story(thin, y_axis)}" for line, thin in zip(lines, thins, strict=True) if len(thin.x)
    )
    data = {
        "x": [x_axis.low, x_axis.high, x_axis.label],
        "y": [y_axis.low, y_axis.high, y_axis.label],
        "lines": [
            {"run": line.run, "name": line.name, "x": _list(thin.x / x_axis.per), "y": _list(thin.mid / y_axis.per)}
            for line, thin in zip(lines, thins, strict=True)
        ],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<figure class="card chart {kind}" id="{key}">
<figcaption><h3 id="{key}-title">{escape(title)}</h3><p>{escape(note)}</p></figcaption>
<p class="axis">{escape(y_axis.label)}</p>
<div class="plot" tabindex="0" role="group" aria-labelledby="{key}-title">
<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" aria-labelledby="{key}-name {key}-story">
<title id="{key}-name">{escape(title)}</title><desc id="{key}-story">{escape(seen)}</desc>
<path class="grid" d="{grid}"/>{joins}{curves}</svg>
{ticks_y}{ticks_x}</div>
<p class="axis end">{escape(x_axis.label)}</p>
<details><summary>Values</summary>{_table(title, lines, thins, x_axis, y_axis)}</details>
<script type="application/json">{text}</script>
</figure>
"""


def _curve(line: Line, thin: Thin, x_axis: Axis, y_axis: Axis) -> str:
    x = x_axis.place(thin.x)
    low, mid, high = (SIZE - np.clip(y_axis.place(v), -SIZE, 2 * SIZE) for v in (thin.low, thin.mid, thin.high))
    parts = []
    if thin.is_thinned:
        there, back = zip(x, high, strict=True), zip(x[::-1], low[::-1], strict=True)
        points = " ".join(f"{a:.0f} {b:.0f}" for a, b in (*there, *back))
        parts.append(f'<path class="band run-{line.run}" d="M{points}z"/>')
    if len(x) > 1:
        points = " ".join(f"{a:.0f} {b:.0f}" for a, b in zip(x, mid, strict=True))
        parts.append(f'<path class="line run-{line.run}{" dashed" * line.dashed}" d="M{points}"/>')
    if line.dots or len(x) == 1:
        points = "".join(f"M{a:.0f} {b:.0f}h0" for a, b in zip(x, mid, strict=True))
        parts.append(f'<path class="dots run-{line.run}" d="{points}"/>')
    return "".join(parts)


def _table(title: str, lines: Sequence[Line], thins: Sequence[Thin], x_axis: Axis, y_axis: Axis) -> str:
    """The same curves as rows: a few values of each, at their own places."""
    rows, by = [], []
    for line, thin in zip(lines, thins, strict=True):
        for i in np.unique(np.linspace(0, max(0, len(thin.x) - 1), NUM_TABLE_ROWS).astype(int))[: len(thin.x)]:
            rows.append([line.name, number(thin.x[i] / x_axis.per), number(thin.mid[i] / y_axis.per)])
            by.append(f"run-{line.run}")
    return table(["line", x_axis.label, y_axis.label], rows, f"values of {title}", by=by)


def _story(thin: Thin, axis: Axis) -> str:
    first, last = (number(value / axis.per) for value in (thin.mid[0], thin.mid[-1]))
    least, most = (number(value / axis.per) for value in (thin.low.min(), thin.high.max()))
    return f"from {first} to {last}, between {least} and {most}"


def _list(values: Values) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
