"""From where to where, in what unit, with ticks at round numbers; and numbers as people read them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
