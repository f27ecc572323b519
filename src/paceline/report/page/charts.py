"""Charts of the report: curves as a scalable SVG, axes as HTML, and a table of the same values.

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
class Downsampled:
    """A curve reduced to a number of buckets: the median, minimum and maximum of the values in each."""

    x: Values
    low: Values
    mid: Values
    high: Values

    @classmethod
    def of(cls, x: Values, y: Values, num_points: int) -> Downsampled:
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
    """A figure. ``marks``: (run, x) where a run was resumed. ``key``: its id in the page. ``kind``: its CSS class."""
    samples = [Downsampled.of(line.x, line.y, num_points) for line in lines]
    ticks = "".join(
        f'<span class="{name}" style="{edge}:{axis.place(np.array(t * axis.per)) / 10:.4g}%">{number(t)}</span>'
        for name, edge, axis in (("y", "bottom", y_axis), ("x", "left", x_axis))
        for t in axis.ticks
    )
    grid = "".join(f"M0 {SIZE - y_axis.place(np.array(t * y_axis.per)):.0f}h{SIZE}" for t in y_axis.ticks)
    curves = "".join(_curve(line, sample, x_axis, y_axis) for line, sample in zip(lines, samples, strict=True))
    joins = "".join(f'<path class="mark run-{run}" d="M{x_axis.place(np.array(x)):.0f} 0v{SIZE}"/>' for run, x in marks)
    described = zip(lines, samples, strict=True)
    story = ", ".join(f"{line.name}: {_description(sample, y_axis)}" for line, sample in described if len(sample.x))
    data = {
        "x": [x_axis.low, x_axis.high, x_axis.label],
        "y": [y_axis.low, y_axis.high, y_axis.label],
        "lines": [
            {"run": line.run, "name": line.name, "x": _list(sample.x / x_axis.per), "y": _list(sample.mid / y_axis.per)}
            for line, sample in zip(lines, samples, strict=True)
        ],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<figure class="card chart {kind}" id="{key}">
<figcaption><h3 id="{key}-title">{escape(title)}</h3><p>{escape(note)}</p></figcaption>
<p class="axis">{escape(y_axis.label)}</p>
<div class="plot" tabindex="0" role="group" aria-labelledby="{key}-title">
<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" aria-labelledby="{key}-name {key}-story">
<title id="{key}-name">{escape(title)}</title><desc id="{key}-story">{escape(story)}</desc>
<path class="grid" d="{grid}"/>{joins}{curves}</svg>
{ticks}</div>
<p class="axis end">{escape(x_axis.label)}</p>
<details><summary>Values</summary>{_table(title, lines, samples, x_axis, y_axis)}</details>
<script type="application/json">{text}</script>
</figure>
"""


def _curve(line: Line, sample: Downsampled, x_axis: Axis, y_axis: Axis) -> str:
    x = x_axis.place(sample.x)
    low, mid, high = (SIZE - np.clip(y_axis.place(v), -SIZE, 2 * SIZE) for v in (sample.low, sample.mid, sample.high))
    parts = []
    if sample.low is not sample.mid:
        forward, back = zip(x, high, strict=True), zip(x[::-1], low[::-1], strict=True)
        points = " ".join(f"{a:.0f} {b:.0f}" for a, b in (*forward, *back))
        parts.append(f'<path class="band run-{line.run}" d="M{points}z"/>')
    if len(x) > 1:
        points = " ".join(f"{a:.0f} {b:.0f}" for a, b in zip(x, mid, strict=True))
        parts.append(f'<path class="line run-{line.run}{" dashed" * line.dashed}" d="M{points}"/>')
    if line.dots or len(x) == 1:
        points = "".join(f"M{a:.0f} {b:.0f}h0" for a, b in zip(x, mid, strict=True))
        parts.append(f'<path class="dots run-{line.run}" d="{points}"/>')
    return "".join(parts)


def _table(title: str, lines: Sequence[Line], samples: Sequence[Downsampled], x_axis: Axis, y_axis: Axis) -> str:
    """The same curves as table rows: a few values of each curve, at its own x."""
    rows, classes = [], []
    for line, sample in zip(lines, samples, strict=True):
        for i in np.unique(np.linspace(0, max(0, len(sample.x) - 1), NUM_TABLE_ROWS).astype(int))[: len(sample.x)]:
            rows.append([line.name, number(sample.x[i] / x_axis.per), number(sample.mid[i] / y_axis.per)])
            classes.append(f"run-{line.run}")
    return table(["line", x_axis.label, y_axis.label], rows, f"values of {title}", classes=classes)


