"""The sum of a bucket: of the weights that pay as factors, in fewer bytes, and of everything else as torch sums it.

    header    every rank's rows of each weight; -1: they are not its whole gradient now, -2: they never will be
    factors   an all-gather of the rows, of ranks with fewer padded with zeros; each rank multiplies all of them
    rest      an all-reduce

A bucket's first steps are timed with factors; then, unless its whole gradient would clearly take longer at the rate at
which they came, as torch sums it. What is slower for the slowest rank is not done again; nor is what cannot be tried.
All that decides is in the header, so that all ranks decide the same, and what is dropped is dropped between two passes.
Sums run on a lane of their own (`paceline.ddp.sums.lane`), in the order of buckets; those of buckets without factors
only where it compresses them, or has memory that the ranks share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from paceline.ddp.sums.factors import Factors, Weight
from paceline.ddp.sums.lane import Lane
from paceline.ddp.sums.packed_sums import PackedSums
from paceline.report.log import log

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

dist: Any = torch.distributed  # its stubs leave out what we use

WARM_UP, TRIALS = 1, 2  # steps in each form, before its time counts, and that count
CLEARLY, ENOUGH_BYTES = 3, 1 << 20  # times; and bytes whose time says what the rate of a link is
MAX_FAILED = 20  # steps in which a bucket's factors were not its gradients
NOT_NOW, NEVER = -1, -2
SAMPLE = 4096  # values of each product that are compared with the other ranks'
UNLIKE = (
    "DistributedDataParallel: processors, libraries or threads differ between ranks, and so do the bits of their "
    "products; gradients are summed as torch sums them"
)
Future = Any  # torch.futures.Future[Tensor]


@dataclass
class Trial:
    """How long a bucket's sum took with factors and as torch sums it. *Units*: microseconds, the shortest; of the whole
    gradient first an estimate by the rate of the factors, 0 where there is none."""

    steps: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    least_us: dict[bool, int] = field(default_factory=dict)
    estimate_us: int = 0
    failed: int = 0
    plain: bool = False  # torch's way is being tried
    decided: bool = False

    def next(self) -> bool:
        """Whether the next step is summed with factors."""
        return not self.plain

    @property
    def times(self) -> tuple[int, int]:
        """As the header reports them: of the whole gradient, and with factors."""
        return self.least_us.get(False, self.estimate_us), self.least_us.get(True, 0)

    def weigh(self, least: Sequence[int], most: Sequence[int]) -> bool:
        """By all ranks' times, the shortest and the longest of each form: whether factors are to be dropped."""
        if self.failed >= MAX_FAILED and not self.steps[True]:
            return True
        if self.decided or self.steps[True] < WARM_UP + TRIALS:
            return False
        if (not self.plain or self.steps[False]) and least[0] >= CLEARLY * most[1]:
            self.plain, self.decided = False, True
        elif not self.plain:
            self.plain = True
        elif self.steps[False] >= WARM_UP + TRIALS:
            self.plain, self.decided = False, True
            return most[1] >= most[0]
        return False

    def note(self, factored: bool, seconds: float) -> None:
        self.steps[factored] += 1
        if self.steps[factored] > WARM_UP or not factored:
            least = self.least_us.get(factored, 1 << 62)
            self.least_us[factored] = min(least, round(1e6 * seconds))


@dataclass
class Part:
    """A weight in a bucket, and what this rank has of its gradient."""

    weight: Weight
    gradient: Tensor
    rows: tuple[Tensor, Tensor] | None


