"""The planner for one machine: profile, predict, try the best few configurations, choose the fastest.

`make` profiles the command once and predicts every candidate configuration from that profile. It then runs the
baseline and the most promising candidates in fresh processes until the time budget is spent; ``thorough`` runs all of
them. Near-ties are timed again, interleaved. `cached` finds an earlier plan. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from paceline.launch.machine import Machine, survey
from paceline.planner import plan_cache
from paceline.planner.candidates import JobFacts, allowed, candidates, check, planned, refusal, split
from paceline.planner.choose import Candidate, choose, choose_requested, correct, run_off, tied
from paceline.planner.cost_model import predicted_s
from paceline.planner.measure.profile import Profile, run_profile
from paceline.planner.measure.stopwatch import MIN_STEPS, TIMEOUT_FACTOR, WARM_UP_STEPS
from paceline.planner.measure.trial import Trial, measure, merge
from paceline.planner.plan_cache import by_fingerprint, cached, confirm, fingerprint, promise, store
from paceline.planner.plan_file import Plan, Row
from paceline.registry import BASELINE, REPRODUCIBLE, SHARES

__all__ = ["Plan", "Row", "by_fingerprint", "cached", "confirm", "fingerprint", "make", "promise", "store"]

MIN_BUDGET_S, BUDGET_SHARE = 15.0, 0.05
PATIENT_S, LONG_STEP_S, LONG_STEPS = 60.0, 2.0, 6  # of a plan that someone waits for; where steps are longer, per row
PROFILE_SHARE, THOROUGH_PROFILE_S = 1 / 3, 30.0
TIMED_S = (0.6, 2.5)  # minimum and maximum of timed seconds per trial
PROMISING = 1.3  # times the best: a candidate predicted slower is not tried; predictions err by less than this
FEW_TRIALS = 3  # at least so many share the time that is left
MAX_ROUNDS = 4  # in which the two fastest are timed again, interleaved
MAX_ATTEMPTS = 6  # until two candidates have run
STEPS, SHRUNK_STEPS = 5.0, 3.0  # minimum steps of a trial, warm-up included
SIMPLER = 0.03  # per option, and for several processes: candidates predicted this close are tried simplest first
DETERMINISTIC = f"{REPRODUCIBLE}:{SHARES}"

Show = Callable[[str], None]
Tell = Callable[[Candidate, Sequence[Candidate], int, int], None]  # one that was tried, all, which it is of how many


def make(
    command: Sequence[str],
    *,
    fidelity: str = "exact",
    budget_s: float | None = None,
    thorough: bool = False,
    rows: Sequence[str] | None = None,
    reproducible: bool = False,
    patient: bool = False,
    show: Show = lambda doing: None,
    tell: Tell = lambda one, all_of_them, number, total: None,
) -> Plan:
    """The plan for ``command`` (what follows `paceline run`), which is also stored in the cache.

    ``budget_s``: by default 5 % of the predicted run or 15 s, whichever is larger; ``patient``: 60 s, or where a step
    of the baseline takes over 2 s six of them for each configuration. ``rows``: only these configurations; the plan is
    not stored. ``reproducible``: the deterministic configuration is chosen, and the reason states its cost; the plan is
    not stored. ``show`` receives progress messages, ``tell`` each configuration that was tried. Raises ValueError when
    no configuration ran.
    """
    check(fidelity)
    for configuration in rows or ():
        split(configuration, 1)
    if rows and not any(allowed(configuration, fidelity) for configuration in rows):
        raise ValueError(f"--rows {','.join(rows)}: none is {fidelity}; add --fidelity rounded, or give others")
    start = time.monotonic()
    machine = survey()
    show("profiling")
    least_s = PATIENT_S if patient else MIN_BUDGET_S
    profile_s = THOROUGH_PROFILE_S if thorough else (budget_s or least_s) * PROFILE_SHARE
    profile, failure = run_profile(command, fidelity, profile_s, machine)
    start_s = time.monotonic() - start - profile.spent_s if profile else 4.0  # the time to start and to end
    facts = profile.facts if profile else JobFacts(rows=machine.cores)  # enough samples for every candidate
    if profile and not (thorough or rows or reproducible) and (earlier := by_fingerprint(profile.fingerprint, machine)):
        measured = any(row.measured_s for row in earlier.rows)
        if measured or (budget_s is None and not patient):  # an explicit budget is used if no measurement exists
            store(earlier, command, machine)
            how = "measured before" if measured else "as before; `paceline plan` measures"
            return dataclasses.replace(earlier, reason=f"{earlier.reason} ({how})")
    names = list(rows or candidates(fidelity, machine, facts, planned(), thorough))
    names += [DETERMINISTIC] if reproducible and DETERMINISTIC not in names else []
    entries = [_candidate(name, profile, facts, machine) for name in names]
    budget = _Budget(start, _budget_s(budget_s, patient, profile, entries), thorough, start_s, budget_s is None)
    worth = _worth_trying(entries, fidelity, thorough)
    for number, entry in enumerate(worth):
        if thorough or entry.engine == DETERMINISTIC or budget.allows(entry, entries, fidelity):
            show(f"trying {entry.engine}{_so_far(entries, fidelity)}")
            entry.trial = budget.trial(command, entry, _num_promising(worth[number:]))
        tell(entry, entries, number + 1, len(worth))
    _retime_ties(command, entries, fidelity, budget, show)
    correct(entries)
    chosen, reason, found = choose(entries, fidelity, facts)
    if reproducible:
        chosen, reason, found = choose_requested(found, chosen, DETERMINISTIC)
    reason += f"; no predictions: {failure.removeprefix('paceline: ')}" if failure else ""
    plan = Plan(
        chosen,
        reason,
        found,
        facts.rows if profile else None,
        fidelity,
        profile.fingerprint if profile else "",
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(machine).items()},
        plan_cache.versions(),
    )
    if profile and not rows and not reproducible:
        store(plan, command, machine)
    return plan


def _candidate(name: str, profile: Profile | None, facts: JobFacts, machine: Machine) -> Candidate:
    seconds = predicted_s(name, profile, machine.cores) if profile else None
    return Candidate(name, seconds, refusal=refusal(name, facts, machine))


def _so_far(entries: Sequence[Candidate], level: str) -> str:
    ranking = run_off(entries, level)
    return f"; fastest so far: {ranking[0].engine}, {ranking[0].step_s:.3g} s per step" if ranking else ""


def _budget_s(requested: float | None, patient: bool, profile: Profile | None, entries: Sequence[Candidate]) -> float:
    if requested is not None:
        return requested
    if patient:
        base_s = entries[0].predicted_s or 0.0
        return PATIENT_S if base_s <= LONG_STEP_S else LONG_STEPS * base_s * len(entries)
    known = [entry.predicted_s for entry in entries if entry.predicted_s]
    run_s = (profile.steps if profile else 0) * min(known, default=0.0)
    return max(MIN_BUDGET_S, BUDGET_SHARE * run_s)


def _worth_trying(entries: Sequence[Candidate], level: str, thorough: bool) -> list[Candidate]:
    """The baseline, then the others by predicted time; candidates without a prediction come last, in their order."""

    def ranking_s(one: Candidate) -> float:
        extras = one.engine.count("+") + (split(one.engine, 1).copies > 1)
        return (one.predicted_s or float("inf")) * (1 + SIMPLER * extras)

    eligible = [entry for entry in entries if not entry.refusal and (thorough or allowed(entry.engine, level))]
    if not eligible:  # memory predictions are too rough to refuse every candidate
        entries[0].refusal, eligible = "", [entries[0]]
    base, *others = eligible
    return [base, *sorted(others, key=ranking_s)]


def _promises(one: Candidate, best: Candidate) -> bool:
    return not (one.predicted_s and best.predicted_s and one.predicted_s > PROMISING * best.predicted_s)


def _num_promising(ahead: Sequence[Candidate]) -> int:
    """Of those that are still to be tried, which may be the fastest."""
    known = sorted((one for one in ahead if one.predicted_s), key=lambda one: one.predicted_s or 0.0)
    return sum(_promises(one, known[0]) for one in known)


@dataclasses.dataclass
class _Budget:
    """The time budget in seconds, and how much of it each trial may use. ``lenient``: nobody has asked for it, and the
    baseline and another configuration are always measured."""

    start: float
    seconds: float
    thorough: bool
    start_s: float
    lenient: bool = False

    @property
    def left_s(self) -> float:
        return self.start + self.seconds - time.monotonic()

    def allows(self, entry: Candidate, entries: Sequence[Candidate], level: str) -> bool:
        """Whether a trial fits the budget and may find the fastest. Without predictions two candidates always run."""
        ranking, attempts = run_off(entries, level), sum(bool(one.trial) for one in entries)
        if len(ranking) < 2 and attempts < MAX_ATTEMPTS and not any(one.predicted_s for one in entries):
            return True
        step_s = entry.predicted_s or 0.0
        need_s = self.start_s + max(TIMED_S[0], (SHRUNK_STEPS if self._shrinks(entry) else STEPS) * step_s)
        if entry.engine == BASELINE:
            need_s += self.start_s + TIMED_S[0]  # a single trial goes to the most promising candidate
        few = len(ranking) < 2 and attempts < MAX_ATTEMPTS
        if self.left_s < need_s:
            return few and self.lenient
        if few:
            return True
        return not ranking or _promises(entry, ranking[0])

    def _timed_s(self, num_trials: int = FEW_TRIALS, step_s: float = 0.0) -> float:
        """So that there is time for so many trials of steps of ``step_s``, of which long ones are timed for longer."""
        low, high = TIMED_S
        if self.thorough:
            return high
        share_s = self.left_s / max(FEW_TRIALS, num_trials) - self.start_s - WARM_UP_STEPS * step_s
        return min(high, max(low, share_s / (TIMEOUT_FACTOR if MIN_STEPS * step_s > share_s else 1)))

    def _shrinks(self, entry: Candidate) -> bool:
        """Whether the baseline is timed on smaller batches and extrapolated, because its steps are long."""
        long = (entry.predicted_s or 0.0) * 4 > 2 * self._timed_s()
        return long and entry.engine == BASELINE and not self.thorough

    def trial(self, command: Sequence[str], entry: Candidate, num_trials: int = FEW_TRIALS) -> Trial | None:
        """One of so many. None if the budget ran out before it ended: such a trial gives no information."""
        known = entry.predicted_s is not None
        least_s = self.start_s + 3 * STEPS * (entry.predicted_s or 0.0) if self.lenient else 1.0
        limit_s = 120.0 if self.thorough else max(least_s, self.left_s) if known else max(60.0, 3 * self.left_s)
        shrinks = self._shrinks(entry)
        timed_s = self._timed_s() if shrinks else self._timed_s(num_trials, entry.predicted_s or 0.0)
        ran = measure(command, entry.engine, timed_s=timed_s, limit_s=limit_s, shrinks=shrinks)
        return None if ran.late and known and not self.thorough else ran


def _retime_ties(command: Sequence[str], entries: Sequence[Candidate], level: str, budget: _Budget, show: Show) -> None:
    """Times the two fastest again, interleaved (A B, B A, ...), until they differ by more than noise or time is up."""
    ranking = run_off(entries, level)[:2]
    trials = {entry.engine: [entry.trial] for entry in ranking if entry.trial and not entry.trial.extrapolated}
    if len(trials) < 2:
        return
    for number in range(MAX_ROUNDS):
        one, other = (entry.ran for entry in ranking)
        if not one or not other or not tied(one, other):
            return
        for entry in ranking if number % 2 else reversed(ranking):
            if not budget.thorough and budget.left_s < budget.start_s + TIMED_S[0]:
                return
            show(f"{ranking[0].engine} against {ranking[1].engine}")
            repeated = budget.trial(command, entry)
            if repeated is None or repeated.error:
                return
            trials[entry.engine].append(repeated)
            entry.trial = merge([trial for trial in trials[entry.engine] if trial])
