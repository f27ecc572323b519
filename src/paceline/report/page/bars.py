"""Bar charts: predicted and measured speedup of each candidate of a plan, and the parts of a step's time."""

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
MAX_BARS = 8  # of a plan: the other candidates are in the table


def speedup(run: Run) -> float:
    """The measured speedup of the chosen candidate over the baseline; NaN where there is none."""
    chosen = run.plan.get("chosen")
    found = [_gain(candidate) for candidate in _candidates(run) if candidate.get("engine") == chosen]
    return next((value for value in found if value), math.nan)


def predicted_s(run: Run) -> float:
    """The plan's prediction of seconds per step, for this run's number of nodes and batch size; 0 if there is none."""
    nodes, batch_size = run.join.get("num_nodes", 1), run.join.get("batch_size")
    if nodes > 1:
        real = (team for team in run.plan.get("teams") or () if team.get("hosts"))
        candidates = [team for team in real if (team.get("nodes"), team.get("batch_size")) == (nodes, batch_size)]
    else:
        candidates = [candidate for candidate in _candidates(run) if candidate.get("engine") == run.plan.get("chosen")]
    return next((seconds for candidate in candidates if (seconds := _known(candidate.get("predicted_s")))), 0.0)


def speedups(runs: Sequence[Run]) -> str:
    """For each plan, a pair of bars for each candidate: measured, and below it predicted. Equal plans show once."""
    plans: list[tuple[list[Mapping[str, Any]], list[int]]] = []
    for i, run in enumerate(runs):
        candidates = _candidates(run)
        same_plan = next((indices for listed, indices in plans if listed == candidates), None)
        if same_plan is not None:
            same_plan.append(i)
        elif candidates:
            plans.append((candidates, [i]))
    return "".join(_plan(runs, candidates, indices) for candidates, indices in plans)


