"""Saves a run's checkpoints, synchronously or while training continues, and resumes from them.

    save(wait=False)    between two steps: completes the last step, copies all state, starts the writer thread
    step, step, ...     training continues; if writing fails, the next vote reports it, and all raise the same error
    save, restore, end  wait for the thread, and raise its error if that was not raised yet

Rank 0 writes. The other processes check the checkpoint themselves, in `restore`.
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
from paceline.checkpoint.agree import agree
from paceline.checkpoint.async_writer import StagingBuffers, Writer
from paceline.checkpoint.transfer import CheckpointTransfer, MembersChanged
from paceline.errors import CheckpointError
from paceline.exchange.flow.control import alone
from paceline.report.log import log
from paceline.step import buffer_broadcast
from paceline.step.average import average
from paceline.step.run_state import RunState

FAILED = 255  # in a vote's ``stop_signal``, above any signal number: the writer thread failed


class Saver:
    """*Cost*: host memory for one more copy of all state, in rank 0, from the first ``save(wait=False)`` on."""

    def __init__(self, run: RunState, keep: int):
        """``keep``: how many checkpoints stay."""
        self.run, self.keep = run, keep
        self._writer, self._copies = Writer(self._note_failure), StagingBuffers()
        self._damaged: frozenset[str] = frozenset()

    def save(self, folder: Path, wait: bool) -> Path | None:
        """Collective. Returns the path, in the leader. Raises CheckpointError, also for the previous checkpoint."""
        run, begin = self.run, time.perf_counter()
        run.settle()
        average(run, state=True)
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
        draft.freeze(self._copies, fixed=run_state.CONSTANT_PATH)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        held_s = time.perf_counter() - begin
        self._writer.begin(f"the checkpoint of step {step} in {folder}", draft.num_bytes, write)
        return draft.path(folder)

    def _note_failure(self) -> None:
        self.run.stop_signal = self.run.stop_signal or FAILED  # a signal ends the run, which raises this error, too

    def raise_failure(self) -> None:
        """After a vote of `FAILED`: every process raises the writer's error."""
        alone(self.run.control, lambda: self.run.leader, self.finish)

    def finish(self) -> None:
        """Waits for the writer thread. Raises its error, once."""
        try:
            self._writer.finish()
        finally:
            if self.run.stop_signal == FAILED:
                self.run.stop_signal = 0

    def end(self, wait: bool = True) -> Exception | None:
        """The writer's error, if it was not raised yet."""
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
        """Collective. Returns the checkpoint that was restored. ``fits``: whether to restore one with this state."""
        run, single = self.run, checkpoint.NAME.fullmatch(folder.name) is not None
        run.settle()
        self.raise_failure()

        def find(max_step: int | None) -> checkpoint.Checkpoint | None:
            if not single:
                return checkpoint.read_newest(folder, max_step)
            readable = max_step is None and (run.leader or folder.is_dir())
            return checkpoint.read(folder) if readable else None

        transferring = False
        while True:
            world, generation = run.world, run.control.generation  # read before the agreement
            choice = agree(find, run.control.all_gather, folder)
            if choice is None and transferring:
                raise CheckpointError(
                    f"every node with the checkpoint in {folder} failed during the transfer; start the run there"
                )
            if choice is None:
                return None
            chosen, transferring = choice.found, bool(choice.lacking)
            if not transferring:
                break
            nodes = [node for node, size in enumerate(world.sizes) for _ in range(size)]
            with contextlib.suppress(MembersChanged):
                transfer = CheckpointTransfer(world.rank, nodes, run.control.all_gather, generation)
                chosen = transfer.send(chosen, choice.lacking)
                ranks = ", ".join(map(str, choice.lacking))
                self._log(logging.INFO, f"sent {chosen.path} to ranks {ranks}, which do not see it")
                break
        assert chosen
        if not fits(chosen.state):
            return None
        run_state.restore(run, chosen)
        if not single:  # newer ones were skipped as damaged
            newer = (path for path in checkpoint.all_of(folder) if checkpoint.step_of(path) > chosen.step)
            self._damaged = frozenset(path.name for path in newer)
        if choice.skipped:
            self._log(logging.WARNING, f"skipped {'; '.join(choice.skipped)}; restored {chosen.path}")
        run.record.write("restore", step=chosen.step, path=str(chosen.path), damaged=list(choice.skipped))
        return chosen

    def _log(self, level: int, text: str) -> None:
        if self.run.leader:
            log.log(level, text)
