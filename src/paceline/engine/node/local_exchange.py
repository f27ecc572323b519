"""Gradient synchronisation within a node: local rank 0 has the real exchange, the other processes go through it.

    LocalFollower  gradients into its place; decision, forms and row counts from the leader
    LocalLeader    waits for each process's part of a bucket, offers the node's gradient to the real exchange,
                   merges the votes into the node's, and sends the outcome (`local_control`)

Where there is no other node, nothing is offered: each process adds up its own rows in the update.
"""

from __future__ import annotations

import selectors
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract, messages, transport
from paceline.engine.node.local_group import POLL_S, LocalGroup
from paceline.engine.node.shared_memory import SharedBuffers
from paceline.messages import DENSE, FACTORS, Bucket, Decision, Gradient, StepOutcome, Tally, Target, Vote


class _Relay(contract.Exchange):
    """What both kinds share: the forms, and places for the sums. ``keeps``: a step may be computed again, so that its
    gradients stay as they are."""

    def __init__(
        self,
        exchange: contract.Exchange,
        local_group: LocalGroup,
        places: SharedBuffers,
        buckets: Sequence[Bucket],
        alone: bool,
        keeps: bool = False,
    ):
        self.exchange, self.local_group, self.places, self.buckets = exchange, local_group, places, buckets
        self.fidelity, self.consensus = exchange.fidelity, exchange.consensus
        self.alone, self.keeps = alone, keeps
        self._forms: list[str] = []
        self._overflow: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError

    def forms(self) -> Sequence[str]:
        return self._forms

    def _put(self, gradient: Gradient) -> int:
        """Into this process's place; the number of rows, or -1. Rows that do not fit are voted dense."""
        if gradient.output_grad is not None and not gradient.bucket.fits(len(gradient.output_grad)):
            self._overflow.add(gradient.bucket.index)
            return 0
        self.places.write(gradient)
        return -1 if gradient.output_grad is None else len(gradient.output_grad)

    def _vote(self, vote: Vote) -> Vote:
        vote.dense = bytes(d or i in self._overflow for i, d in enumerate(vote.dense))
        self._overflow = set()
        return vote

    def apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of which each process of the node has its own."""
        return [each for each in tensors if not self.places.hold(each)]

    def cost(self, buckets: Sequence[Bucket], rows: int, size: int) -> messages.CommCost:
        return self.exchange.cost(buckets, rows, size)


class LocalLeader(_Relay):
    """Local rank 0's exchange: collects the gradients of the node's processes, and passes on what was agreed."""

    def _begin(self) -> None:
        if self.alone:  # measured: few rows in shared memory beat k whole gradients there, whatever the optimizer
            self._forms = [FACTORS if bucket.linear else DENSE for bucket in self.buckets]
        else:
            self._forms = list(self.exchange.forms())
        self.share_forms()
        self._inbox: _GradientCollector | None = None
        self._votes: list[Vote] = []

    def share_forms(self) -> None:
        for peer in self.local_group.lines:
            self.local_group.send(peer, b"f", letters(self._forms))

    def renew_forms(self) -> list[str]:
        """Those of the exchange, after it may have changed them."""
        if not self.alone:
            self._forms = list(self.exchange.forms())
        return self._forms

    def explain(self) -> Sequence[str]:
        return self.exchange.explain()

    def begin(self) -> None:
        self.exchange.begin()
        self._inbox = _GradientCollector(self)

    def put(self, gradient: Gradient) -> None:
        assert self._inbox
        num_rows = self._put(gradient)
        if not self.alone:
            self._inbox.mark(0, gradient.bucket.index, num_rows)

    def node_piece(self, bucket: Bucket, rows: Sequence[int]) -> Gradient:
        """The sum over the node's processes, in local rank order; factors are lined up, not added."""
        size = self.local_group.size
        if self._forms[bucket.index] == DENSE:
            flat = self.places.flat(bucket)
            if self.keeps:
                flat = flat.clone()  # a broken sum may still write into it while the step is computed again
            for local_rank in range(1, size):
                flat += self.places.flat(bucket, local_rank)
            return Gradient(bucket, flat=flat)
        parts = [self.places.factors(bucket, local_rank, rows[local_rank]) for local_rank in range(size)]
        left, right = map(torch.cat, zip(*parts, strict=True))
        return Gradient(bucket, output_grad=left, layer_input=right)

    def collect(self, vote: Vote) -> Vote:
        assert self._inbox
        with self.local_group.failure_detector.activity.at("waiting for the other processes of this node"):
            self._votes = [self._vote(vote), *self._inbox.finish()]
        merged = Vote.merge(self._votes)
        return merged if self.alone else self.exchange.collect(merged)

    def finish(self, tally: Tally) -> StepOutcome:
        return self._alone(tally.vote) if self.alone else self.exchange.finish(tally)

    def end(self) -> None:
        """The other processes have ended their step, or broken it off as well."""
        assert self._inbox
        self._inbox.finish()

    def _alone(self, merged: Vote) -> StepOutcome:
        """No other node: factors wherever all rows fit in place of the gradient, else dense."""
        failed = [
            self._forms[bucket.index] == FACTORS
            and (bool(merged.dense[bucket.index]) or not bucket.fits(merged.rows[bucket.index]))
            for bucket in self.buckets
        ]
        self._forms = [DENSE if dense else form for dense, form in zip(failed, self._forms, strict=True)]
        if not merged.ok or any(failed):
            return StepOutcome(Decision.RETRY, vote=merged)
        gradients = [
            self.places.read_result(bucket, -1)
            if self._forms[bucket.index] == DENSE
            else self.node_piece(bucket, [vote.rows[bucket.index] for vote in self._votes])
            for bucket in self.buckets
        ]
        return StepOutcome(Decision.COMMIT, gradients, merged)

    def settle(self, outcome: StepOutcome) -> bytes:
        """Gradients to where all can read them; the decision and the row counts, as the others are sent them."""
        settled = [self.places.publish(gradient) for gradient in outcome.gradients]
        outcome.gradients = [gradient for gradient, _ in settled]
        rows = [num_rows for _, num_rows in settled]
        self.renew_forms()
        counts = struct.pack(f"<I{len(rows)}i", len(rows), *rows)
        decision = outcome.decision.value.encode()
        return bytes([outcome.drift, len(decision)]) + decision + counts + outcome.vote.pack()

    def average(self, weights: Sequence[Tensor], now: bool) -> Sequence[Target] | None:
        return self.exchange.average(weights, now)

    def averaged(self) -> None:
        self.exchange.averaged()

    def on_assignment(self, largest: float) -> None:
        self.exchange.on_assignment(largest)
        self._forms = list(self.exchange.forms())
        self.share_forms()

    def rebuild(self, link: transport.Link) -> None:
        self.exchange.rebuild(link)

    def state(self) -> dict[str, Any]:
        return {**self.exchange.state(), "forms": list(self._forms)}

    def load(self, state: dict[str, Any]) -> None:
        self.exchange.load(state)
        self._forms = list(state.get("forms", self._forms) if self.alone else self.exchange.forms())
        self.share_forms()

    def close(self) -> None:
        self.exchange.close()


