"""Ranks as threads: run(3, work) calls work(link) once per rank and returns the results in rank order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import LinkError
from paceline.link import memory

DEADLINE_S = 90.0


def run(size: int, work: Callable[[memory.Link], Any], links: Sequence[memory.Link] | None = None) -> list[Any]:
    """Raises the first error that is not merely another rank's loss of the one that failed."""
    links = links or memory.world(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(link: memory.Link) -> None:
        try:
            results[link.rank] = work(link)
        except BaseException as error:
            errors.append(error)
            link.hub.kill(link.rank)

    threads = [threading.Thread(target=one, args=(link,), daemon=True) for link in links]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise next((e for e in errors if not isinstance(e, LinkError)), errors[0])
    assert not any(t.is_alive() for t in threads), f"a rank was still running after {DEADLINE_S:.0f} s"
    return results
