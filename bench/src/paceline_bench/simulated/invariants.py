"""What must hold after a simulated training, whatever has struck.

    no torn step       every weight is that of a whole number of applied steps, bit for bit, also where training ended
    every sample once  the rows behind each applied step are those of its global batch
    no deadlock        whoever is alive at the end has trained to the end, or was told why it may not go on; so have all
                       processes of a node
    nobody left out    that is told only where a rank stood still, was silent or cut off; or where two neighbours were
                       lost, of those that each update a part of the weights
    one run            of parts that do not hear each other one goes on: a step is applied from one attempt alone, also
                       by those who are lost in that moment
    replicas equal     bit for bit, after every step
    the same result    as plain PyTorch on whole batches, in float64, to 1e-9; where it is reproducible, the bits of one
                       rank alone; where a codec rounds, as near as that
    nothing owed lost  with error feedback, what was computed is what was applied, what the living still owe, and what
                       the lost owed when they were lost

Where nodes train alone and average (`periods.broken`), the first, third and fourth of these, and its own.

Where nodes return (`broken_waiting`), all of these but the last, and: no step is applied below the minimum of nodes.

Each that does not hold is a sentence in the list that `broken` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.elastic.quorum import QuorumVerdict
from paceline.exchange import server
from paceline.messages import StepContext
from paceline.testing.in_process import in_process
from paceline_bench.simulated import periods
from paceline_bench.simulated.fault_link import SEVERS, Net
from paceline_bench.simulated.rank import Attempt, Rank
from paceline_bench.simulated.scenarios import CLOSE, LR, checksum, crc, given, reference, windows
from paceline_bench.simulated.schedule import Schedule

LONGEST_S = 1000.0  # of virtual time
LONGEST_WAIT_S = 3000.0  # likewise, where nodes are waited for
NEIGHBOURS = "were lost with two neighbouring nodes"
TOLD = tuple(f": {decision.value}: " for decision in (QuorumVerdict.END, QuorumVerdict.RESTORE))


def broken(schedule: Schedule, net: Net, ranks: Sequence[Rank], alone: int) -> list[str]:
    """Every law that does not hold, and how. ``alone``: the checksum of reproducible weights, by one rank."""
    found = [net.stuck] if net.stuck else []
    if net.clock > LONGEST_S:
        found.append(f"it took {net.clock:.0f} s of virtual time")
    found += _ends(schedule, net, ranks)
    if schedule.how.period:
        return [*found, *periods.broken(schedule, ranks)]
    found += _steps(schedule, net, ranks)
    finished = [rank for rank in ranks if rank.finished]
    for first in {rank.applied[-1][1]: rank for rank in finished if rank.applied}.values():
        gap = _gap(first, reference(schedule.how.momentum, schedule.samples))
        if not gap <= schedule.how.close:
            found.append(f"rank {first.id} is {gap:.2g} from the undisturbed run")
        if schedule.how.virtual and first.checksum() != alone:
            found.append(f"rank {first.id} has other bits than one rank alone")
        if schedule.how.owes:
            found += _owed(schedule, ranks, first)
    return found


def broken_waiting(schedule: Schedule, net: Net, ranks: Sequence[Rank], first: int) -> list[str]:
    """Of one start of all nodes, after ``first`` steps, where those that fail are started again."""
    found = [net.stuck] if net.stuck else []
    if net.clock > LONGEST_WAIT_S:
        found.append(f"it took {net.clock:.0f} s of virtual time")
    by_step: dict[int, dict[int, tuple[Attempt, int]]] = {}
    for rank in ranks:
        steps = [step for (step, _), _ in rank.applied]
        if steps != list(range(steps[0], steps[0] + len(steps)) if steps else ()):
            found.append(f"rank {rank.id} applied steps {steps}")
        for said in rank.applied:
            by_step.setdefault(said[0][0], {})[rank.id] = said
        if rank.id not in net.dead and rank.applied and rank.checksum() != rank.applied[-1][1]:
            found.append(f"rank {rank.id} has weights of no whole number of steps: a torn step")
        if rank.id not in net.dead and rank.finished and rank.run.num_steps != schedule.steps:
            found.append(f"rank {rank.id} finished after {rank.run.num_steps} of {schedule.steps} steps")
        if any(words in rank.end for words in TOLD) and not net.fired.keys() & SEVERS:
            found.append(f"rank {rank.id} {rank.end}, though nobody was cut off, silent or still")
    for step, said_by in by_step.items():
        if len(set(said_by.values())) > 1:
            found.append(f"replicas differ after step {step}: {said_by}")
        (attempt, _) = next(iter(said_by.values()))
        rows = sorted(row for rank in ranks for row in rank.taken.get(attempt, ()))
        if (size := sum(attempt in rank.taken for rank in ranks)) < schedule.minimum:
            found.append(f"step {step} was applied by {size} nodes, and {schedule.minimum} are the minimum")
        if rows != (wanted := sorted(windows(schedule.samples)[step].tolist())):
            found.append(f"step {step} used samples {rows}, its global batch is {wanted}")
    if missing := set(range(first, max(by_step, default=first))) - by_step.keys():
        found.append(f"nobody applied steps {sorted(missing)}")
    for rank in ranks:
        if rank.finished:
            gap = _gap(rank, reference(schedule.how.momentum, schedule.samples, schedule.how.normed))
            if not gap <= schedule.how.close:
                found.append(f"rank {rank.id} is {gap:.2g} from the undisturbed run")
    return found


def _ends(schedule: Schedule, net: Net, ranks: Sequence[Rank]) -> Iterator[str]:
    start = checksum(given()[0])
    for rank in ranks:
        steps = [step for (step, _), _ in rank.applied]
        if steps != list(range(len(steps))):
            yield f"rank {rank.id} applied steps {steps}"
        if rank.id in net.dead:
            continue
        last = rank.applied[-1][1] if steps else rank.start or start
        # whoever ends while weights go round has some of them
        # who ends while its weights are averaged has those of its own step
        if rank.entered and (newest := max(rank.entered)) not in dict(rank.averages):
            last = crc(rank.entered[newest].weights)
        if rank.checksum() != last and (rank.finished or not (schedule.how.drifts or rank.collects)):
            yield f"rank {rank.id} has weights of no whole number of steps: a torn step"
        for process in range(1, rank.mesh.size) if rank.mesh else ():
            if rank.mesh and ((end := rank.mesh.ends.get(process, "waits")) == "finished") != rank.finished:
                yield f"process {process} of rank {rank.id} {end}, and the rank {rank.end}"
        how = f"rank {rank.id} is alive and {rank.end or 'silent'} after {len(steps)} of {schedule.steps} steps"
        told = any(words in rank.end for words in TOLD)
        if len(steps) != schedule.steps if rank.finished else not (told or NEIGHBOURS in rank.end):
            yield how
        if NEIGHBOURS in rank.end and not (told := _part_is_lost(rank, ranks)):
            yield f"{how}, and every part was there, or its copy"
        if told and NEIGHBOURS not in rank.end and not net.fired.keys() & SEVERS:
            yield f"{how}, though nobody was cut off, silent or still"


def _part_is_lost(rank: Rank, ranks: Sequence[Rank]) -> bool:
    """Whether two neighbours, in the order of the parts, are not among those who ended with this reason."""
    assert isinstance(rank.exchange, server.Exchange)
    left = [each.exchange for each in ranks if each.now() == rank.now() and NEIGHBOURS in each.end]
    places, size = {each.held[0] for each in left if isinstance(each, server.Exchange)}, rank.exchange.held[1]
    return any(part not in places and (part + 1) % size not in places for part in range(size))


def _steps(schedule: Schedule, net: Net, ranks: Sequence[Rank]) -> Iterator[str]:
    for step in range(schedule.steps):
        said = {rank.id: rank.applied[step] for rank in ranks if len(rank.applied) > step}
        if len(set(said.values())) > 1:
            yield f"replicas differ after step {step}: {said}"
        for attempt in {rank.applied[step][0] for rank in ranks if rank.finished and len(rank.applied) > step}:
            rows = sorted(row for rank in ranks for row in rank.taken.get(attempt, ()))
            wanted = sorted(windows(schedule.samples)[step].tolist())
            if rows != wanted:
                yield f"step {step} used samples {rows}, its global batch is {wanted}"


def _gap(rank: Rank, wanted: Sequence[Tensor]) -> float:
    """Relative to the way that training has gone."""
    triples = zip(rank.model.parameters(), wanted, given(rank.how.normed)[0].parameters(), strict=True)
    return max(
        float((weight - want).detach().norm() / (want - start).detach().norm()) for weight, want, start in triples
    )


def _owed(schedule: Schedule, ranks: Sequence[Rank], first: Rank) -> Iterator[str]:
    """By spec: start - end = rate x (what was offered in the attempts that were applied - what is still owed)."""
    attempts = [attempt for attempt, _ in first.applied]
    ends, starts = dict(first.model.named_parameters()), dict(given()[0].named_parameters())
    for bucket in first.engine.buckets:
        went = torch.cat([(starts[name] - ends[name]).detach().reshape(-1) for name in bucket.names]) / LR
        for rank in ranks:
            took_part = [step for step, attempt in enumerate(attempts) if (attempt, bucket.index) in rank.offered]
            for step in took_part:
                went -= rank.offered[attempts[step], bucket.index][0]
            if took_part:
                went += _residual(rank, ranks, took_part[-1], attempts[took_part[-1]], bucket.index)
        if not float(went.abs().max()) <= CLOSE:
            yield f"of {', '.join(bucket.names)} {float(went.abs().max()):.2g} was lost or applied twice"


def _residual(rank: Rank, ranks: Sequence[Rank], step: int, attempt: Attempt, index: int) -> Tensor:
    """What it owes after a step, in which it took part, whether it lived to know or not."""
    if len(rank.applied) > step and rank.applied[step][0] == attempt:
        return rank.owed[step][index]
    everyone, bucket = [each for each in ranks if (attempt, index) in each.offered], rank.engine.buckets[index]
    runs = [
        each.codec.run(bucket, *each.offered[attempt, index], StepContext(step, place, len(everyone)))
        for place, each in enumerate(everyone)
    ]
    residual: Tensor = in_process(runs)[0][everyone.index(rank)].state[0]
    return residual