class LocalFollower(_Relay):
    """Another local rank's exchange: all it knows comes from local rank 0."""

    def _begin(self) -> None:
        self.read_forms()

    def read_forms(self, message: bytes | None = None) -> None:
        message = self.local_group.expect(0, b"f", "learning the forms") if message is None else message
        self._forms = [FACTORS if letter == "f" else DENSE for letter in message.decode()]

    def put(self, gradient: Gradient) -> None:
        num_rows = self._put(gradient)
        if not self.alone:
            self.local_group.send(0, b"p", struct.pack("<Ii", gradient.bucket.index, num_rows))

    def collect(self, vote: Vote) -> Vote:
        return self._vote(vote)

    def read_outcome(self, body: bytes) -> StepOutcome:
        """What `LocalLeader.settle` sent."""
        drift, length = bool(body[0]), body[1]
        decision = Decision(body[2 : 2 + length].decode())
        (count,) = struct.unpack_from("<I", body, 2 + length)
        rows = struct.unpack_from(f"<{count}i", body, 6 + length)
        merged = Vote.unpack(body[6 + length + 4 * count :])
        self.read_forms()
        gradients = [
            self.places.read_result(bucket, num_rows) for bucket, num_rows in zip(self.buckets, rows, strict=False)
        ]
        return StepOutcome(decision, gradients, merged, drift)

    def on_assignment(self, largest: float) -> None:
        self.read_forms()

    def load(self, state: dict[str, Any]) -> None:
        self.read_forms()


def letters(forms: Sequence[str]) -> bytes:
    return "".join(form[0] for form in forms).encode()


class _GradientCollector:
    """Collects the other processes' messages of one step, and sends each gradient of the node once it is whole."""

    def __init__(self, leader: LocalLeader):
        self.leader, self.buckets, self.size = leader, leader.buckets, leader.local_group.size
        self.rows: dict[int, dict[int, int]] = {bucket.index: {} for bucket in self.buckets}
        self.votes: dict[int, Vote] = {}
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        if not leader.alone:
            self.thread = threading.Thread(target=self._run, name="paceline inbox", daemon=True)
            self.thread.start()

    def mark(self, local_rank: int, index: int, num_rows: int) -> None:
        with self.lock:
            self.rows[index][local_rank] = num_rows
            if len(self.rows[index]) == self.size:
                rows = [self.rows[index][r] for r in range(self.size)]
                self.leader.exchange.put(self.leader.node_piece(self.buckets[index], rows))

    def _run(self) -> None:
        try:
            self._collect()
        except BaseException as error:
            self.error = error

    def _collect(self) -> None:
        local_group = self.leader.local_group
        with selectors.DefaultSelector() as eyes:
            for peer, line in local_group.lines.items():
                eyes.register(line, selectors.EVENT_READ, peer)
            received_s = time.monotonic()
            while len(self.votes) < self.size - 1:
                ready = eyes.select(POLL_S)
                for peer in () if ready else set(local_group.lines) - set(self.votes):
                    local_group.doubt(peer, "computing the step", time.monotonic() - received_s)
                for key, _ in ready:
                    received_s = time.monotonic()
                    kind, body = local_group.recv(key.data, "computing the step")
                    if kind == b"p":
                        self.mark(key.data, *struct.unpack("<Ii", body))
                    else:
                        local_group.check(key.data, kind, b"v", "computing the step")
                        self.votes[key.data] = Vote.unpack(body)
                        eyes.unregister(key.fileobj)

    def finish(self) -> list[Vote]:
        """The others' votes, in local rank order."""
        if self.thread:
            self.thread.join()
        else:
            self._run()
        if self.error:
            raise self.error
        return [self.votes[peer] for peer in sorted(self.votes)]
