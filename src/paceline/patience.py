"""For how long those who start wait for each other, and survivors of a failure for the nodes that are missing."""

from __future__ import annotations

import os

JOIN_S = 60.0
WAIT_S = 600.0
MOST_S = 1e6  # clocks and sockets know no more


def join_s() -> float:
    """For how long others are waited for: PACELINE_JOIN_S, else JOIN_S. Raises ValueError."""
    text = os.environ.get("PACELINE_JOIN_S") or str(JOIN_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < MOST_S:
        raise ValueError(
            f"PACELINE_JOIN_S={text!r} must be a number of seconds above 0 and below {MOST_S:.0f}; mend it, or unset it"
        )
    return seconds


def wait_s() -> float:
    """For how long survivors wait for missing nodes: PACELINE_WAIT, else WAIT_S. Raises ValueError."""
    text = os.environ.get("PACELINE_WAIT") or str(WAIT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < MOST_S:
        raise ValueError(
            f"PACELINE_WAIT={text!r} must be a number of seconds from 0 and below {MOST_S:.0f}; fix it, or unset it "
            f"(--wait sets it)"
        )
    return seconds
