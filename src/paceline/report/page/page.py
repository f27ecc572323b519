"""The report: event logs of runs as one self-contained HTML page, without network access, fonts or libraries.

Runs are shown side by side on the same axes. Quantities that a run did not record are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from paceline.report.page import bars, summary
from paceline.report.page.quantities import MACHINE, TRAINING, charts, own
from paceline.report.page.run import Run, load
from paceline.report.page.scaling import scaling
from paceline.report.record import write_whole

MAX_RUNS = 6  # colours that colour-blind people can distinguish, on white and on black


def write(runs: Sequence[Path], out: Path) -> None:
    """Writes the page of one run, or of up to MAX_RUNS side by side, atomically.

    *Raises* ValueError for no run, too many runs, a missing folder or event log, and a line that is not an event.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"a report shows 1 to {MAX_RUNS} runs, got {len(runs)}; write a page for each group of them")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name the page to write, such as {out / 'report.html'}")
    names = [folder.resolve().name for folder in runs]
    unique = [name if names.count(name) == 1 else str(folder) for folder, name in zip(runs, names, strict=True)]
    text = render([load(folder, name) for folder, name in zip(runs, unique, strict=True)])
    write_whole(out, text)


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    several = len(runs) > 1
    sections = [
        ("Result", "wide", summary.compared(runs) if several else summary.tiles(runs[0])),
        ("Training", "", "".join(charts([*TRAINING, *own(runs)], runs))),
        ("Scaling", "", scaling(runs)),
        ("Speed", "", bars.speedups(runs) + bars.times(runs)),
        ("Machine", "", "".join(charts(MACHINE, runs))),
    ]
    body = "".join(
        f'<section aria-label="{name}"><h2>{name}</h2><div class="grid {kind}">{content}</div></section>\n'
        for name, kind, content in sections
        if content
    )
    # a run whose box is not checked is hidden everywhere except beside its box
    hiding = "".join(f":root:has(#show-{i}:not(:checked)) main .run-{i}{{display:none}}\n" for i in range(len(runs)))
    files = resources.files("paceline.report.page")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(title)} · paceline</title>
<style>
{style}{hiding}</style>
</head>
<body>
<header><p class="brand">paceline</p><h1>{escape(title)}</h1>{summary.lead(runs)}</header>
{_legend(runs)}
<main>
{body}</main>
<script>
{script}</script>
</body>
</html>
"""


def _legend(runs: Sequence[Run]) -> str:
    """The runs with their colours and a box to hide each, and the choice of the x axis (steps or time)."""
    boxes = "".join(
        f'<label class="run-{i}"><input type="checkbox" id="show-{i}" checked><span class="swatch"></span>'
        f"{escape(run.name)}</label>"
        for i, run in enumerate(runs)
        if len(runs) > 1
    )
    if any(len(run.steps) for run in runs):
        boxes += (
            '<fieldset><legend>along</legend><label><input type="radio" name="along" id="along-step" checked>steps'
            '</label><label><input type="radio" name="along" id="along-time">time</label></fieldset>'
        )
    return f'<form class="legend" aria-label="what is shown" autocomplete="off">{boxes}</form>'
