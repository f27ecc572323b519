"""Control messages of the processes of a node: local rank 0 communicates with other nodes, the others through it.

FollowerControl    sends its messages to local rank 0, and receives those of all from it
LeaderControl      exchanges the node's messages with other nodes; reports membership changes with its next message
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from paceline import transport
from paceline.engine.node.local_exchange import LocalFollower, LocalLeader, encoded
from paceline.engine.node.local_group import LocalGroupError
from paceline.errors import LinkError
from paceline.messages import StepOutcome, Tally, Target, Vote
from paceline.transport import Joiner, ViewChange, pack_frames, unpack_frames

HANDING, ADDING, GATHERING, SPREADING, TAKING = (
    "broadcasting within the node",
    "adding up",
    "gathering messages",
    "broadcasting tensors",
    "admitting nodes",
)
AVERAGING, DUE = "averaging", b"due"


class LeaderControl(transport.Control):
    """Local rank 0's. ``relay``: its forms are sent to the other processes after a membership change."""

    def __init__(self, control: transport.Control, relay: LocalLeader):
        self.control, self.relay, self.local_group = control, relay, relay.local_group
        self.tolerates_loss = control.tolerates_loss
        self._changes: list[bytes] = []  # membership changes that the other processes do not know of yet
        control.on_view_change = self._note
        self._share_place()

    rank: int = property(attrgetter("control.rank"))  # type: ignore[assignment]
    size: int = property(attrgetter("control.size"))  # type: ignore[assignment]
    generation: int = property(attrgetter("control.generation"))  # type: ignore[assignment]
    num_view_changes: int = property(attrgetter("control.num_view_changes"))  # type: ignore[assignment]

    def _share_place(self) -> None:
        self.node_broadcast(json.dumps([self.rank, self.size, self.generation]).encode())

    def _note(self, change: ViewChange) -> None:
        self._changes.append(change.pack())
        if self.on_view_change:
            self.on_view_change(change)

    def _with_changes(self, body: bytes) -> bytes:
        """The body with pending membership changes, after which the forms are sent, too: they may have changed."""
        forms = encoded(self.relay.renew_forms()) if self._changes and not self.relay.alone else b""
        changes, self._changes = pack_frames(self._changes), []
        return pack_frames([changes, struct.pack("<I", self.num_view_changes), forms, body])

    def commit(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        try:
            outcome = self.control.commit(vote, finish)
        except LinkError as error:
            self.local_group.broadcast_error(error)
            raise
        self._pass_on(outcome)
        return outcome

    def recover(self, error: LinkError) -> StepOutcome:
        try:
            if isinstance(error, LocalGroupError) or not self.tolerates_loss:
                raise error
            self.relay.end()
            outcome = self.control.recover(error)
        except LinkError as final:
            self.local_group.broadcast_error(final)
            raise
        self._pass_on(outcome)
        return outcome

    def transact(self, compute: Callable[[], Sequence[Target] | None]) -> Sequence[Target] | None:
        try:
            result = self.control.transact(compute)
        except LinkError as error:
            self.local_group.broadcast_error(error)
            raise
        self.local_group.all_gather_bytes(self._with_changes(b"" if result is None else DUE), AVERAGING)
        return result

    def _pass_on(self, outcome: StepOutcome) -> None:
        message = self._with_changes(self.relay.settle(outcome))
        for peer in self.local_group.lines:
            self.local_group.send(peer, b"v", message)
        self.relay.share_forms()

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        node = [sum(column) for column in zip(*self.local_group.gather(values, ADDING), strict=True)]
        whole = self.control.all_reduce(node)
        self.local_group.all_gather_bytes(self._with_changes(b""), ADDING)
        return self.local_group.gather(whole, ADDING)[0]

    def all_gather(self, *messages: bytes) -> list[bytes]:
        parts = self.local_group.all_gather_bytes(pack_frames(messages), GATHERING)
        whole = self.control.all_gather(*(each for part in parts for each in unpack_frames(part)))
        self.local_group.all_gather_bytes(self._with_changes(pack_frames(whole)), GATHERING)
        return whole

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self.control.broadcast(tensors)
        flats = [each.detach().contiguous().reshape(-1) for each in self.relay.not_shared(tensors)]
        parts = [each.view(torch.uint8).numpy().tobytes() for each in flats]
        self.local_group.all_gather_bytes(self._with_changes(b"".join(parts)), SPREADING)
        self.local_group.barrier(SPREADING)

    def node_broadcast(self, message: bytes | bytearray) -> bytes:
        return self.local_group.all_gather_bytes(bytes(message), HANDING)[0]

    def node_gather(self, message: bytes) -> list[bytes]:
        return self.local_group.all_gather_bytes(message, HANDING)

    def admit(self, joiners: Sequence[Joiner] = ()) -> None:
        try:
            self.control.admit(joiners)
        except LinkError as error:
            self.local_group.broadcast_error(error)
            raise
        self.local_group.all_gather_bytes(self._with_changes(b""), TAKING)
        self.relay.renew_forms()
        self.relay.share_forms()

    def enter(self) -> None:
        self.control.enter()
        self._share_place()


class FollowerControl(transport.Control):
    """Another local rank's: it communicates with local rank 0 alone."""

    def __init__(self, control: transport.Control, relay: LocalFollower):
        self.relay, self.local_group, self.tolerates_loss = relay, relay.local_group, control.tolerates_loss
        self._read_place()

    def _read_place(self) -> None:
        self.rank, self.size, self.generation = json.loads(self.node_broadcast(b""))

    def _read(self, message: bytes) -> bytes:
        changes, num_changes, forms, body = unpack_frames(message)
        (self.num_view_changes,) = struct.unpack("<I", num_changes)
        if forms:
            self.relay.read_forms(forms)
        for each in map(ViewChange.unpack, unpack_frames(changes)):
            self.size, self.generation = len(each.previous_ranks) + len(each.joined), each.generation
            self.rank = each.previous_ranks.index(self.rank)
            if self.on_view_change:
                self.on_view_change(each)
        return body

    def commit(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        self.local_group.send(0, b"v", vote.pack())
        return self.relay.read_outcome(self._read(self.local_group.expect(0, b"v", "agreeing on the step")))

    def recover(self, error: LinkError) -> StepOutcome:
        """Sends local rank 0 a vote against the step; it detects the failure itself."""
        if not self.tolerates_loss:
            raise error
        return self.commit(Vote(ok=False), self.relay.finish)

    def transact(self, compute: Callable[[], Sequence[Target] | None]) -> Sequence[Target] | None:
        return () if self._read(self.local_group.all_gather_bytes(b"", AVERAGING)[0]) == DUE else None

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        self.local_group.gather(values, ADDING)
        self._read(self.local_group.all_gather_bytes(b"", ADDING)[0])
        return self.local_group.gather([0.0] * len(values), ADDING)[0]

    def all_gather(self, *messages: bytes) -> list[bytes]:
        self.local_group.all_gather_bytes(pack_frames(messages), GATHERING)
        return unpack_frames(self._read(self.local_group.all_gather_bytes(b"", GATHERING)[0]))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        body, start = bytearray(self._read(self.local_group.all_gather_bytes(b"", SPREADING)[0])), 0
        not_shared = self.relay.not_shared(tensors)
        if (own := sum(each.numel() * each.itemsize for each in not_shared)) != len(body):
            raise ValueError(
                f"local rank 0 has {len(body)} bytes of buffers and this process {own}; buffers keep number, shape and "
                f"type in all processes of a node: register them before join()"
            )
        for tensor in not_shared:
            num_bytes = tensor.numel() * tensor.itemsize
            new = torch.frombuffer(body, dtype=torch.uint8, count=num_bytes, offset=start).clone()
            tensor.detach().copy_(new.view(tensor.dtype).view(tensor.shape))
            start += num_bytes
        self.local_group.barrier(SPREADING)

    def node_broadcast(self, message: bytes | bytearray) -> bytes:
        return self.local_group.all_gather_bytes(b"", HANDING)[0]

    def node_gather(self, message: bytes) -> list[bytes]:
        return self.local_group.all_gather_bytes(message, HANDING)

    def admit(self, joiners: Sequence[Joiner] = ()) -> None:
        self._read(self.local_group.all_gather_bytes(b"", TAKING)[0])
        self.relay.read_forms()

    def enter(self) -> None:
        self._read_place()
