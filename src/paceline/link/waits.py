"""Words for a wait that lasts too long: who waits, where, for what, who is not there, and what that one is at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SILENT_S = 2.5  # without a sign of life, which comes every second
UNANSWERED = "its process does not answer, so its stack cannot be had: stopped, swapped out, or starved"
SAME_CALLS = "makes the same calls in every process (count by pace.num_steps, which a late node knows, too)"

Told = Mapping[int, Mapping[str, Any]]  # by rank: what it said of itself, and for how long it has been silent


def missing(everyone: Told, rank: int) -> list[int]:
    """Who is not waiting for the others as ``rank`` is."""
    return [other for other, told in everyone.items() if other != rank and not (told["waits"] and answers(told))]


def answers(told: Mapping[str, Any]) -> bool:
    return float(told.get("silent_s", 0.0)) < SILENT_S


def state(rank: int, told: Mapping[str, Any]) -> str:
    """One of them, in a line."""
    who = f"rank {rank} on {told['host']}"
    if not answers(told):
        return f"{who}, silent for {told['silent_s']:.0f} s (at step {told['step']} before: {told['doing']})"
    took = f"; a step took {told['step_s']:.3g} s" if told["step_s"] else ""
    return f"{who}, at step {told['step']}: {told['doing']}, for {told['for_s']:.1f} s{took}"


def line(everyone: Told, rank: int, size: int, absent: Sequence[int]) -> str:
    """What ``rank`` has waited for, and for whom."""
    mine = everyone[rank]
    said = (
        f"rank {rank} of {size} on {mine['host']} at step {mine['step']} has waited {mine['for_s']:.0f} s for others "
        f"in {mine['doing']}"
    )
    if absent:
        return f"{said}; not there: {', and '.join(state(other, everyone[other]) for other in absent)}"
    others = ", ".join(state(other, told) for other, told in everyone.items() if other != rank)
    places = {(told["step"], told["doing"]) for told in everyone.values()}
    script = f", or, as they are not in the same place, at whether the script {SAME_CALLS}" if len(places) > 1 else ""
    return f"{said}; all others wait as well, so look at the network between them{script}: {others}"


def stacks(everyone: Told, absent: Sequence[int], found: Mapping[int, str]) -> list[str]:
    """Where each of those who are not there stands in its code."""
    lines = []
    for rank in absent:
        who = f"rank {rank} on {everyone[rank]['host']}"
        stack = found.get(rank, "").rstrip()
        lines += [f"{who} stands here:", *stack.splitlines()] if stack else [f"{who}: {UNANSWERED}"]
    return lines
