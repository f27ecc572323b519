"""Gradient synchronisation within a node: local rank 0 has the real exchange, which the other processes use through it.

    LocalFollower  writes gradients to its shared memory; receives decision, forms and row counts from the leader
    LocalLeader    waits for each process's part of a bucket, passes the node's gradient to the real exchange,
                   merges the votes into the node's, and sends the outcome (`local_control`)

With a single node the real exchange is not used: each process adds up its own rows in the update.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract, transport
from paceline.engine.node.local_group import LocalGroup
from paceline.engine.node.shared_memory import SharedBuffers
from paceline.messages import (
    DENSE,
    FACTORS,
    Bucket,
    Decision,
    ExchangeTraffic,
    Gradient,
    StepOutcome,
    Tally,
    Target,
    Vote,
)


class _Relay(contract.Exchange):
    """Common to both: the forms, and shared memory for the sums. ``keeps``: a step may be retried, so its gradients
    must not be overwritten."""

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

    def open(self, *_: object, **__: object) -> None:
        """It is made of an exchange that is open."""

    def forms(self) -> Sequence[str]:
        return self._forms

    def _put(self, gradient: Gradient) -> int:
        """Writes to shared memory; the rows of factors, or -1 for dense. The vote reports factors that do not fit."""
        if gradient.output_grad is not None and not gradient.bucket.fits(len(gradient.output_grad)):
            self._overflow.add(gradient.bucket.index)
            return 0
        self.places.write(gradient)
        return -1 if gradient.output_grad is None else len(gradient.output_grad)

    def _vote(self, vote: Vote) -> Vote:
        vote.dense = bytes(d or i in self._overflow for i, d in enumerate(vote.dense))
        self._overflow = set()
        return vote

    def not_shared(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of which each process of the node has its own copy."""
        return [each for each in tensors if not self.places.hold(each)]

    def traffic(self, dtype: torch.dtype) -> ExchangeTraffic:
        return self.exchange.traffic(dtype)


