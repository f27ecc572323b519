"""Initialises mpi4py once per process and finalises it; adds the types and operations that MPI lacks.

A progress thread tests all pending requests in turn. MPI moves most messages only inside its own calls: without this
thread, operations started during backward would make no progress until the step waits for them.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from paceline.registry import LINK

DRAIN_S = 5.0


class Library:
    """``unclosed``: the links that were not closed normally."""

    def __init__(self) -> None:
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"a link over MPI needs mpi4py and an MPI library ({str(error).partition(chr(10))[0]}); "
                f"pip install 'paceline[mpi]', or set PACELINE_LINK={LINK}"
            ) from error
        self.mpi: Any = MPI
        self.ours = not MPI.Is_initialized()
        level = MPI.Init_thread(MPI.THREAD_MULTIPLE) if self.ours else MPI.Query_thread()
        if level != MPI.THREAD_MULTIPLE:
            raise ValueError(
                f"a link over MPI calls it from several threads and needs MPI_THREAD_MULTIPLE (level "
                f"{MPI.THREAD_MULTIPLE}), but this process has level {level}; join before the script initialises MPI, "
                f"or have it request MPI_THREAD_MULTIPLE, or set PACELINE_LINK={LINK}"
            )
        self.progress = Progress()
        self.unclosed: set[object] = set()
        self.types = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.uint8: MPI.UINT8_T}
        self.types |= {getattr(torch, f"int{bits}"): getattr(MPI, f"INT{bits}_T") for bits in (8, 16, 32, 64)}
        self.widths = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}
        self.operations: dict[tuple[str, torch.dtype | None], Any] = {("sum", None): MPI.SUM, ("max", None): MPI.MAX}
        for half in (torch.bfloat16, torch.float16):
            self.types[half] = MPI.UINT16_T
            for kind, combine in (("sum", torch.add), ("max", torch.maximum)):
                self.operations[kind, half] = MPI.Op.Create(partial(_combine, half, combine), commute=True)
        atexit.register(self.close)

    def operation(self, kind: str, dtype: torch.dtype) -> Any:
        if dtype not in self.types:
            known = ", ".join(str(known).removeprefix("torch.") for known in self.types)
            raise ValueError(f"a link over MPI: {kind} supports {known}, got {dtype}; convert the tensor")
        return self.operations.get((kind, dtype)) or self.operations[kind, None]

    def close(self) -> None:
        """MPI_Finalize waits for all ranks: it is called only where every link was closed normally."""
        if self.unclosed:
            self.progress.stop(0.0)
        elif self.progress.stop(DRAIN_S) and self.ours:
            self.mpi.Finalize()


library = cache(Library)


def _combine(dtype: torch.dtype, combine: Callable[..., Tensor], one: Any, into: Any, _: Any) -> None:
    if len(into):
        a, b = torch.frombuffer(one, dtype=dtype), torch.frombuffer(into, dtype=dtype)
        combine(a, b, out=b)


POLL_S = 2e-4  # between two rounds of tests
WAITED_POLL_S = 5e-5  # while a thread waits for a request


class Flight:
    """One operation in progress. ``buffers``: must stay in memory until it has ended."""

    def __init__(self, request: Any, buffers: Any):
        self.request, self.buffers = request, buffers
        self.ended = threading.Event()
        self.error: Exception | None = None

    def test(self) -> bool:
        try:
            if not self.request.Test():
                return False
        except Exception as error:
            self.error = error
        self.buffers = None
        self.ended.set()
        return True


class Progress:
    """Tests requests until all have ended. MPI requires that one thread alone tests a request: this one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flights: list[Flight] = []
        self._num_waiting = 0
        self._end = math.inf
        self._thread = threading.Thread(target=self._run, name="paceline progress", daemon=True)
        self._thread.start()

    def watch(self, request: Any, buffers: Any) -> Flight:
        flight = Flight(request, buffers)
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
            if ended := [flight for flight in flights if flight.test()]:
                with self._changed:
                    self._flights = [flight for flight in self._flights if flight not in ended]
            else:
                time.sleep(WAITED_POLL_S if self._num_waiting else POLL_S)

    def stop(self, drain_s: float) -> bool:
        """Waits up to ``drain_s`` for the operations in progress; whether all of them ended."""
        with self._changed:
            self._end = time.monotonic() + drain_s
            self._changed.notify()
        self._thread.join()
        return not self._flights
