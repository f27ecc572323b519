"""Saves a run's checkpoints, synchronously or while training continues, and resumes from them.

    save(wait=False)    between two steps: the last one is waited for, everything copied, a thread begins to write
    step, step, ...     meanwhile; if writing fails, the next vote tells everyone, and all raise the same error
    save, restore, end  wait for the thread, and tell what it has not told yet

Rank 0 writes. Nobody else needs to know whether it is whole before `restore`, where each looks for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint import checkpoint, run_state
from paceline.checkpoint.agree import agreed
from paceline.checkpoint.async_writer import StagingBuffers, Writer
from paceline.checkpoint.transfer import CheckpointTransfer, Others
from paceline.errors import CheckpointError
from paceline.exchange.flow.control import alone
from paceline.report.log import log
from paceline.step import buffer_broadcast
from paceline.step.average import average
from paceline.step.run_state import RunState

FAILED = 255  # in a vote's ``stop_signal``, above any signal: what was being written could not be


class Saver:
    """*Cost*: host memory for one more copy of everything, from the first ``save(wait=False)`` on, in one process."""

    def __init__(self, run: RunState, keep: int):
        """``keep``: how many stay."""
        self.run, self.keep = run, keep
        self._writer, self._copies = Writer(self._unwritten), StagingBuffers()
        self._damaged: frozenset[str] = frozenset()

    def save(self, folder: Path, wait: bool) -> Path | None:
        """Every process must call it. The path, in the leader. Raises CheckpointError, also of the one before."""
        run, begin = self.run, time.perf_counter()
        run.settle()
        average(run)
        buffer_broadcast.broadcast_buffers(run.job.model, run.engine, run.control)
        state = run_state.state(run)
        return alone(run.control, lambda: run.leader, lambda: self._put(folder, state, wait, begin))

    def _put(self, folder: Path, state: Any, wait: bool, begin: float) -> Path:
        run, step = self.run, self.run.num_steps
        self.finish()
        draft, held_s = checkpoint.Draft(step, run.engine.state(), state), 0.0

        def write() -> Path:
            start = time.perf_counter()
            path = draft.write(folder, self.keep, self._damaged)
            end = time.perf_counter()
            self._damaged -= {path.name}
            times = {"seconds": end - begin if wait else held_s, "write_seconds": end - start}
            run.record.write("checkpoint", step=step, path=str(path), **times)
            return path

        if wait:
            return write()
        draft.freeze(self._copies, fixed=run_state.MEMORIES)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        held_s = time.perf_counter() - begin
        self._writer.begin(f"the checkpoint of step {step} in {folder}", draft.num_bytes, write)
        return draft.path(folder)

    def _unwritten(self) -> None:
        self.run.stop_signal = self.run.stop_signal or FAILED  # a signal ends the run, which tells this, too

    def tell(self) -> None:
        """After a vote of `FAILED`: every process raises what the writer met."""
        alone(self.run.control, lambda: self.run.leader, self.finish)

    def finish(self) -> None:
        """Nothing is being written any more. Raises what went wrong, once."""
        try:
            self._writer.finish()
        finally:
            if self.run.stop_signal == FAILED:
                self.run.stop_signal = 0

    def end(self, wait: bool = True) -> Exception | None:
        """What the writer met, where it was not told yet."""
        atexit.unregister(self._at_exit)
        try:
            if wait:
                self.finish()
        except Exception as error:
            return error
        return None

    def _at_exit(self) -> None:
        """The script has ended without `Pace.close`."""
        if unwritten := self.end():
            log.error(str(unwritten))

    def restore(self, folder: Path, fits: Callable[[Any], bool] = bool) -> checkpoint.Checkpoint | None:
        """What was gone on from. Every process must call it. ``fits``: whether a checkpoint of this state is taken."""
        run, one = self.run, checkpoint.NAME.fullmatch(folder.name) is not None
        run.settle()
        self.tell()

        def find(most: int | None) -> checkpoint.Checkpoint | None:
            if not one:
                return checkpoint.read_newest(folder, most)
            seen = most is None and (run.leader or folder.is_dir())
            return checkpoint.read(folder) if seen else None

        sends = False
        while True:
            world, team = run.world, run.control.generation  # as they are before all agree
            choice = agreed(find, run.control.all_gather, folder)
            if choice is None and sends:
                raise CheckpointError(
                    f"every node that has the checkpoint in {folder} failed while it sent it; start there"
                )
            if choice is None:
                return None
            kept, sends = choice.kept, bool(choice.lacking)
            if not sends:
                break
            nodes = [node for node, size in enumerate(world.sizes) for _ in range(size)]
            with contextlib.suppress(Others):
                kept = CheckpointTransfer(world.rank, nodes, run.control.all_gather, team).send(kept, choice.lacking)
                to = ", ".join(map(str, choice.lacking))
                self._say(logging.INFO, f"sent {kept.path} to ranks {to}, which do not see it")
                break
        assert kept
        if not fits(kept.state):
            return None
        run_state.restore(run, kept)
        if not one:  # those were passed over
            newer = (path for path in checkpoint.all_of(folder) if checkpoint.step_of(path) > kept.step)
            self._damaged = frozenset(path.name for path in newer)
        if choice.passed_over:
            self._say(logging.WARNING, f"passed over {'; '.join(choice.passed_over)}; restored {kept.path}")
        run.record.write("restore", step=kept.step, path=str(kept.path), damaged=list(choice.passed_over))
        return kept

    def _say(self, level: int, what: str) -> None:
        if self.run.leader:
            log.log(level, what)
