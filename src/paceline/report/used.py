"""Was every sample of an epoch used exactly once? A record says so, whatever was lost, joined, done again or resumed.

Each step's event has the epoch, the place of its batch there, the batch's rows, and how many samples went into the
agreed gradient. Who computes which of a batch's rows follows from seats that partition it.
"""

from __future__ import annotations

import numpy as np

from paceline.report.run import Run

MOST_TOLD = 10


def faults(run: Run) -> list[str]:
    """What speaks against it, in words; nothing of steps whose batches did not come from `pace.batches`.

    A step on which all do not agree says what one node has used.
    """
    alone = str(run.join.get("exchange", "")).startswith("periodic")
    names = ("step", "epoch", "batch", "rows", "samples", "ends_epoch")
    columns = np.stack([run.steps[name] for name in names], axis=1)
    columns = columns[np.isfinite(columns[:, 2])]
    found, due = [], (int(columns[0, 1]), int(columns[0, 2])) if len(columns) else (0, 0)
    for step, epoch, batch, rows, samples, ends in columns.tolist():
        if (epoch, batch) != due:
            found.append(f"step {step:.0f}: batch {batch:.0f} of epoch {epoch:.0f}, where {due[1]} of {due[0]} was due")
        if rows != samples and not alone:
            found.append(f"step {step:.0f}: {samples:.0f} samples of a batch of {rows:.0f}")
        due = (int(epoch) + 1, 0) if ends else (int(epoch), int(batch) + 1)
        if len(found) >= MOST_TOLD:
            break
    return found


def told(run: Run) -> str:
    """In a line; empty where the record does not say."""
    ends = run.steps["ends_epoch"]
    if not np.isfinite(ends).any():
        return ""
    if found := faults(run):
        return found[0]
    return f"each once in {np.nansum(ends):.0f} whole epochs" if np.nansum(ends) else "each once so far"