class BucketSums:
    """Among the ranks of ``group``, whose ``lane`` it is. ``packed``: of whole buckets, where no weight has factors."""

    def __init__(self, factors: Factors, group: Any, lane: Lane, packed: PackedSums | None):
        self.factors, self.group, self.size, self.lane = factors, group, dist.get_world_size(group), lane
        self._packed = packed
        self.trials: dict[str, Trial] = {}
        self.active = True  # False: this rank has joined, and takes part in the others' sums
        self._products = 0  # a checksum over the products since the last header
        self._dropped: list[Weight] = []  # by sums of this backward pass
        self._slow = False  # the network, as the last header says

    def between_passes(self) -> None:
        """The sums of the pass before have ended, on all ranks alike: what they decided holds from now on."""
        while self._dropped:
            self.factors.drop(self._dropped.pop())
        if self.factors.of:  # else there are no headers
            self.lane.packed = self._slow

    def begin_forward(self) -> None:
        self.between_passes()
        if self._packed:
            self._packed.begin_forward()

    def run(self, bucket: GradBucket, of_active: bool = False) -> Future:
        """The mean of a bucket's gradients over all ranks, or over those that have not joined: a communication hook."""
        buffer, active = bucket.buffer(), self.active
        if bucket.index() == 0:
            self.between_passes()
            if self._packed and not of_active:
                self._packed.begin_pass()
        if self._packed and self._packed.takes(buffer) and not of_active:
            return self._packed.run(buffer).then(_value)
        begin = time.perf_counter()
        parts, others = list[Part](), list[Tensor]()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if weight := self.factors.of.get(id(parameter)):
                parts.append(Part(weight, gradient, weight.whole(gradient) if active else None))
            else:
                others.append(gradient)
        if not (parts or of_active or self.lane.packs_sum(buffer) or self.lane.shares(buffer)):
            buffer.div_(self.size)
            return dist.all_reduce(buffer, group=self.group, async_op=True).get_future().then(self._first)
        checked_s = time.perf_counter() - begin
        future: Future = torch.futures.Future()

        def work() -> Tensor:
            divisor = sum(int(each) for each in self.lane.gathered(torch.tensor([active]))) if of_active else self.size
            return self._sum(buffer, parts, others, divisor, checked_s)

        self.lane.submit(lambda: _into(future, work))
        return future.then(_value)

    def _first(self, done: Future) -> Any:
        if self._packed:
            self._packed.end_sum()
        return done.value()[0]

    def _sum(
        self, buffer: Tensor, parts: Sequence[Part], others: Sequence[Tensor], divisor: int, checked_s: float
    ) -> Tensor:
        if not parts:
            self.lane.add(buffer.div_(divisor))
            return buffer
        trial = self.trials.setdefault(parts[0].weight.name, Trial())
        rows = self._agreed(parts, trial)
        begin = time.perf_counter()
        chosen = [(part, count) for part, count in zip(parts, rows, strict=True) if count > 0]
        if not chosen:
            self.lane.add(buffer.div_(divisor))
        else:
            estimate_s = self._multiply(chosen, divisor, buffer.nbytes)
            trial.estimate_us = 0 if self.lane.shares(buffer) else round(1e6 * estimate_s)
            whole = [part.gradient for part, count in zip(parts, rows, strict=True) if count <= 0]
            self._reduce([*whole, *others], divisor)
        if not chosen and trial.next():  # a step that could not be tried says nothing of its time
            trial.failed += 1
        else:
            trial.note(bool(chosen), time.perf_counter() - begin + (checked_s if chosen else 0.0))
        return buffer

    def _agreed(self, parts: Sequence[Part], trial: Trial) -> list[int]:
        """The most rows that any rank has of each weight; NOT_NOW: it is sent whole."""
        ready = [
            NEVER if part.weight.hopeless else len(part.rows[0]) if part.rows and trial.next() else NOT_NOW
            for part in parts
        ]
        headers = torch.stack(self.lane.gathered(torch.tensor([*ready, self.lane.rate, *trial.times, self._products])))
        self._products = 0
        least, most = headers.amin(0).tolist(), headers.amax(0).tolist()
        self._slow = self.lane.slow(least[len(parts)])
        if least[-1] != most[-1]:
            self._dropped += self.factors.of.values()
            self.report_unlike()
        elif trial.weigh(least[-3:-1], most[-3:-1]):
            self._dropped += [part.weight for part in parts]
        else:
            self._dropped += [part.weight for part, lowest in zip(parts, least, strict=False) if lowest == NEVER]
        return [
            most[i] if least[i] >= 0 and 0 < most[i] <= self.factors.most(part.weight) else NOT_NOW
            for i, part in enumerate(parts)
        ]

    def report_unlike(self) -> None:
        if dist.get_rank(self.group) == 0:
            log.info(UNLIKE)

    def _multiply(self, chosen: Sequence[tuple[Part, int]], divisor: int, num_bytes: int) -> float:
        """Every rank's rows, padded; their products in the place of the gradients. Returns about how many seconds a sum
        of ``num_bytes`` would take at this rate, 0 where that cannot be said."""
        sides = [(side, count) for part, count in chosen for side in part.rows or ()]
        everyone = self.lane.rows(*zip(*sides, strict=True))
        for (part, _), left, right in zip(chosen, everyone[::2], everyone[1::2], strict=True):
            torch.mm(left.div_(divisor).T, right, out=part.gradient)
            self._products ^= checksum(part.gradient)
        summed = 2 * (self.size - 1) / self.size * num_bytes
        gathered_s, received = self.lane.last_s, self.lane.last_bytes
        return gathered_s * summed / received if received >= ENOUGH_BYTES else 0.0

    def _reduce(self, tensors: Sequence[Tensor], divisor: int) -> None:
        if not tensors:
            return
        flat = torch.cat([each.reshape(-1) for each in tensors]).div_(divisor)
        self.lane.add(flat)
        for each, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
            each.copy_(part.view(each.shape))


def checksum(values: Tensor) -> int:
    """Of the bits of some of them, spread over all."""
    flat = values.reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)].contiguous()
    return int(some.view(torch.int32).sum(dtype=torch.int64))


def _into(future: Future, work: Callable[[], Tensor]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def _value(done: Future) -> Any:
    """Raises the sum's own error, which torch's reducer would not find in a future that was given it."""
    return done.value()
