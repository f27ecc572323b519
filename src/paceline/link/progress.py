"""Operations that advance only while somebody asks for them: a thread asks for all of them in turn.

MPI moves most messages inside its own calls. Without this thread, what was started during backward would
travel only once the step waits for it.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

PAUSE_S = 2e-4  # between two rounds of asking
WAITED_PAUSE_S = 5e-5  # while somebody waits


class Flight:
    """One operation under way. ``kept``: what must stay in memory until it has ended."""

    def __init__(self, request: Any, kept: Any):
        self.request, self.kept = request, kept
        self.ended = threading.Event()
        self.error: Exception | None = None

    def ask(self) -> bool:
        try:
            if not self.request.Test():
                return False
        except Exception as error:
            self.error = error
        self.kept = None
        self.ended.set()
        return True


class Progress:
    """Asks until every flight has ended. A flight is asked for by this thread alone, as MPI wants it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flights: list[Flight] = []
        self._num_waiting = 0
        self._end = math.inf
        self._thread = threading.Thread(target=self._run, name="paceline progress", daemon=True)
        self._thread.start()

    def watch(self, request: Any, kept: Any) -> Flight:
        flight = Flight(request, kept)
        with self._changed:
            self._flights.append(flight)
            self._changed.notify()
        return flight

    def wait(self, flight: Flight, limit_s: float) -> bool:
        """Whether the flight has ended within ``limit_s``."""
        with self._changed:
            self._num_waiting += 1
        try:
            return flight.ended.wait(limit_s)
        finally:
            with self._changed:
                self._num_waiting -= 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._flights or self._end < math.inf)
                flights = list(self._flights)
            if not flights or time.monotonic() > self._end:
                return
            if ended := [flight for flight in flights if flight.ask()]:
                with self._changed:
                    self._flights = [flight for flight in self._flights if flight not in ended]
            else:
                time.sleep(WAITED_PAUSE_S if self._num_waiting else PAUSE_S)

    def stop(self, drain_s: float) -> bool:
        """Lets what is under way end, for ``drain_s``; whether all of it did."""
        with self._changed:
            self._end = time.monotonic() + drain_s
            self._changed.notify()
        self._thread.join()
        return not self._flights