class LocalLeader(_Relay):
    """Local rank 0's exchange: collects the gradients of the node's processes, and sends them the outcome."""

    def _begin(self) -> None:
        if self.alone:  # measured: factors of few rows are faster there than k dense gradients, for any optimizer
            self._forms = [FACTORS if bucket.linear else DENSE for bucket in self.buckets]
        else:
            self._forms = list(self.exchange.forms())
        self.share_forms()
        self._collector: _GradientCollector | None = None
        self._votes: list[Vote] = []

    def share_forms(self) -> None:
        for peer in self.local_group.lines:
            self.local_group.send(peer, b"f", encoded(self._forms))

    def renew_forms(self) -> list[str]:
        """Reads the forms from the exchange again, which may have changed them."""
        if not self.alone:
            self._forms = list(self.exchange.forms())
        return self._forms

    def explain(self) -> Sequence[str]:
        return self.exchange.explain()

    def begin(self) -> None:
        self.exchange.begin()
        self._collector = _GradientCollector(self)

    def put(self, gradient: Gradient) -> None:
        assert self._collector
        num_rows = self._put(gradient)
        if not self.alone:
            self._collector.note(0, gradient.bucket.index, num_rows)

    def node_gradient(self, bucket: Bucket, rows: Sequence[int]) -> Gradient:
        """The sum over the node's processes, in local rank order; factors are concatenated, not added."""
        size = self.local_group.size
        if self._forms[bucket.index] == DENSE:
            flat = self.places.flat(bucket)
            if self.keeps:
                flat = flat.clone()  # a failed all-reduce may still write into it while the step is retried
            for local_rank in range(1, size):
                flat += self.places.flat(bucket, local_rank)
            return Gradient(bucket, flat=flat)
        parts = [self.places.factors(bucket, local_rank, rows[local_rank]) for local_rank in range(size)]
        left, right = map(torch.cat, zip(*parts, strict=True))
        return Gradient(bucket, output_grad=left, layer_input=right)

    def collect(self, vote: Vote) -> Vote:
        assert self._collector
        with self.local_group.failure_detector.activity.at("waiting for the other processes of this node"):
            self._votes = [self._vote(vote), *self._collector.finish()]
        merged = Vote.merge(self._votes)
        return merged if self.alone else self.exchange.collect(merged)

    def finish(self, tally: Tally) -> StepOutcome:
        return self._alone(tally.vote) if self.alone else self.exchange.finish(tally)

    def end(self) -> None:
        """Waits until the other processes have ended or aborted their step."""
        assert self._collector
        self._collector.finish()

    def _alone(self, merged: Vote) -> StepOutcome:
        """With a single node: factors where all rows fit in the gradient's memory, else dense."""
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
            else self.node_gradient(bucket, [vote.rows[bucket.index] for vote in self._votes])
            for bucket in self.buckets
        ]
        return StepOutcome(Decision.COMMIT, gradients, merged)

    def settle(self, outcome: StepOutcome) -> bytes:
        """Writes the gradients to shared memory; returns the message with the decision and the row counts."""
        settled = [self.places.publish(gradient) for gradient in outcome.gradients]
        outcome.gradients = [gradient for gradient, _ in settled]
        rows = [num_rows for _, num_rows in settled]
        self.renew_forms()
        counts = struct.pack(f"<I{len(rows)}i", len(rows), *rows)
        decision = outcome.decision.value.encode()
        return bytes([outcome.drift, len(decision)]) + decision + counts + outcome.vote.pack()

    def average(self, weights: Sequence[Tensor], now: bool, state: bool = False) -> Sequence[Target] | None:
        return self.exchange.average(weights, now, state)

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
    """Another local rank's exchange: it communicates with local rank 0 alone."""

    def _begin(self) -> None:
        self.read_forms()

    def read_forms(self, message: bytes | None = None) -> None:
        message = self.local_group.expect(0, b"f", "receiving the forms") if message is None else message
        self._forms = [FACTORS if initial == "f" else DENSE for initial in message.decode()]

    def put(self, gradient: Gradient) -> None:
        num_rows = self._put(gradient)
        if not self.alone:
            self.local_group.send(0, b"p", struct.pack("<Ii", gradient.bucket.index, num_rows))

    def collect(self, vote: Vote) -> Vote:
        return self._vote(vote)

    def finish(self, tally: Tally) -> StepOutcome:
        raise RuntimeError("the process that holds the link sends the outcome: read_outcome")

    def rebuild(self, link: transport.Link) -> None:
        """This process has no link."""

    def read_outcome(self, body: bytes) -> StepOutcome:
        """Unpacks the message of `LocalLeader.settle`."""
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


def encoded(forms: Sequence[str]) -> bytes:
    return "".join(form[0] for form in forms).encode()


class _GradientCollector:
    """Collects the other processes' messages of one step; passes each complete bucket to the exchange."""

    def __init__(self, leader: LocalLeader):
        self.leader, self.buckets, self.size = leader, leader.buckets, leader.local_group.size
        self.rows: dict[int, dict[int, int]] = {bucket.index: {} for bucket in self.buckets}
        self.votes: dict[int, Vote] = {}
        threads = leader.local_group.threads
        self.lock = threads.Condition()
        self.error: BaseException | None = None
        self.thread: Any = None
        if not leader.alone:
            self.thread = threads.Thread(target=self._run, name="paceline inbox", daemon=True)
            self.thread.start()

    def note(self, local_rank: int, index: int, num_rows: int) -> None:
        with self.lock:
            self.rows[index][local_rank] = num_rows
            if len(self.rows[index]) == self.size:
                rows = [self.rows[index][r] for r in range(self.size)]
                self.leader.exchange.put(self.leader.node_gradient(self.buckets[index], rows))

    def _run(self) -> None:
        try:
            self._collect()
        except BaseException as error:
            self.error = error

    def _collect(self) -> None:
        local_group, doing = self.leader.local_group, "computing the step"
        while missing := local_group.lines.keys() - self.votes.keys():
            peer, kind, body = local_group.recv_any(missing, doing)
            if kind == b"p":
                self.note(peer, *struct.unpack("<Ii", body))
            else:
                local_group.check(peer, kind, b"v", doing)
                self.votes[peer] = Vote.unpack(body)

    def finish(self) -> list[Vote]:
        """The others' votes, in local rank order."""
        if self.thread:
            self.thread.join()
        else:
            self._run()
        if self.error:
            raise self.error
        return [self.votes[peer] for peer in sorted(self.votes)]
