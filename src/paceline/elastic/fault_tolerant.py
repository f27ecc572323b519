"""Fault-tolerant control: a collective that a failure interrupts is completed or repeated by the survivors.

Operations among all are counted: votes, sums of a few numbers, words, spreads. When one breaks, those who are left meet
over a new link and tell each other how far they have come, which differs by one at most: nobody ends an operation that
another has not entered. Who does what, in order: `failure_detector`, the link (LinkError), `membership`, `reconfigure`
by the rule of `quorum`, `roles`.

    it came through for some    they tell the others its result, who go on as if nothing had happened: whoever takes
                                part in a vote has all pieces of the step, so a vote alone ends it
    for nobody                  a step is RETRY, dealt anew; numbers and words are gathered again from those who are
    left

A step ends here when everyone is known to have the vote, which takes another message from each to each: else one that
is cut off in that moment would apply what the others, who go on without it, compute again.

*Laws*: nobody goes back behind a step that another has applied, whether that one goes on or not; a step is lost at
most; replicas stay bit-equal.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from paceline import messages, transport
from paceline.errors import LinkError
from paceline.exchange.flow.control import Control, counted
from paceline.messages import Decision, StepOutcome, Tally, Target, Vote
from paceline.transport import Joiner, Link, ViewChange

NUMBERS = struct.Struct("<qq")
NEW = -1  # of who has taken part in nothing yet
Result = TypeVar("Result")


class FaultTolerantControl(transport.Control):
    """``control`` of members who may change. ``follow``: each is given every new link, on every node alike."""

    tolerates_loss = True

    def __init__(self, control: Control, follow: Sequence[Callable[[Link], None]]):
        self.control, self.members, self.follow = control, control.members, follow
        self.operation_number, self.last_result = 0, b""  # operations that have ended here, and what the last one gave
        self.num_view_changes = 0
        self.rows: Callable[[], int] = lambda: 1  # of the global batch, that this node has at present

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
                if result is None or self._vote(Vote(), _made).decision is Decision.COMMIT:
                    return result

    def _vote(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        def ended(votes: bytes) -> StepOutcome:
            return finish(counted(messages.unpack_frames(votes)))

        try:
            outcome = self.control.vote(vote, finish)
        except LinkError as error:
            return self._meet(str(error), ended) or self._redo()
        if self.size > 1:
            self._end(messages.pack_frames(self.control.ballots))
            self._all_know()
        else:
            self._end(b"")
        return outcome

    def _all_know(self) -> None:
        """Where it breaks, those who are left are told the vote by this one, or it may not go on."""
        try:
            self._hear_all()
        except LinkError as error:
            self._meet(str(error), _impossible)

    def _hear_all(self) -> None:
        zero = torch.zeros(1, dtype=torch.uint8)
        self.members.link.all_gather(zero, "making sure that all know", even=True).wait()

    def recover(self, error: LinkError) -> StepOutcome:
        return self._meet(str(error), _impossible) or self._redo()

    def _redo(self) -> StepOutcome:
        self.num_view_changes += 1
        return StepOutcome(Decision.RETRY)

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        shape = f"<{len(values)}d"
        return list(struct.unpack(shape, self._surely(lambda: struct.pack(shape, *self.control.all_reduce(values)))))

    def all_gather(self, *words: bytes) -> list[bytes]:
        return messages.unpack_frames(self._surely(lambda: messages.pack_frames(self.control.all_gather(*words))))

    def _surely(self, operation: Callable[[], bytes]) -> bytes:
        while True:
            try:
                result = operation()
            except LinkError as error:
                if (found := self._meet(str(error), bytes)) is not None:
                    return found
                self.num_view_changes += 1
            else:
                self._end(result)
                return result

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Whoever ends it knows that all have them; where somebody was lost in the middle, all begin again.

        Rank 0 has sent before the others have received: without a word from everyone it would be an operation ahead.
        """

        def once() -> bytes:
            self.control.broadcast(tensors)
            self.control.all_gather(b"")
            return b""

        self._surely(once)

    def _end(self, result: bytes) -> None:
        self.operation_number, self.last_result = self.operation_number + 1, result

    # after a loss

    def admit(self, joiners: Sequence[Joiner] = ()) -> None:
        self._meet("they met to take a node in", _impossible, joiners)

    def _meet(self, why: str, finish: Callable[[bytes], Result], joiners: Sequence[Joiner] = ()) -> Result | None:
        """What ``finish`` makes of the broken operation's result, where it came through for others.

        Raises LinkError where this process cannot resume.
        """
        begin, before = time.perf_counter(), list(self.members.link.hosts)
        who: list[int | Joiner] = list(range(len(before)))
        found: Result | None = None
        while True:
            view = self.members.reconfigure(joiners)
            who, joiners = [*(who[rank] for rank in view.previous), *view.joined], ()
            try:
                told, rows, some_lacked = self._compare()
                if told is not None:
                    self._end(told)
                    found = finish(told)
                if some_lacked:
                    self._hear_all()
                self._reopen()
            except LinkError as another:  # lost while they met: once more
                why = str(another)
                continue
            break
        origin = tuple(each for each in who if isinstance(each, int))
        came = tuple(each for each in who if isinstance(each, Joiner))
        lost = tuple(host for rank, host in enumerate(before) if rank not in origin)
        seconds = time.perf_counter() - begin
        if self.on_view_change:
            self.on_view_change(ViewChange(self.generation, origin, rows[: len(origin)], lost, seconds, why, came))
        return found

    def _reopen(self) -> None:
        for each in self.follow:
            each(self.members.link)

    def _compare(self) -> tuple[bytes | None, tuple[int, ...], bool]:
        """(the result that others have and this process has not, each one's rows, whether anybody had not)."""
        told = self._tell(self.operation_number, self.rows())
        turns, results, rows = zip(*told, strict=True)
        if max(turns) > self.operation_number + 1:
            raise AssertionError(f"others are {max(turns) - self.operation_number} operations ahead")
        return (
            results[turns.index(max(turns))] if max(turns) > self.operation_number else None,
            rows,
            _some_lacked(told),
        )

    def _tell(self, turn: int, rows: int) -> list[tuple[int, bytes, int]]:
        """Each one's (operations that have ended, what the last one gave, rows)."""
        mine = messages.pack_frames([NUMBERS.pack(turn, rows), self.last_result])
        words = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        everyone = self.members.link.all_gather(words, "comparing how far all are").wait()
        said = [messages.unpack_frames(bytes(part.numpy())) for part in everyone]
        numbers = [NUMBERS.unpack(head) for head, _ in said]
        return [(turn, result, rows) for (turn, rows), (_, result) in zip(numbers, said, strict=True)]

    def enter(self) -> None:
        """Where they are, all others are; what they have ended, nobody asks of this one."""
        self.members.reconfigure()
        told = self._tell(NEW, 0)
        self.operation_number, self.last_result, _ = max(told)
        if _some_lacked(told):
            self._hear_all()
        self._reopen()


def _some_lacked(told: Sequence[tuple[int, bytes, int]]) -> bool:
    """Whether anybody has not taken part in what others have ended."""
    turns = [turn for turn, _, _ in told]
    return any(NEW < turn < max(turns) for turn in turns)


def _made(tally: Tally) -> StepOutcome:
    return StepOutcome(Decision.COMMIT, vote=tally.vote)


def _impossible(result: bytes) -> NoReturn:
    raise AssertionError("a vote came through without this process")