def _plan(runs: Sequence[Run], candidates: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> str:
    run, shown = runs[indices[0]], _most_promising(candidates)
    pairs = [(_gain(candidate), _predicted(candidate, candidates[0])) for candidate in shown]
    top = 1.04 * max(1.0, *(value for pair in pairs for value in pair))
    chosen = run.plan.get("chosen")
    items = "".join(bar(c, *pair, top, c.get("engine") == chosen) for c, pair in zip(shown, pairs, strict=True))
    names = f": {', '.join(runs[i].name for i in indices)}" if len(runs) > 1 else ""
    kind = f"run-{indices[0]}" if len(indices) == 1 else ""
    values = "Values" if len(shown) == len(candidates) else f"All {len(candidates)} candidates"
    return f"""<figure class="card bars speedups {kind}" style="--one:{100 / top:.2f}%">
<figcaption><h3>Speedup{escape(names)}</h3><p>{escape(_about(run, candidates))}</p></figcaption>
<ul class="key"><li class="measured">measured</li><li class="predicted">predicted</li></ul>
<ol>{items}</ol>
<details><summary>{values}</summary>{_table(candidates)}</details>
</figure>
"""


def times(runs: Sequence[Run]) -> str:
    """A bar for each run: its length is the mean time of a step, its sections are the parts of the step."""
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
        names = f": {run.name}" if len(runs) > 1 else ""
        cards.append(
            f'<figure class="card bars times run-{i}"><figcaption>'
            f"<h3>Where a step's time goes{escape(names)}</h3>"
            f"<p>mean of {len(run.steps):,} steps: {quantity(whole, 's')}</p></figcaption>"
            f'<div class="stack" style="width:{100 * whole / longest:.3g}%">{bar}</div><ul>{items}</ul></figure>\n'
        )
    return "".join(cards)


def _parts(run: Run) -> dict[str, float]:
    """Mean seconds of each recorded part of a step, and of the remainder."""
    columns = {part: run.steps[part] for part in ("seconds", *PARTS)}
    means = {part: float(np.nanmean(values)) for part, values in columns.items() if np.isfinite(values).any()}
    whole = means.pop("seconds", 0.0)
    remainder = whole - sum(means.values())
    return {**means, "other": remainder} if means and remainder > 0 else means


def _candidates(run: Run) -> list[Mapping[str, Any]]:
    rows = run.plan.get("rows")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _known(value: Any) -> float:
    """The value; 0 if it was not measured, or is infinite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0


def _predicted(candidate: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """The ratio of two predictions, in which an error common to all predictions cancels out. That of a candidate which
    did not run is corrected by those that did, so it is compared with what was measured."""
    seconds = _known(candidate.get("predicted_s"))
    predicted_s, measured_s = _known(base.get("predicted_s")), _known(base.get("measured_s"))
    ran = _known(candidate.get("measured_s"))
    return (predicted_s or measured_s if ran else measured_s or predicted_s) / seconds if seconds else 0.0


def _gain(candidate: Mapping[str, Any]) -> float:
    """The measured speedup. A candidate that was not measured may also have a speedup, but a predicted one."""
    return _known(candidate.get("speedup")) if _known(candidate.get("measured_s")) else 0.0


def _most_promising(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The baseline, the measured candidates, and of the others those with the best predictions, in the plan's order."""

    def promise(i: int) -> tuple[bool, bool, float]:
        return i == 0, bool(_known(candidates[i].get("measured_s"))), _predicted(candidates[i], candidates[0])

    best = sorted(range(len(candidates)), key=promise, reverse=True)[:MAX_BARS]
    return [candidates[i] for i in sorted(best)]


def bar(candidate: Mapping[str, Any], measured: float, predicted: float, top: float, chosen: bool) -> str:
    """One item: name and reason, a bar for the measured value and a thinner one for the predicted value."""
    whisker = ""
    if measured and _known(candidate.get("spread_s")) and _known(candidate.get("measured_s")):
        # the relative spread of the speedup is that of the seconds
        reach = measured * min(1.0, _known(candidate["spread_s"]) / _known(candidate["measured_s"]))
        whisker = f'<i style="left:{100 * (measured - reach) / top:.2f}%;width:{min(200 * reach / top, 100):.2f}%"></i>'
    tracks = "".join(
        f'<span class="{name}"><b style="width:{100 * value / top:.2f}%"></b>{extra}</span>'
        for name, value, extra in (("measured", measured, whisker), ("predicted", predicted, ""))
        if value
    )
    text = f"{measured:.2f}x" if measured else "" if predicted else NONE
    text += f"<small>{predicted:.2f}x</small>" if predicted else ""
    reason = str(candidate.get("reason", ""))
    name = escape(str(candidate.get("engine", ""))).replace("+", "<wbr>+").replace("/", "<wbr>/")
    return (
        f'<li{" class=chosen" if chosen else ""}><span class="head"><span class="name">{name}</span>'
        f'<span class="reason">{escape(reason)}</span></span>'
        f'<span class="tracks">{tracks}</span><span class="value">{text}</span></li>'
    )


def _about(run: Run, candidates: Sequence[Mapping[str, Any]]) -> str:
    text = [f"over {candidates[0].get('engine', 'the first candidate')}"]
    if run.plan.get("batch_size"):
        text.append(f"global batch {run.plan['batch_size']}")
    machine = run.plan.get("machine")
    if isinstance(machine, Mapping):
        text += [str(machine[key]) for key in ("name", "cpu") if machine.get(key)]
        text += [f"{machine['cores']} cores"] if machine.get("cores") else []
    return ", ".join(text)


def _table(candidates: Sequence[Mapping[str, Any]]) -> str:
    headers = (
        *("candidate", "predicted", "measured", "spread"),
        *("samples/s", "speedup", "peak memory", "fidelity", "reason"),
    )
    lines = []
    for candidate in candidates:
        seconds = [_known(candidate.get(name)) for name in ("predicted_s", "measured_s", "spread_s")]
        per_s, gain, peak = _known(candidate.get("per_s")), _gain(candidate), _known(candidate.get("peak_bytes"))
        lines.append(
            [
                str(candidate.get("engine", "")),
                *(quantity(value, "s") if value else "" for value in seconds),
                number(per_s) if per_s else "",
                f"{gain:.2f}x" if gain else "",
                quantity(peak, "B") if peak else "",
                str(candidate.get("fidelity") or ""),
                str(candidate.get("reason") or ""),
            ]
        )
    return table(headers, lines, "the plan's candidates")