def _description(sample: Downsampled, axis: Axis) -> str:
    first, last = (number(value / axis.per) for value in (sample.mid[0], sample.mid[-1]))
    smallest, largest = (number(value / axis.per) for value in (sample.low.min(), sample.high.max()))
    return f"from {first} to {last}, between {smallest} and {largest}"


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
    """``label`` may contain {}, which is replaced by the unit that fits the values."""

    low: float
    high: float
    label: str
    per: float  # the axis's unit, in units of the values
    ticks: tuple[float, ...]

    @classmethod
    def up(cls, values: Values, label: str, unit: str = "", from_zero: bool = False) -> Axis:
        """For measured values: from a round number to a round number; outliers lie outside."""
        low, high = _range(values)
        return cls._between(min(0.0, low) if from_zero else low, high, label, unit, rounded=True)

    @classmethod
    def along(cls, values: Values, label: str, unit: str = "") -> Axis:
        """For time and steps: from 0 to the last value."""
        return cls._between(0.0, float(values.max(initial=0.0)), label, unit, rounded=False)

    @classmethod
    def _between(cls, low: float, high: float, label: str, unit: str, rounded: bool) -> Axis:
        per, symbol = _unit(max(abs(low), abs(high)), unit)
        low, high = low / per, high / per
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            low, high = (0.0, 1.0) if high == 0 else (low - 0.5 * abs(low), high + 0.5 * abs(high))
        step = _round(high - low)
        top = math.ceil(high / step - 1e-9) * step
        if rounded:
            low, high = math.floor(low / step + 1e-9) * step, top
        elif top - high < 0.05 * step:
            high = top  # the axis of 599 steps ends at the tick 600
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
        return cls(low, high, label.replace("{}", symbol), per, ticks)

    def place(self, values: Values) -> Values:
        """The positions of values, in units of the SVG."""
        return SIZE * (values / self.per - self.low) / (self.high - self.low)


def number(value: float) -> str:
    """Three or four significant digits, a thin space between thousands, an exponent only if necessary."""
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
    """A value with the unit that fits it: 0.0123 s is 12.3 ms."""
    per, symbol = _unit(abs(value), unit)
    return f"{number(float(f'{value / per:.3g}'))}\u00a0{symbol}"


def _range(values: Values) -> tuple[float, float]:
    """The range of all values, without a few outliers that would reduce the other values to a flat line."""
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if len(values) < 20:
        return low, high
    inner_low, inner_high = np.percentile(values, (1, 99))
    margin = inner_high - inner_low
    return max(low, float(inner_low - margin)), min(high, float(inner_high + margin))


def _round(span: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides a span into about NUM_TICKS parts."""
    rough = span / NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9)))


def _unit(size: float, unit: str) -> tuple[float, str]:
    for smallest, symbol, per in _UNITS.get(unit, ()):
        if size >= smallest:
            return float(per), symbol
    return 1.0, unit


NONE = "\N{EN DASH}"  # shown for a value that was not measured


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], name: str, kind: str = "", classes: Sequence[str] = ()
) -> str:
    """Each row begins with its heading. ``name``: for screen readers. ``classes``: of the columns, or of the rows."""
    body = []
    for i, (first, *cells) in enumerate(rows):
        row_class = "" if len(classes) == len(headers) or not classes else f' class="{classes[i]}"'
        tds = "".join(f"<td{_css(classes, headers, j)}>{escape(cell) or NONE}</td>" for j, cell in enumerate(cells, 1))
        body.append(f'<tr{row_class}><th scope="row">{escape(first)}</th>{tds}</tr>')
    head = "".join(f'<th scope="col"{_css(classes, headers, j)}>{escape(text)}</th>' for j, text in enumerate(headers))
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _css(classes: Sequence[str], headers: Sequence[str], column: int) -> str:
    return f' class="{classes[column]}"' if len(classes) == len(headers) and classes[column] else ""
