"""Synchronisation of state that forward changes, among several processes: broadcast, compared, or reported.

    every vote           how many tensors each process has found that forward changes, and the first rank with samples
    when more is found   all processes compare their values: one log line, or an error with batch_norm="sync"
    some had no samples  they receive the values of the first rank that had some: a moving average has changed there
    buffers="broadcast"  all receive the values of that rank, as in DistributedDataParallel

*Cost*: nothing where nothing is found; else the bytes of these tensors, to every process, in those steps.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.contract import GlobalBatch
from paceline.engine.compute.forward_state import Moving
from paceline.messages import Decision, StepOutcome, Vote
from paceline.report.log import log
from paceline.report.step_observer import StepObserver
from paceline.step.run_state import RunState
from paceline.transport import pack_frames, unpack_frames

PRESENT = b"1"
STATISTICS = ("mean", "var", "std")


class ForwardStateSync(StepObserver):
    """``broadcast``: all take the first rank's values. ``answered``: with batch_norm="sync", the global statistics.
    ``passes``: forward passes of one process in a step."""

    key = "moved"

    def __init__(
        self,
        run: RunState,
        moving: Moving,
        broadcast: bool = False,
        answered: Callable[[], set[int]] | None = None,
        passes: int = 1,
    ):
        self.run, self.control, self.moving = run, run.control, moving
        self.broadcast, self.answered, self.passes = broadcast, answered, passes
        self.moving.always = broadcast
        self.num_compared = 0  # tensors that all processes have compared
        self._found, self._names = (0, 0), set[str]()

    def reads(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        if own:  # the engine does not run its forward
            self.moving.begin(self.run.num_steps)
        return batch

    def votes(self, vote: Vote) -> None:
        self._rank, self._had_samples = self.run.world.rank, vote.weight > 0
        vote.idle, vote.source = not self._had_samples, self._rank if self._had_samples else Vote.NO_SOURCE
        vote.moves = len(self._to_sync())

    def updated(self, outcome: StepOutcome) -> None:
        """Raises ValueError, in all processes, and LinkError."""
        if outcome.decision is Decision.COMMIT and outcome.vote.weight:
            with self.run.activity.at("comparing what forward changes"):
                self._synchronise(outcome.vote)

    def _synchronise(self, vote: Vote) -> None:
        if vote.moves > self.num_compared:
            self.num_compared = vote.moves
            self._compare()
        if vote.moves and (self.broadcast or vote.idle):
            self._share(vote.source == self._rank, vote.idle)

    def _to_sync(self) -> set[str]:
        """Names of the tensors that change, without those that batch norm synchronises itself."""
        found = len(self.moving.found), len(self.answered()) if self.answered else 0
        if found != self._found:
            own = self._own_statistics()
            norms = set() if self.broadcast and not self.answered else self.moving.norms
            self._found, self._names = found, (self.moving.found - norms) | set(own)
        return self._names

    def _own_statistics(self) -> list[str]:
        """With batch_norm="sync": statistics that forward computes from this process's samples alone."""
        if not self.answered or not self.moving.found:
            return []
        tensors, answered = self.moving.tensors(), self.answered()
        named = [name for name in self.moving.found if any(each in name.rpartition(".")[2] for each in STATISTICS)]
        return sorted(name for name in named if name in tensors and id(tensors[name]) not in answered)

    def state(self) -> dict[str, Any]:
        """For a joining node: what it has not seen, and the values that may have changed since they were sent."""
        moved = {name: each for name, each in self.moving.frozen.items() if name in self.moving.found}
        return {"told": self.num_compared, "found": sorted(self.moving.found), "frozen": moved}

    @torch.no_grad()
    def load(self, state: Any) -> None:
        self.num_compared = state["told"]
        self.moving.found |= set(state["found"])
        for name, its in state["frozen"].items():
            self.moving.frozen[name].copy_(its)

    def _compare(self) -> None:
        tensors, found = self.moving.tensors(), self.moving.others
        sums = {name: _checksum(tensors[name]) for name in found if name in tensors}
        mine = {"own": self._own_statistics(), "differ": sorted(self.moving.differ & found), "sums": sums}
        reports = [json.loads(text) for text in self.control.all_gather(json.dumps(mine).encode()) if text]
        if own := sorted({name for one in reports for name in one["own"]}):
            error = ValueError(
                f"batch_norm='sync': forward keeps {_listed(own)} from this process's samples alone, by other means "
                f"than torch.nn.functional.batch_norm, so they are not global statistics; use torch.nn.BatchNorm "
                f"or call that function in the layer, or give batch_norm='local'"
            )
            error.reported = not self.run.leader  # type: ignore[attr-defined]
            raise error
        names = sorted({name for one in reports for name in one["sums"]})
        values = {name: {one["sums"][name] for one in reports if name in one["sums"]} for name in names}
        differ = sorted({name for one in reports for name in one["differ"]} | {n for n in names if len(values[n]) > 1})
        buffers = [name for name in names if name not in self.moving.frozen]
        if differ and not self.broadcast:
            self._hint(
                f"forward changes {_listed(differ)} based on the samples of each process or replica; each keeps its "
                f"own, and the first one's are saved; join(buffers='broadcast') copies these to all processes after "
                f"each step, as DistributedDataParallel does"
            )
        elif self.passes > 1 and buffers:
            self._hint(
                f"forward changes {_listed(buffers)} in each micro-batch, so {self.passes} times in a step; with "
                f"accumulate=1 it changes them once"
            )

    def _hint(self, text: str) -> None:
        if self.run.leader:
            log.warning(text)
            self.run.record.write("hint", text=text)

    def _share(self, mine: bool, idle: bool) -> None:
        """The first rank's values, to all or to those without samples; the next rank's if the first one fails."""
        while True:
            packed = self._pack(idle) if mine else PRESENT if self._had_samples else b""
            gathered = self.control.all_gather(packed)
            if sent := next((each for each in gathered if len(each) > 1), b""):
                if not mine:
                    self._take(sent)
                return
            having = [rank for rank, each in enumerate(gathered) if each == PRESENT]
            if not having:
                return
            mine = having[0] == self.run.world.rank

    def _pack(self, idle: bool) -> bytes:
        """A table of names, shapes, types, and whether all processes take them; then the bytes of each."""
        tensors, table, parts = self.moving.tensors(), [], []
        for name in sorted(self._to_sync() & tensors.keys()):
            each = tensors[name]
            for_all = self.broadcast and (name not in self.moving.frozen or name in self.moving.norms)
            if each.layout == torch.strided and (for_all or idle):
                table.append([name, list(each.shape), str(each.dtype).rpartition(".")[2], for_all])
                parts.append(_bytes(each).numpy().tobytes())
        return pack_frames([json.dumps(table).encode(), *parts])

    @torch.no_grad()
    def _take(self, sent: bytes) -> None:
        table, *parts = unpack_frames(sent)
        tensors = self.moving.tensors()
        for (name, shape, kind, for_all), part in zip(json.loads(table), parts, strict=True):
            self.moving.found.add(name)
            if self._had_samples and not for_all:
                continue
            new = torch.frombuffer(bytearray(part), dtype=getattr(torch, kind)) if part else torch.zeros(0)
            self._put(name, tensors.get(name), new.view(shape))

    def _put(self, name: str, old: Tensor | None, new: Tensor) -> None:
        if old is not None and old.shape == new.shape and old.dtype == new.dtype:
            old.copy_(new)
            return
        prefix, _, last = name.rpartition(".")
        device = next(self.moving.model.parameters()).device if old is None else old.device
        self.moving.model.get_submodule(prefix)._buffers[last] = new.to(device)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


def _bytes(each: Tensor) -> Tensor:
    return each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _checksum(each: Tensor) -> int:
    return zlib.crc32(_bytes(each).numpy().data) if each.layout == torch.strided else 0
