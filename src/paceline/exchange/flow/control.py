"""What every exchange among equals does besides gradients: vote, add numbers up, spread tensors.

What some processes do while all others wait, and what went wrong there, told everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import Ballot, CheckpointError

# no network library knows all of torch's types, and who only copies need not: by the bytes of a number
WORDS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Meeting(contract.Exchange):
    """Uses the link's own lane; gradients have another."""

    link: contract.Link
    _votes: Sequence[bytes] = ()
    _certain_s = 0.0  # until when this process was one of all, by `ticks`

    def vote(self, ballot: Ballot) -> tuple[Ballot, list[Ballot], bool]:
        """(all ballots as one, each rank's, whether the replicas' hashes differ)."""
        words = torch.frombuffer(bytearray(self._words(ballot)), dtype=torch.uint8)
        everyone = self.link.all_gather(words, "the vote on the step", even=True).wait()
        self._make_sure()
        self._votes = [bytes(part.numpy()) for part in everyone]
        return self._counted(self._votes)

    def _make_sure(self) -> None:
        self.link.certain(self._certain_s)
        self._certain_s = contract.ticks()

    def _words(self, ballot: Ballot) -> bytes:
        return ballot.pack()

    def _counted(self, votes: Sequence[bytes]) -> tuple[Ballot, list[Ballot], bool]:
        ballots = [Ballot.unpack(vote) for vote in votes]
        merged = Ballot.merge(ballots)
        merged.paces = tuple((b.busy, b.fixed) for b in ballots)
        return merged, ballots, len({b.hash for b in ballots}) > 1

    def voted(self) -> bytes:
        return contract.framed(self._votes)

    def total(self, values: Sequence[float]) -> list[float]:
        if self.link.size == 1:
            return list(values)
        whole = torch.tensor(list(values), dtype=torch.float64)
        return [float(value) for value in self.link.sum(whole, "adding up").wait()]

    def gather(self, *words: bytes) -> list[bytes]:
        if self.link.size == 1:
            return list(words)
        mine = torch.frombuffer(bytearray(contract.framed(words)), dtype=torch.uint8)
        everyone = self.link.all_gather(mine, "gathering words").wait()
        self._make_sure()
        return [word for part in everyone for word in contract.unframed(bytes(part.numpy()))]

    def spread(self, tensors: Sequence[Tensor]) -> None:
        if self.link.size > 1:
            for tensor in tensors:
                flat = tensor.detach().contiguous().reshape(-1)
                words = flat.view(WORDS[min(8, flat.itemsize)])
                self.link.broadcast(words, 0, "spreading rank 0's tensors").wait()
                tensor.copy_(flat.view(tensor.shape))


DONE = b"done"


Result = TypeVar("Result")


def alone(exchange: contract.Exchange, chosen: Callable[[], bool], work: Callable[[], Result]) -> Result | None:
    """``work`` in the chosen processes while the others wait. An error there is raised everywhere.

    Where all who were chosen are lost in doing so, those do it who are chosen then.
    """
    while True:
        generation, mine = exchange.link.generation, b""
        result: Result | None = None
        error: Exception | None = None
        if chosen():
            mine = DONE
            try:
                result = work()
            except Exception as caught:
                error, refused = caught, isinstance(caught, CheckpointError)
                mine = json.dumps([refused, str(error) if refused else repr(error)]).encode()
        everyone = exchange.gather(mine)
        if any(everyone) or exchange.link.generation == generation:
            break
    if error:
        raise error
    for words in everyone:
        if words in (b"", DONE):
            continue
        refused, text = json.loads(words)
        other: Exception = CheckpointError(text) if refused else RuntimeError(f"another process failed: {text}")
        other.told = True  # type: ignore[attr-defined]
        raise other
    return result
