"""A timeline in the format of Chrome's tracing, which ui.perfetto.dev and chrome://tracing open.

*Source*: Trace Event Format: complete events ("X") on tracks (a process and a thread), and metadata ("M") naming them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Sequence[Any]  # name, begin and end in seconds, and what else is to be known of it, a mapping


def document(processes: Iterable[tuple[int, str, Mapping[str, Sequence[Row]]]], **about: Any) -> dict[str, Any]:
    """``processes``: for each its node, what it is called, and its tracks by name, in the order to be shown in.

    *Laws*: a track's events nest or follow one another; times are whole nanoseconds, so none overlap by rounding.
    """
    events: list[dict[str, Any]] = []
    used: dict[int, int] = {}
    for node, name, tracks in processes:
        if node not in used:
            events.append(_named("process_name", node, 0, name=f"node {node}"))
        for track, rows in tracks.items():
            number = used[node] = used.get(node, 0) + 1
            events.append(_named("thread_name", node, number, name=f"{name}: {track}" if name else track))
            events.append(_named("thread_sort_index", node, number, sort_index=number))
            for what, begin_s, end_s, known in rows:
                begin, end = round(begin_s * 1e9), round(end_s * 1e9)
                events.append(
                    {
                        **{"ph": "X", "name": what, "cat": track, "pid": node, "tid": number},
                        **{"ts": begin / 1000, "dur": (end - begin) / 1000, "args": dict(known)},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(kind: str, node: int, number: int, **what: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": node, "tid": number, "args": what}


def queued(rows: Iterable[Row]) -> list[Row]:
    """What went over a wire that takes one thing after another: each begins when the one before has arrived."""
    found: list[Row] = []
    free_s = float("-inf")
    for what, begin_s, end_s, known in sorted(rows, key=lambda row: (row[1], row[2])):
        start_s = max(begin_s, free_s)
        free_s = max(start_s, end_s)
        found.append((what, start_s, free_s, {**known, "waited_ms": round(1000 * (start_s - begin_s), 3)}))
    return found
