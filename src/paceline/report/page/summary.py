"""Summary of a run: accuracy, speed, configuration, end, and whether each sample of an epoch was used exactly once.

For the last point, each step's event has the epoch, the index of its batch in it, the batch's samples, and how many of
them were used in the global gradient. Assignments partition a batch among the processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from paceline.registry import CODEC, head, says
from paceline.report.page import bars
from paceline.report.page.charts import Values, number, quantity, table
from paceline.report.page.run import Run

NUM_WARM_UP = 3  # steps left out of the throughput, where there are enough
EMULATED = "Emulated: layers waited as long as they took when profiled; nothing was trained; bytes and waits are real."
NUM_LAST = 20  # steps whose mean is the final loss of a run without epochs


def per_step(run: Run, name: str) -> float:
    """The median of a column of steps, without the first few; NaN where it was not recorded."""
    values = run.column("steps", name)
    values = _known(values[NUM_WARM_UP:] if len(values) > 4 * NUM_WARM_UP else values)
    return float(np.median(values)) if len(values) else math.nan


def throughput(run: Run) -> float:
    """Median samples/s over the steps, without the first few."""
    return per_step(run, "samples_per_s")


def loss(run: Run) -> float:
    """The loss of the last epoch, else the mean of the last steps."""
    means = _known(run.epochs["loss"][-1:]), _known(run.steps["loss"][-NUM_LAST:])
    return next((float(values.mean()) for values in means if len(values)), math.nan)


def exposed(run: Run) -> tuple[float, float]:
    """Communication that was not hidden behind backward: seconds per step, and their share of it; NaN on one node."""
    waited, seconds = run.column("steps", "exposed_seconds"), run.steps["seconds"]
    known = np.isfinite(waited) & np.isfinite(seconds)
    if not known.any() or not seconds[known].sum() > 0:
        return math.nan, math.nan
    return per_step(run, "exposed_seconds"), float(waited[known].sum() / seconds[known].sum())


def facts(run: Run) -> dict[str, str]:
    """Names and values as text; a value that was not recorded is empty."""
    test, seconds, sent = (
        _known(column) for column in (run.epochs["test_accuracy"], run.steps["seconds"], run.steps["sent_bytes"])
    )
    memory, cpu = _known(run.column("usage", "memory_bytes")), _known(run.column("usage", "run_cores"))
    gain, predicted_s = bars.speedup(run), bars.predicted_s(run)
    # between two averages nothing is sent, and then the median is 0
    (exposed_s, share), step_bytes = exposed(run), per_step(run, "sent_bytes") or float(sent.mean())
    return {
        "test accuracy": f"{100 * test[-1]:.1f} %" if len(test) else "",
        "final loss": "" if np.isnan(loss(run)) else number(loss(run)),
        "samples/s": "" if np.isnan(throughput(run)) else number(throughput(run)),
        "speedup": "" if math.isnan(gain) else f"{gain:.2f}x",
        "median step": quantity(float(np.median(seconds)), "s") if len(seconds) else "",
        "predicted step": quantity(predicted_s, "s") if predicted_s else "",
        "exposed communication": "" if math.isnan(exposed_s) else f"{quantity(exposed_s, 's')}, {100 * share:.0f} %",
        "time": quantity(run.time_s, "s"),
        "of which in steps": f"{100 * seconds.sum() / run.time_s:.0f} %" if len(seconds) and run.time_s else "",
        "engine": str(run.join.get("engine", "")) + ", emulated" * bool(run.join.get("emulated")),
        "nodes": str(run.join.get("num_nodes", "")),
        "exchange": _exchange(run),
        "global batch": str(run.join.get("batch_size", "")),
        "steps": f"{len(run.steps):,}".replace(",", "\u202f"),
        "epochs": str(len(run.epochs) or ""),
        "samples": sample_usage(run),
        "peak memory": quantity(memory.max(), "B") if len(memory) else "",
        "processors": f"{cpu.mean():.2f} cores busy" if len(cpu) else "",
        "sent per step": quantity(step_bytes, "B") if step_bytes > 0 else "",
        "sent": quantity(sent.sum(), "B") if len(sent) else "",
        "resumed": f"{len(run.resumed)} times" if run.resumed else "",
        "re-broadcast": _rolling(run),
        "steps done again": str(run.num_redone or ""),
        "checkpoints": str(run.num_checkpoints or ""),
        "ended": run.end or "not yet, or killed",
    }


def lead(runs: Sequence[Run]) -> str:
    """The head of the page: the chosen configuration with its reason, and hints."""
    texts: dict[str, list[str]] = {}  # each text once, with the names of its runs
    for run in runs:
        if run.join.get("emulated"):
            texts.setdefault(f'<p class="hint">{{}}{EMULATED}</p>', []).append(run.name)
        if run.plan.get("chosen"):
            reason = f", {run.plan['reason']}" if run.plan.get("reason") else ""
            chosen = f"<strong>{escape(str(run.plan['chosen']))}</strong>{escape(reason)}."
            texts.setdefault(f"<p>{{}}{chosen}</p>", []).append(run.name)
        for hint in run.hints:
            texts.setdefault(f'<p class="hint">{{}}{escape(hint)}</p>', []).append(run.name)
    several = len(runs) > 1
    return "".join(text.replace("{}", f"{escape(', '.join(names))}: " * several, 1) for text, names in texts.items())


def tiles(run: Run) -> str:
    """One run: the first values large, the others as a list."""
    found = [(name, value) for name, value in facts(run).items() if value]
    large, small = found[:4], found[4:]
    cards = "".join(f'<div class="tile"><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>' for k, v in large)
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in small)
    return f'<dl class="tiles">{cards}</dl><dl class="card facts">{rows}</dl>'


def compared(runs: Sequence[Run]) -> str:
    """Several runs: a column for each, with its speed relative to the first."""
    columns = [facts(run) for run in runs]
    first = throughput(runs[0])
    for run, column in zip(runs, columns, strict=True):
        if first > 0 and column["samples/s"]:
            column["samples/s"] += f" ({throughput(run) / first:.2f}x)"
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    rows = [[name, *(column[name] for column in columns)] for name in names]
    by = ["", *(f"run-{i}" for i in range(len(runs)))]
    return table(["", *(run.name for run in runs)], rows, "runs compared", "card compare", by)


def _known(values: Values) -> Values:
    return values[np.isfinite(values)]


def _rolling(run: Run) -> str:
    """The largest divergence of replicas before a re-broadcast."""
    if not run.drifts:
        return ""
    gaps = [event["gap"] for event in run.drifts if isinstance(event.get("gap"), float)]
    return f"replicas at most {max(gaps):.1e} apart" if gaps else ""


def _exchange(run: Run) -> str:
    if run.join.get("num_nodes", 1) == 1:
        return ""
    codec = run.join.get("codec", CODEC)
    return str(run.join.get("exchange", "")) + (f", {codec}" if codec != CODEC else "")


MAX_ERRORS = 10


def errors(run: Run) -> list[str]:
    """Deviations from using each sample once, as text; only of steps whose batches came from `pace.batches`.

    With an exchange that does not agree on every step, a step's event counts the samples of one node only.
    """
    local_only = says("exchange", head(str(run.join.get("exchange", "")))[0], "consensus") != "step"
    names = ("step", "epoch", "batch", "rows", "samples", "ends_epoch")
    columns = np.stack([run.steps[name] for name in names], axis=1)
    columns = columns[np.isfinite(columns[:, 2])]
    found, due = [], (int(columns[0, 1]), int(columns[0, 2])) if len(columns) else (0, 0)
    for step, epoch, batch, rows, samples, ends in columns.tolist():
        redistributed = ends and due == (epoch + 1, 0)  # the samples of a failed node, after the epoch's end
        if (epoch, batch) != due and not redistributed:
            found.append(f"step {step:.0f}: batch {batch:.0f} of epoch {epoch:.0f}, where {due[1]} of {due[0]} was due")
        if rows != samples and not local_only:
            found.append(f"step {step:.0f}: {samples:.0f} samples of a batch of {rows:.0f}")
        due = (int(epoch) + 1, 0) if ends else (int(epoch), int(batch) + 1)
        if len(found) >= MAX_ERRORS:
            break
    return found


def sample_usage(run: Run) -> str:
    """How often samples were used, in a line; empty where the event log does not contain it."""
    ends = run.steps["ends_epoch"]
    if not np.isfinite(ends).any():
        return ""
    if found := errors(run):
        return found[0]
    num_epochs = len(np.unique(run.steps["epoch"][ends == 1]))
    return f"each once in {num_epochs} whole epochs" if num_epochs else "each once so far"
