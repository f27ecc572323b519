"""A plan on a terminal: its configurations, its teams and its pairs of hosts, each as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.planner.methods import Method
from paceline.planner.plan_file import CHOSEN, Between, Plan, Row
from paceline.planner.teams import Team

MAX_SHOWN = 15  # the pairs of six hosts; the plan file has all pairs


def plan_table(plan: Plan) -> Table:
    """One line per configuration, with the reason in the last column."""
    columns = {
        "candidate": [row.engine for row in plan.rows],
        "predicted s": [_number(row.predicted_s, "{:.4f}") for row in plan.rows],
        "s/step": [_measured(row) for row in plan.rows],
        "samples/s": [_number(row.per_s, "{:.0f}") for row in plan.rows],
        "speedup": [_number(row.speedup, "{:.2f}x") for row in plan.rows],
        "memory": [_number(row.peak_bytes, "{:.0f} MiB", 2**-20) for row in plan.rows],
        "fidelity": [row.fidelity for row in plan.rows],
        "optimizer": [row.optimizer for row in plan.rows],
        "": [_reason(row) for row in plan.rows],
    }
    return _table(columns)


def team_table(teams: Sequence[Team]) -> Table:
    """One line per team, with the reason in the last column."""
    columns = {
        "nodes": [str(team.nodes) for team in teams],
        "batch": [f"{team.batch_size} {team.batch}" if team.nodes > 1 else f"{team.batch_size}" for team in teams],
        "engine": [_once(team.engines) for team in teams],
        "link": [team.link for team in teams],
        "predicted s": [_number(team.predicted_s, "{:.4f}") for team in teams],
        "s/step": [_measured(team) for team in teams],
        "samples/s": [_number(team.per_s, "{:.1f}") for team in teams],
        "speedup": [_number(team.predicted_speedup, "{:.2f}x") for team in teams],
        "measured": [_number(team.measured_speedup, "{:.2f}x") for team in teams],
        "efficiency": [_number(team.efficiency, "{:.0%}") for team in teams],
        "MB sent": [_number(team.sent_bytes, "{:.2f}", 1e-6) for team in teams],
        "exposed ms": [_number(team.exposed_s, "{:.1f}", 1e3) for team in teams],
        "as factors": [team.factors for team in teams],
        "": [_reason(team) for team in teams],
    }
    return _table(columns)


def method_table(methods: Sequence[Method]) -> Table:
    """One line per method of communication, of the team that the first one names."""
    columns = {
        "exchange": [one.exchange for one in methods],
        "codec": [one.codec for one in methods],
        "predicted s": [_number(one.predicted_s, "{:.4f}") for one in methods],
        "speedup": [_number(one.predicted_speedup, "{:.2f}x") for one in methods],
        "MB sent": [_number(one.sent_bytes, "{:.2f}", 1e-6) for one in methods],
        "exposed ms": [_number(one.exposed_s, "{:.1f}", 1e3) for one in methods],
        "fidelity": [one.fidelity for one in methods],
        "": [_reason(one) for one in methods],
    }
    return _table(columns)


def _once(engines: str) -> str:
    """A configuration that all nodes share is printed once."""
    rows = engines.split(",")
    return rows[0] if len(set(rows)) == 1 else engines


def pair_table(pairs: Sequence[Between]) -> Table:
    """One line per pair; of more than MAX_SHOWN pairs only the slowest, slowest first."""
    num_pairs = len(pairs)
    if num_pairs > MAX_SHOWN:
        pairs = sorted(pairs, key=lambda pair: pair.bytes_per_s)[:MAX_SHOWN]
    title = f"the slowest {MAX_SHOWN} of {num_pairs} pairs; the plan has all" if num_pairs > MAX_SHOWN else None
    table = Table("host", "host", "latency ms", "MB/s", box=None, pad_edge=False, title=title)
    for pair in pairs:
        cells = pair.one, pair.other, f"{pair.latency_s * 1e3:.2f}", f"{pair.bytes_per_s / 1e6:.1f}"
        table.add_row(*map(Text, cells))
    return table


def _measured(one: Row | Team) -> str:
    about = "~" if isinstance(one, Row) and one.extrapolated else ""
    return "" if one.measured_s is None else f"{about}{one.measured_s:.4f} ± {one.spread_s or 0:.4f}"


def _reason(one: Row | Team | Method) -> str:
    return "<- chosen" if one.reason == CHOSEN else one.reason


def _number(value: float | None, form: str, times: float = 1.0) -> str:
    return "" if value is None else form.format(value * times)


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    """Omits columns without any value."""
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(*shown, box=None, pad_edge=False)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, cells))  # as text, since an error may contain markup
    # no truncation: on a narrow terminal a wrapped line is better than half a name
    table.width = Console(width=1000).measure(table).maximum
    return table
