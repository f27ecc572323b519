"""Fault-tolerant control: a collective that a failure interrupts is completed or repeated by the survivors.

Operations among all members are counted: votes, sums of a few numbers, messages, broadcasts. When one breaks, the
survivors rendezvous over a new link and compare how many operations each has completed. These numbers differ by one at
most: no member ends an operation that another has not entered.

When a node dies, in order:

    failure_detector, the link   its operations raise LinkError on the others
    step/step                    rolls back what forward changed, and calls `recover` here (a vote: `commit` does)
    membership, reconfigure      the survivors rendezvous; `quorum` decides who may continue
    view_change, assignment      new ranks, and the lost node's samples go to the survivors
    admission, below_minimum     with fewer nodes than the minimum: waits for joining nodes
    step/step                    computes the step again

A collective is completed or repeated:

    it completed for some       they send the others its result, and these continue as if nothing had happened: a member
                                that takes part in a vote has all buckets of the step, so a vote alone ends it
    it completed for no member  a step is RETRY, with samples assigned anew; numbers and messages are gathered again
                                from the survivors

A step ends here when every member is known to have the vote, which takes another message from each to each. Otherwise a
member that is cut off in that moment would apply what the others, which continue without it, compute again.

*Invariants*: no member returns to a state before a step that another has applied, whether that one continues or not; a
failure costs at most one step; replicas stay bit-equal.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from paceline import transport
from paceline.errors import LinkError
from paceline.exchange.flow.control import Control, counted
from paceline.messages import Decision, StepOutcome, Tally, Target, Vote
from paceline.transport import Joiner, Link, ViewChange

NUMBERS = struct.Struct("<qq")
NEW = -1  # the operation number of a member that has taken part in no operation yet
Result = TypeVar("Result")


class FaultTolerantControl(transport.Control):
    """``control`` of members that may change. ``on_link``: each is called with every new link, on every node alike."""

    tolerates_loss = True

    def __init__(self, control: Control, on_link: Sequence[Callable[[Link], None]]):
        self.control, self.members, self.on_link = control, control.members, on_link
        self.operation_number, self.last_result = 0, b""  # operations completed here, and the result of the last one
        self.num_view_changes = 0
        self.rows: Callable[[], int] = lambda: 1  # of the global batch, assigned to this node at present

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.control.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.control.size

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self.control.generation

    # operations among all

    def commit(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        return self._vote(vote, finish) if self.control.votes else self.control.commit(vote, finish)

    def transact(self, compute: Callable[[], Sequence[Target] | None]) -> Sequence[Target] | None:
        while True:
            try:
                result = compute()
            except LinkError as error:
                self.recover(error)
            else:
                if result is None or self._vote(Vote(), _commit_of).decision is Decision.COMMIT:
                    return result

    def _vote(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        def ended(votes: bytes) -> StepOutcome:
            return finish(counted(transport.unpack_frames(votes)))

        try:
            outcome = self.control.vote(vote, finish)
        except LinkError as error:
            return self._rejoin(str(error), ended) or self._retry()
        if self.size > 1:
            self._end(transport.pack_frames(self.control.ballots))
            self._all_know()
        else:
            self._end(b"")
        return outcome

    def _all_know(self) -> None:
        """Where it breaks, the survivors receive the vote from this process, or it may not continue."""
        try:
            self._barrier()
        except LinkError as error:
            self._rejoin(str(error), _impossible)

    def _barrier(self) -> None:
        zero = torch.zeros(1, dtype=torch.uint8)
        self.members.link.all_gather(zero, "confirming the vote", even=True).wait()

    def recover(self, error: LinkError) -> StepOutcome:
        return self._rejoin(str(error), _impossible) or self._retry()

    def _retry(self) -> StepOutcome:
        self.num_view_changes += 1
        return StepOutcome(Decision.RETRY)

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        shape = f"<{len(values)}d"
        return list(struct.unpack(shape, self._repeat(lambda: struct.pack(shape, *self.control.all_reduce(values)))))

    def all_gather(self, *parts: bytes) -> list[bytes]:
        return transport.unpack_frames(self._repeat(lambda: transport.pack_frames(self.control.all_gather(*parts))))

    def _repeat(self, operation: Callable[[], bytes]) -> bytes:
        while True:
            try:
                result = operation()
            except LinkError as error:
                if (found := self._rejoin(str(error), bytes)) is not None:
                    return found
                self.num_view_changes += 1
            else:
                self._end(result)
                return result

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """A process that completes it knows that all have the tensors; where a node fails meanwhile, all begin again.
        Rank 0 has sent before the others have received: without a message from each it would be an operation ahead."""

        def once() -> bytes:
            self.control.broadcast(tensors)
            self.control.all_gather(b"")
            return b""

        self._repeat(once)

    def _end(self, result: bytes) -> None:
        self.operation_number, self.last_result = self.operation_number + 1, result

    # after a failure

    def admit(self, joiners: Sequence[Joiner] = ()) -> None:
        self._rejoin("rendezvous to admit a joining node", _impossible, joiners)

    def _rejoin(self, why: str, finish: Callable[[bytes], Result], joiners: Sequence[Joiner] = ()) -> Result | None:
        """What ``finish`` makes of the broken operation's result, where it completed for others.

        Raises LinkError where this process cannot resume.
        """
        begin, before = time.perf_counter(), list(self.members.link.hosts)
        present: list[int | Joiner] = list(range(len(before)))
        found: Result | None = None
        while True:
            view = self.members.reconfigure(joiners)
            present, joiners = [*(present[rank] for rank in view.previous), *view.joined], ()
            try:
                missed, rows, some_missed = self._compare()
                if missed is not None:
                    self._end(missed)
                    found = finish(missed)
                if some_missed:
                    self._barrier()
                self._reopen()
            except LinkError as another:  # another failure during the rendezvous: once more
                why = str(another)
                continue
            break
        previous = tuple(each for each in present if isinstance(each, int))
        joined = tuple(each for each in present if isinstance(each, Joiner))
        failed = tuple(host for rank, host in enumerate(before) if rank not in previous)
        seconds = time.perf_counter() - begin
        if self.on_view_change:
            change = ViewChange(self.generation, previous, rows[: len(previous)], failed, seconds, why, joined)
            self.on_view_change(change)
        return found

    def _reopen(self) -> None:
        for each in self.on_link:
            each(self.members.link)

    def _compare(self) -> tuple[bytes | None, tuple[int, ...], bool]:
        """(the result that others have and this process has not, each one's rows, whether any member lacks it)."""
        reports = self._exchange(self.operation_number, self.rows())
        numbers, results, rows = zip(*reports, strict=True)
        if max(numbers) > self.operation_number + 1:
            raise AssertionError(f"others are {max(numbers) - self.operation_number} operations ahead")
        return (
            results[numbers.index(max(numbers))] if max(numbers) > self.operation_number else None,
            rows,
            _some_missed(reports),
        )

    def _exchange(self, number: int, rows: int) -> list[tuple[int, bytes, int]]:
        """Each one's (operations completed, result of the last one, rows)."""
        mine = transport.pack_frames([NUMBERS.pack(number, rows), self.last_result])
        packed = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        parts = self.members.link.all_gather(packed, "comparing operation numbers").wait()
        reports = [transport.unpack_frames(bytes(part.numpy())) for part in parts]
        numbers = [NUMBERS.unpack(head) for head, _ in reports]
        return [(number, result, rows) for (number, rows), (_, result) in zip(numbers, reports, strict=True)]

    def enter(self) -> None:
        """Takes the operation number of the others, which do not need the results of this process."""
        self.members.reconfigure()
        reports = self._exchange(NEW, 0)
        self.operation_number, self.last_result, _ = max(reports)
        if _some_missed(reports):
            self._barrier()
        self._reopen()


def _some_missed(reports: Sequence[tuple[int, bytes, int]]) -> bool:
    """Whether any member lacks the last operation that others have completed."""
    numbers = [number for number, _, _ in reports]
    return any(NEW < number < max(numbers) for number in numbers)


def _commit_of(tally: Tally) -> StepOutcome:
    return StepOutcome(Decision.COMMIT, vote=tally.vote)


def _impossible(result: bytes) -> NoReturn:
    raise AssertionError("a vote completed without this process")
