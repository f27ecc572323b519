"""Step observer of `paceline verify`: notes each step, and runs the experiments after the last one."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from paceline.contract import GlobalBatch
from paceline.engine.compute import batch as batches
from paceline.engine.compute import rng
from paceline.engine.compute.loss_divisor import Means, labels_of
from paceline.planner.diagnose.equivalence import EquivalenceRun, digests
from paceline.planner.diagnose.experiments import examine
from paceline.planner.diagnose.loss_kind import Terms
from paceline.planner.diagnose.subject import Subject, parts_of
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.step.run_state import RunState


class EquivalenceObserver(StepObserver):
    """Observes one of two runs that are compared. Raises SystemExit in every process after the last step."""

    def __init__(self, run: RunState, equivalence: EquivalenceRun):
        self.run, self.equivalence, self._own_loop = run, equivalence, False

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        self._own_loop = own
        return batch

    def reads(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        return self.equivalence.observe_batch(batch, batches.mapped)

    def ends(self, summary: StepSummary) -> None:
        run, equivalence, vote = self.run, self.equivalence, summary.outcome.vote
        run.settle()
        loss_sum, weight = vote.loss_sum, vote.weight
        if run.world.world_size > 1 and run.exchange.consensus != "step":  # the vote is that of one node
            loss_sum, weight = run.control.all_reduce([loss_sum, weight])
        loss = loss_sum / weight if weight else math.nan
        if not equivalence.note(run.job.model, run.job.optimizer, loss):
            return
        equivalence.facts |= {
            "batch_size": run.job.batch_size,
            "consensus": run.exchange.consensus,
            "codec": run.codec.fidelity,
            "own_loop": self._own_loop,
        }
        all_notes = [equivalence.notes()]
        if run.world.world_size > 1:
            gathered = run.control.all_gather(json.dumps(all_notes[0]).encode())
            all_notes = [json.loads(message) for message in gathered if message]
        found = _run_experiments(run, equivalence, self._own_loop) if equivalence.examines else None
        equivalence.end(all_notes, run.engine.state() if run.leader or equivalence.simulated else None, found)


def _run_experiments(run: RunState, equivalence: EquivalenceRun, own_loop: bool) -> dict[str, Any]:
    distributed, found = equivalence.all_notes(), dict[str, Any]()
    try:
        found = _check_reading(equivalence, distributed)
        if (subject := _subject(run, equivalence, distributed, own_loop)) is not None:
            found |= examine(subject)
    except Exception as error:  # the comparison is valid also without experiments
        found["error"] = f"{type(error).__name__}: {error}"
    return found | {"sync": run.job.batch_norm == "sync"}


def _check_reading(equivalence: EquivalenceRun, distributed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the data set is deterministic; if so, the digests of what each process should have read."""
    known = [read for read in equivalence.reads if read.span is not None]
    if not known or len(known) < len(equivalence.reads):
        return {}

    def read(batch: Any, span: Sequence[int], number: int = 0) -> list[str]:
        seed(number)
        return digests(batch.read(*span)) if span[1] > span[0] else []

    first, span = known[0].batch, known[0].span
    assert span is not None
    if read(first, span) != read(first, span, 1):
        return {"drawn": True}
    spans = [facts.get("ranges", []) for facts in distributed]
    return {"dealt": [[read(known[i].batch, each) for i, each in enumerate(ranges[: len(known)])] for ranges in spans]}


def _subject(
    run: RunState, equivalence: EquivalenceRun, distributed: Sequence[Mapping[str, Any]], own_loop: bool
) -> Subject | None:
    job, read = run.job, equivalence.reads[0] if equivalence.reads else None
    if not own_loop and (read is None or read.rows is None):
        return None
    if own_loop:
        if equivalence.called is None:
            return None
        rows: Any = equivalence.called
        leaf = next((each for each in tree_iter(rows) if isinstance(each, Tensor) and each.dim()), None)
        count = 0 if leaf is None else len(leaf)

        def forward(rows: Any) -> Any:
            return job.model(*rows["args"], **rows["kwargs"])

        def loss_terms(output: Any, rows: Any) -> Terms:
            raise AssertionError("a loop of the user's own has no loss that could be called")

    else:
        assert read is not None
        rows, seen = read.rows, Means()
        count = batches.samples(rows, read.span[1] - read.span[0] if read.span else None)
        forward_of = job.forward or batches.call

        def forward(rows: Any) -> Any:
            nonlocal seen
            if job.loss is not None:
                return forward_of(job.model, rows)
            seen = Means(elements=True)  # for the model's own loss, as in a step
            with labels_of(rows, seen, batches.mapped) as given:
                return forward_of(job.model, given)

        def loss_terms(output: Any, rows: Any) -> Terms:
            return terms_of(job.loss, output, rows, seen)

    if count < 2:
        return None
    spans = [facts["ranges"][0] for facts in distributed if facts.get("ranges") and facts["ranges"][0]]
    parts = parts_of(count, [(span[0], span[1]) for span in spans])
    read_again = []
    if read and read.span and not own_loop:
        read_again = [read.batch.read(part.start, part.stop) for part in parts]
    metric = job.metric or equivalence.metric

    def measured(output: Any, rows: Any) -> Mapping[str, tuple[float, float]]:
        found = batches.Measured()
        if metric:
            found.add(metric(output, batches.target(metric, rows)), rows, None)
        return found.sums

    device = next(iter(job.model.parameters())).device
    rows, read_again = tree_map_only(Tensor, lambda each: each.to(device), (rows, read_again))
    return Subject(
        job.model,
        forward,
        None if own_loop else loss_terms,
        rows,
        parts,
        seed,
        job.loss is None,
        read_again,
        measured if metric and not own_loop else None,
        job.loss,
    )


def terms_of(loss: Callable[..., Any] | None, output: Any, rows: Any, seen: Means) -> Terms:
    """The terms of a loss."""
    value, times, weight, terms = batches.judged(loss, output, rows, means=seen)
    if len(terms) < 2 or loss is None:
        return {"": (value, times, weight)}
    notes = loss(output, batches.target(loss, rows))
    return {str(name): (part, times, weight) for name, part in notes.items()}


def seed(number: int) -> None:
    """Seeds all global random generators."""
    rng.seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)
