"""What some processes do while all others wait, and what went wrong there, told everywhere. ``pace`` is `pace.Pace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline.elastic.claim import CheckpointError

DONE = b"done"


def alone(pace: Any, chosen: Callable[[], bool], work: Callable[[], Any]) -> Any:
    """``work`` in the chosen processes while the others wait. An error there is raised everywhere.

    Where all who were chosen are lost in doing so, those do it who are chosen then.
    """
    while True:
        before, result, error, mine = pace.world, None, None, b""
        if chosen():
            mine = DONE
            try:
                result = work()
            except Exception as caught:
                error, refused = caught, isinstance(caught, CheckpointError)
                mine = json.dumps([refused, str(error) if refused else repr(error)]).encode()
        everyone = pace.exchange.gather(mine)
        if any(everyone) or pace.world is before:
            break
    if error:
        raise error
    for words in everyone:
        if words in (b"", DONE):
            continue
        refused, text = json.loads(words)
        other: Exception = CheckpointError(text) if refused else RuntimeError(f"another process failed: {text}")
        other.told = True  # type: ignore[attr-defined]
        raise other
    return result
