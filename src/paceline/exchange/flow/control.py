"""Control messages between nodes: the vote on a step, sums of numbers, byte messages, rank 0's tensors.

`alone` runs work in some processes while all others wait, and raises its errors everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from paceline import transport
from paceline.errors import CheckpointError
from paceline.messages import StepOutcome, Tally, Vote
from paceline.transport import Membership, pack_frames, unpack_frames

FEW_BYTES = 1 << 20  # they are sent sooner than compared
# broadcasts copy bytes, so a type of the same width serves: no network library knows all of torch's types
TYPES = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Control(transport.Control):
    """Uses the link's own lane; gradients have another. ``votes``: replicas vote on every step."""

    def __init__(self, members: Membership, votes: bool = True):
        self.members, self.votes = members, votes
        self.ballots: Sequence[bytes] = ()  # of the last vote
        self._certain_s = 0.0  # when this process was last known to be a member, by `boottime_s`

    rank: int = property(attrgetter("members.link.rank"))  # type: ignore[assignment]
    size: int = property(attrgetter("members.link.size"))  # type: ignore[assignment]
    generation: int = property(attrgetter("members.link.generation"))  # type: ignore[assignment]

    def commit(self, own_vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        if self.votes:
            return self.vote(own_vote, finish)
        return finish(Tally(Vote.merge([own_vote]) if own_vote.shares else own_vote, [own_vote]))

    def vote(self, own_vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        """A vote of all nodes, also where steps need none (``votes`` is False)."""
        if self.size == 1:
            return finish(Tally(Vote.merge([own_vote]) if own_vote.shares else own_vote, [own_vote]))
        packed = torch.frombuffer(bytearray(own_vote.pack()), dtype=torch.uint8)
        received = self.members.link.all_gather(packed, "the vote on the step", even=True).wait()
        self._check_membership()
        self.ballots = [bytes(part.numpy()) for part in received]
        return finish(counted(self.ballots))

    def _check_membership(self) -> None:
        self.members.assert_still_member(self._certain_s)
        self._certain_s = transport.boottime_s()

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        if self.size == 1:
            return list(values)
        whole = torch.tensor(list(values), dtype=torch.float64)
        return [float(value) for value in self.members.link.sum(whole, "adding up").wait()]

    def all_gather(self, *messages: bytes) -> list[bytes]:
        if self.size == 1:
            return list(messages)
        own = torch.frombuffer(bytearray(pack_frames(messages)), dtype=torch.uint8)
        received = self.members.link.all_gather(own, "gathering messages").wait()
        self._check_membership()
        return [message for part in received for message in unpack_frames(bytes(part.numpy()))]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Of much, only what differs anywhere is sent: equal seeds make equal weights."""
        if self.size == 1:
            return
        for tensor in self._unlike(tensors) if sum(each.nbytes for each in tensors) > FEW_BYTES else tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            numbers = flat.view(TYPES[min(8, flat.itemsize)])
            self.members.link.broadcast(numbers, 0, "broadcasting rank 0's tensors").wait()
            tensor.copy_(flat.view(tensor.shape))

    def _unlike(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those that are not the same, bit by bit, on all nodes."""
        everyone = [unpack_frames(own) for own in self.all_gather(pack_frames([digest(each) for each in tensors]))]
        return [tensor for tensor, *digests in zip(tensors, *everyone, strict=True) if len(set(digests)) > 1]


def digest(tensor: Tensor) -> bytes:
    """Of the bits of its values in their order, on whatever device and in whatever layout."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()


def counted(votes: Sequence[bytes]) -> Tally:
    """The tally of packed votes in rank order."""
    all_votes = [Vote.unpack(vote) for vote in votes]
    merged = Vote.merge(all_votes)
    merged.paces = tuple((vote.busy, vote.fixed) for vote in all_votes)
    return Tally(merged, all_votes, len({vote.hash for vote in all_votes}) > 1)


DONE = b"done"
Result = TypeVar("Result")


def alone(control: transport.Control, chosen: Callable[[], bool], work: Callable[[], Result]) -> Result | None:
    """``work`` in the chosen processes while the others wait. An error there is raised everywhere. Where all chosen
    processes fail meanwhile, the processes that ``chosen`` selects after the membership change do it."""
    while True:
        generation, status = control.generation, b""
        result: Result | None = None
        error: Exception | None = None
        if chosen():
            status = DONE
            try:
                result = work()
            except Exception as caught:
                error, refused = caught, isinstance(caught, CheckpointError)
                status = json.dumps([refused, str(error) if refused else repr(error)]).encode()
        received = control.all_gather(status)
        if any(received) or control.generation == generation:
            break
    if error:
        raise error
    for message in received:
        if message in (b"", DONE):
            continue
        refused, text = json.loads(message)
        other: Exception = CheckpointError(text) if refused else RuntimeError(f"another process failed: {text}")
        other.reported = True  # type: ignore[attr-defined]
        raise other
    return result
