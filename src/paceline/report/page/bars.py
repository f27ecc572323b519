"""Bars: what each candidate of a plan was predicted to gain and gained, and where the time of a step went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from paceline.report.page.charts import NONE, number, quantity, table
from paceline.report.page.run import Run

PARTS = {  # of a step, in its order
    "wait_seconds": "waiting for input",
    "compute_seconds": "forward and backward",
    "exchange_seconds": "exchange, not hidden",
    "update_seconds": "update",
}
MAX_BARS = 8  # of a plan: its other rows are in the table


def speedup(run: Run) -> float:
    """Of the chosen row over the baseline, as measured; NaN where there is none."""
    chosen = run.plan.get("chosen")
    found = [_gain(row) for row in _rows(run) if row.get("engine") == chosen]
    return next((value for value in found if value), math.nan)


def predicted_s(run: Run) -> float:
    """Seconds per step that the plan foretold for as many nodes, and as large a batch, as this run has; else 0."""
    nodes, batch_size = run.join.get("num_nodes", 1), run.join.get("batch_size")
    if nodes > 1:
        real = (team for team in run.plan.get("teams") or () if team.get("hosts"))
        rows = [team for team in real if (team.get("nodes"), team.get("batch_size")) == (nodes, batch_size)]
    else:
        rows = [row for row in _rows(run) if row.get("engine") == run.plan.get("chosen")]
    return next((seconds for row in rows if (seconds := _known(row.get("predicted_s")))), 0.0)


def speedups(runs: Sequence[Run]) -> str:
    """For each plan, a pair of bars for each row: measured, and below it predicted. Equal plans show once."""
    plans: list[tuple[list[Mapping[str, Any]], list[int]]] = []
    for i, run in enumerate(runs):
        rows = _rows(run)
        same = next((indices for known, indices in plans if known == rows), None)
        if same is not None:
            same.append(i)
        elif rows:
            plans.append((rows, [i]))
    return "".join(_plan(runs, rows, indices) for rows, indices in plans)


def _plan(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> str:
    run, shown = runs[indices[0]], _foremost(rows)
    pairs = [(_gain(row), _predicted(row, rows[0])) for row in shown]
    most = 1.04 * max(1.0, *(value for pair in pairs for value in pair))
    chosen = run.plan.get("chosen")
    items = "".join(bar(row, *pair, most, row.get("engine") == chosen) for row, pair in zip(shown, pairs, strict=True))
    of = f": {', '.join(runs[i].name for i in indices)}" if len(runs) > 1 else ""
    kind = f"run-{indices[0]}" if len(indices) == 1 else ""
    return f"""<figure class="card bars speedups {kind}" style="--one:{100 / most:.2f}%">
<figcaption><h3>Speedup{escape(of)}</h3><p>{escape(_about(run, rows))}</p></figcaption>
<ul class="key"><li class="measured">measured</li><li class="predicted">predicted</li></ul>
<ol>{items}</ol>
<details><summary>{"Values" if len(shown) == len(rows) else f"All {len(rows)} rows"}</summary>{_table(rows)}</details>
</figure>
"""


def times(runs: Sequence[Run]) -> str:
    """A bar for each run, as long as its mean step, cut into what the step spent its time on."""
    means = [(i, run, _parts(run)) for i, run in enumerate(runs)]
    means = [(i, run, parts) for i, run, parts in means if parts]
    if not means:
        return ""
    longest = max(sum(parts.values()) for _, _, parts in means)
    cards = []
    for i, run, parts in means:
        whole = sum(parts.values())
        shown = [(part, name, parts[part]) for part, name in (*PARTS.items(), ("other", "other")) if part in parts]
        bar = "".join(f'<span class="{part}" style="width:{100 * s / whole:.3g}%"></span>' for part, _, s in shown)
        items = "".join(
            f'<li class="{part}"><span>{name}</span><b>{quantity(s, "s")}</b><i>{100 * s / whole:.0f} %</i></li>'
            for part, name, s in shown
        )
        of = f": {run.name}" if len(runs) > 1 else ""
        cards.append(
            f'<figure class="card bars times run-{i}"><figcaption>'
            f"<h3>Where a step's time goes{escape(of)}</h3>"
            f"<p>mean of {len(run.steps):,} steps: {quantity(whole, 's')}</p></figcaption>"
            f'<div class="stack" style="width:{100 * whole / longest:.3g}%">{bar}</div><ul>{items}</ul></figure>\n'
        )
    return "".join(cards)


def _parts(run: Run) -> dict[str, float]:
    """Mean seconds of each part of a step that was recorded, and of what is left."""
    columns = {part: run.steps[part] for part in ("seconds", *PARTS)}
    means = {part: float(np.nanmean(values)) for part, values in columns.items() if np.isfinite(values).any()}
    whole = means.pop("seconds", 0.0)
    rest = whole - sum(means.values())
    return {**means, "other": rest} if means and rest > 0 else means


def _rows(run: Run) -> list[Mapping[str, Any]]:
    rows = run.plan.get("rows")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _known(value: Any) -> float:
    """0 for what was not measured, or was infinite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0


