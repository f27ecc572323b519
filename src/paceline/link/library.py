"""mpi4py, begun once per process and ended in peace; with the types and operations that MPI has not."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from paceline.link.progress import Progress

DRAIN_S = 5.0


class Library:
    """``unclosed``: the links that have not left in peace."""

    def __init__(self) -> None:
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"link 'mpi' needs mpi4py and an MPI library ({str(error).partition(chr(10))[0]}); "
                f"pip install 'paceline[mpi]', or set PACELINE_LINK=torch"
            ) from error
        self.mpi: Any = MPI
        self.ours = not MPI.Is_initialized()
        level = MPI.Init_thread(MPI.THREAD_MULTIPLE) if self.ours else MPI.Query_thread()
        if level != MPI.THREAD_MULTIPLE:
            raise ValueError(
                f"link 'mpi' calls MPI from several threads and needs MPI_THREAD_MULTIPLE (level "
                f"{MPI.THREAD_MULTIPLE}), but this process has level {level}; join before the script initialises MPI, "
                f"or have it ask for MPI_THREAD_MULTIPLE, or set PACELINE_LINK=torch"
            )
        self.progress = Progress()
        self.unclosed: set[object] = set()
        self.types = {
            torch.float32: MPI.FLOAT,
            torch.float64: MPI.DOUBLE,
            torch.uint8: MPI.UINT8_T,
            torch.int8: MPI.INT8_T,
            torch.int16: MPI.INT16_T,
            torch.int32: MPI.INT32_T,
            torch.int64: MPI.INT64_T,
        }
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
            raise ValueError(f"link 'mpi': {kind} is made in {known}, got {dtype}; convert the tensor")
        return self.operations.get((kind, dtype)) or self.operations[kind, None]

    def close(self) -> None:
        """Finalizing waits for all: only those who have left everyone in peace may."""
        if self.unclosed:
            self.progress.stop(0.0)
        elif self.progress.stop(DRAIN_S) and self.ours:
            self.mpi.Finalize()


library = cache(Library)


def _combine(dtype: torch.dtype, combine: Callable[..., Tensor], one: Any, into: Any, _: Any) -> None:
    if len(into):
        a, b = torch.frombuffer(one, dtype=dtype), torch.frombuffer(into, dtype=dtype)
        combine(a, b, out=b)
