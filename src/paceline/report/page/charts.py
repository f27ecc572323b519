"""Charts of the report: curves as an SVG that stretches, axes as HTML that does not, and a table of the same values.

Axes and text are HTML, so that they keep their size on a phone. Tables scroll where they are wider than the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

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
    ticks = "".join(
        f'<span class="{name}" style="{edge}:{axis.place(np.array(t * axis.per)) / 10:.4g}%">{number(t)}</span>'
        for name, edge, axis in (("y", "bottom", y_axis), ("x", "left", x_axis))
        for t in axis.ticks
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
{ticks}</div>
<p class="axis end">{escape(x_axis.label)}</p>
<details><summary>Values</summary>{_table(title, lines, thins, x_axis, y_axis)}</details>
<script type="application/json">{text}</script>
</figure>
"""


def _curve(line: Line, thin: Thin, x_axis: Axis, y_axis: Axis) -> str:
    x = x_axis.place(thin.x)
    low, mid, high = (SIZE - np.clip(y_axis.place(v), -SIZE, 2 * SIZE) for v in (thin.low, thin.mid, thin.high))
    parts = []
    if thin.low is not thin.mid:
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


Values = NDArray[np.float64]
SIZE = 1000  # of a chart, in its own units
NUM_TICKS = 5
_UNITS = {
    "s": ((3 * 3600, "h", 3600), (180, "min", 60), (1, "s", 1), (1e-3, "ms", 1e-3), (0, "µs", 1e-6)),
    "share": ((0, "%", 0.01),),
    "B": ((1e12, "TB", 1e12), (1e9, "GB", 1e9), (1e6, "MB", 1e6), (1e3, "kB", 1e3), (0, "B", 1)),
}


@dataclass(frozen=True)
class Axis:
    """``label`` may hold {} for the unit that suits the values."""

    low: float
    high: float
    label: str
    per: float  # how much of the values' own unit is 1 on the axis
    ticks: tuple[float, ...]

    @classmethod
    def up(cls, values: Values, label: str, unit: str = "", from_zero: bool = False) -> Axis:
        """For what was measured: from a round number to a round number, outliers outside."""
        low, high = _reach(values)
        return cls._between(min(0.0, low) if from_zero else low, high, label, unit, rounded=True)

    @classmethod
    def along(cls, values: Values, label: str, unit: str = "") -> Axis:
        """For time and steps: from 0 to the last value."""
        return cls._between(0.0, float(values.max(initial=0.0)), label, unit, rounded=False)

    @classmethod
    def _between(cls, low: float, high: float, label: str, unit: str, rounded: bool) -> Axis:
        per, word = _unit(max(abs(low), abs(high)), unit)
        low, high = low / per, high / per
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            low, high = (0.0, 1.0) if high == 0 else (low - 0.5 * abs(low), high + 0.5 * abs(high))
        gap = _round(high - low)
        whole = math.ceil(high / gap - 1e-9) * gap
        if rounded:
            low, high = math.floor(low / gap + 1e-9) * gap, whole
        elif whole - high < 0.05 * gap:
            high = whole  # 599 steps end at a tick that says 600
        first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
        ticks = tuple(round(i * gap, 12) for i in range(first, last + 1))
        return cls(low, high, label.replace("{}", word), per, ticks)

    def place(self, values: Values) -> Values:
        """In units of the SVG, from its start."""
        return SIZE * (values / self.per - self.low) / (self.high - self.low)


def number(value: float) -> str:
    """Three or four digits that count, thousands apart by a thin space, no exponent unless it must be."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.3g}"
    digits = 0 if size >= 1000 or value == 0 else max(0, 3 - math.floor(math.log10(size)) - (size >= 1))
    text = f"{value:,.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace(",", "\u202f").replace("-", "\u2212")


def quantity(value: float, unit: str) -> str:
    """A value with the unit that suits it: 0.0123 s is 12.3 ms."""
    per, word = _unit(abs(value), unit)
    return f"{number(float(f'{value / per:.3g}'))}\u00a0{word}"


def _reach(values: Values) -> tuple[float, float]:
    """All values, unless a few lie so far out that the others would become a flat line: those leave the frame."""
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if len(values) < 20:
        return low, high
    inner_low, inner_high = np.percentile(values, (1, 99))
    reach = inner_high - inner_low
    return max(low, float(inner_low - reach)), min(high, float(inner_high + reach))


def _round(span: float) -> float:
    """A gap of 1, 2 or 5 times a power of ten that cuts a span into about NUM_TICKS parts."""
    rough = span / NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9)))


def _unit(size: float, unit: str) -> tuple[float, str]:
    for least, word, per in _UNITS.get(unit, ()):
        if size >= least:
            return float(per), word
    return 1.0, unit


NONE = "\N{EN DASH}"  # what was not measured


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], name: str, kind: str = "", by: Sequence[str] = ()
) -> str:
    """``rows`` begin with their own heading. ``name`` is read aloud; ``by`` gives each column, or else row, a class."""
    body = []
    for i, (first, *cells) in enumerate(rows):
        whole = "" if len(by) == len(heads) or not by else f' class="{by[i]}"'
        tds = "".join(f"<td{_class(by, heads, j)}>{escape(cell) or NONE}</td>" for j, cell in enumerate(cells, 1))
        body.append(f'<tr{whole}><th scope="row">{escape(first)}</th>{tds}</tr>')
    head = "".join(f'<th scope="col"{_class(by, heads, j)}>{escape(text)}</th>' for j, text in enumerate(heads))
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _class(by: Sequence[str], heads: Sequence[str], column: int) -> str:
    return f' class="{by[column]}"' if len(by) == len(heads) and by[column] else ""