def _predicted(row: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """Prediction over prediction, so that what all predictions have wrong alike drops out."""
    seconds = _known(row.get("predicted_s"))
    return (_known(base.get("predicted_s")) or _known(base.get("measured_s"))) / seconds if seconds else 0.0


def _gain(row: Mapping[str, Any]) -> float:
    """As measured. A row that was not tried may have a speedup too, but a predicted one."""
    return _known(row.get("speedup")) if _known(row.get("measured_s")) else 0.0


def _foremost(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The baseline, what was tried, and the most promising of the rest, in the plan's order."""

    def promise(i: int) -> tuple[bool, bool, float]:
        return i == 0, bool(_known(rows[i].get("measured_s"))), _predicted(rows[i], rows[0])

    best = sorted(range(len(rows)), key=promise, reverse=True)[:MAX_BARS]
    return [rows[i] for i in sorted(best)]


def bar(row: Mapping[str, Any], measured: float, predicted: float, most: float, chosen: bool) -> str:
    """One item: a name and a reason, a bar for what was measured and a thinner one for what was predicted."""
    whisker = ""
    if measured and _known(row.get("spread_s")) and _known(row.get("measured_s")):
        # the spread of the seconds, as a share, is that of the speedup
        reach = measured * min(1.0, _known(row["spread_s"]) / _known(row["measured_s"]))
        whisker = (
            f'<i style="left:{100 * (measured - reach) / most:.2f}%;width:{min(200 * reach / most, 100):.2f}%"></i>'
        )
    tracks = "".join(
        f'<span class="{name}"><b style="width:{100 * value / most:.2f}%"></b>{extra}</span>'
        for name, value, extra in (("measured", measured, whisker), ("predicted", predicted, ""))
        if value
    )
    words = f"{measured:.2f}x" if measured else "" if predicted else NONE
    words += f"<small>{predicted:.2f}x</small>" if predicted else ""
    reason = str(row.get("reason", ""))
    name = escape(str(row.get("engine", ""))).replace("+", "<wbr>+").replace("/", "<wbr>/")
    return (
        f'<li{" class=chosen" if chosen else ""}><span class="head"><span class="name">{name}</span>'
        f'<span class="reason">{escape(reason)}</span></span>'
        f'<span class="tracks">{tracks}</span><span class="value">{words}</span></li>'
    )


def _about(run: Run, rows: Sequence[Mapping[str, Any]]) -> str:
    words = [f"over {rows[0].get('engine', 'the first row')}"]
    if run.plan.get("batch_size"):
        words.append(f"global batch {run.plan['batch_size']}")
    machine = run.plan.get("machine")
    if isinstance(machine, Mapping):
        words += [str(machine[key]) for key in ("name", "cpu") if machine.get(key)]
        words += [f"{machine['cores']} cores"] if machine.get("cores") else []
    return ", ".join(words)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = (
        *("candidate", "predicted", "measured", "spread"),
        *("samples/s", "speedup", "peak memory", "fidelity", "reason"),
    )
    lines = []
    for row in rows:
        seconds = [_known(row.get(name)) for name in ("predicted_s", "measured_s", "spread_s")]
        per_s, gain, peak = _known(row.get("per_s")), _gain(row), _known(row.get("peak_bytes"))
        lines.append(
            [
                str(row.get("engine", "")),
                *(quantity(value, "s") if value else "" for value in seconds),
                number(per_s) if per_s else "",
                f"{gain:.2f}x" if gain else "",
                quantity(peak, "B") if peak else "",
                str(row.get("fidelity") or ""),
                str(row.get("reason") or ""),
            ]
        )
    return table(heads, lines, "the plan's rows")
