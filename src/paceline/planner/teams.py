"""Scale-out plan: each number of nodes as one line, prediction beside measurement, and the answer in a sentence.

Keys of a team, nodes that train together: ``nodes``; ``hosts`` (names separated by commas; empty if hypothetical);
``batch`` ("shared", strong scaling: the job's global batch is divided among the nodes; "each", weak scaling: every node
has the batch of one node alone); ``batch_size`` (global); ``engines`` (the configuration of each node); ``link`` (the
hypothetical network; empty: as measured); ``assumed`` (network values that were neither measured nor given);
``predicted_s``, ``measured_s``, ``spread_s`` (seconds per step); ``per_s`` (samples per second of all nodes, measured
if possible); ``predicted_speedup``, ``measured_speedup`` (throughput over that of the fastest machine alone);
``efficiency`` (throughput over the sum of the single machines'); ``sent_bytes`` (by each node, per step); ``exposed_s``
(predicted seconds per step of communication without overlap); ``factors`` (how many fully-connected layers are sent as
factors); ``forms`` (the representation of each such layer and the cost of both, the largest first); ``reason``.

`WhatIf` parses a hypothetical cluster or network, such as `nodes=8,link=10gbit,latency=5ms`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WORTH = 1.05  # the least speedup for which further machines are used
SAME = 0.03  # relative: this close to the best, fewer machines are preferred
WAITS = 0.1  # of a step: with more exposed communication, the reason names the network
SHARED, EACH = "shared", "each"
FAILED = "failed: "  # prefix of a reason
MAX_LAYERS = 6  # printed below a table; all are in the plan


@dataclass(frozen=True)
class Team:
    """Nodes that train together. The module's docstring explains the keys."""

    nodes: int
    hosts: str = ""
    batch: str = SHARED
    batch_size: int | None = None
    engines: str = ""
    link: str = ""
    assumed: str = ""
    predicted_s: float | None = None
    measured_s: float | None = None
    spread_s: float | None = None
    per_s: float | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    efficiency: float | None = None
    sent_bytes: float | None = None
    exposed_s: float | None = None
    factors: str = ""
    forms: str = ""
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Its trial failed, so its prediction no longer counts; or it is refused, and has none."""
        return self.reason.startswith(FAILED)

    @property
    def speedup(self) -> float:
        """The measured speedup, else the predicted one."""
        return self.measured_speedup or self.predicted_speedup or 0.0

    @property
    def numbers(self) -> str:
        both = ((self.predicted_speedup, "predicted"), (self.measured_speedup, "measured"))
        return ", ".join(f"{times:.2f}x {word}" for times, word in both if times)

    @property
    def waiting(self) -> str:
        """How much of a step waits for the network; empty if that is little."""
        if not self.exposed_s or not self.predicted_s or self.exposed_s < WAITS * self.predicted_s:
            return ""
        return f"{self.exposed_s * 1e3:.0f} of {self.predicted_s * 1e3:.0f} ms wait for the network"


def answer(teams: Sequence[Team]) -> tuple[int, str]:
    """(how many machines to use for the job, a sentence that says so). The first team must be one machine."""
    real = [team for team in teams[1:] if team.hosts]
    if not real:
        return 1, _imagined(teams)
    shared, each = ([team for team in real if team.batch == kind and not team.failed] for kind in (SHARED, EACH))
    num_hosts = max(team.nodes for team in real)
    if not shared:
        return 1, f"stay on one machine: {_why_not(real)}"
    estimated = _estimate(shared)
    best = max(shared, key=estimated)
    chosen = next(team for team in shared if estimated(team) >= estimated(best) * (1 - SAME))
    if estimated(chosen) >= WORTH:
        return chosen.nodes, f"{_subject(chosen.nodes, num_hosts)} worth it: {chosen.numbers}"
    best = max((team for team in shared if team.measured_speedup), key=estimated, default=best)
    why = f" ({best.waiting})" if best.waiting else ""
    sentence = f"stay on one machine: {best.nodes} are {best.numbers} with a global batch of {best.batch_size}{why}"
    estimated = _estimate(each)
    if each and estimated(larger := max(each, key=estimated)) >= WORTH:
        sentence += f"; with {larger.batch_size} they would be {larger.numbers}"
    return 1, sentence


def _estimate(teams: Sequence[Team]) -> Callable[[Team], float]:
    """The speedup of a team: measured, else predicted and corrected by the median error of the measured teams."""
    both = ((team.measured_speedup, team.predicted_speedup) for team in teams)
    tried = [measured / predicted for measured, predicted in both if measured and predicted]
    times = statistics.median(tried or [1.0])
    return lambda team: team.measured_speedup or times * team.speedup


def _why_not(real: Sequence[Team]) -> str:
    """Why no team shares the job's global batch: a trial failed, or the batch is too small."""
    if failed := next((team for team in real if team.failed and team.batch == SHARED), None):
        return f"{failed.nodes} {failed.reason}"
    fewest = min(real, key=lambda team: team.nodes)
    return f"a global batch of {(fewest.batch_size or 0) // fewest.nodes} has fewer samples than {fewest.nodes} nodes"


def _imagined(teams: Sequence[Team]) -> str:
    if len(teams) < 2:
        return "one machine"
    best = max(teams[1:], key=lambda team: team.speedup)
    link, assumed = f" over {best.link}" if best.link else "", f"; {best.assumed}" if best.assumed else ""
    if best.failed:
        return f"stay on one machine: of {best.nodes} like this one{link}, {best.reason.removeprefix(FAILED)}"
    if best.speedup < WORTH:
        why = f" ({best.waiting})" if best.waiting else ""
        return f"stay on one machine: {best.nodes} like this one{link} would be {best.numbers}{why}{assumed}"
    kind = "" if best.batch == SHARED else f" and a global batch of {best.batch_size}"
    return f"{best.nodes} machines like this one{link}{kind} would be {best.numbers}{assumed}"


def _subject(nodes: int, num_hosts: int) -> str:
    if num_hosts == 2:
        return "the second machine is"
    return f"all {nodes} machines are" if nodes == num_hosts else f"{nodes} of {num_hosts} machines are"


def describe_factors(teams: Sequence[Team]) -> list[str]:
    """Lines below the table: layers sent as factors, for the first team and each team where their number changes."""
    found, before = list[str](), ""
    for team in teams:
        if team.forms and team.factors != before:
            begins = f"{team.nodes} nodes{f' over {team.link}' if team.link else ''}: {team.factors} layers as factors"
            found += [f"{begins}, by prediction", *(f"  {line}" for line in team.forms.split("; ")[:MAX_LAYERS])]
            before = team.factors
    return found


RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
TIMES = {"ms": 1e-3, "us": 1e-6, "s": 1.0}
MAX_NODES = 4096
FORM = "nodes=8,link=10gbit,latency=5ms, each of them only where it differs"


@dataclass(frozen=True)
class WhatIf:
    """A hypothetical cluster; None: as measured. *Units*: bits per second; seconds."""

    nodes: int | None = None
    bits_per_s: float | None = None
    latency_s: float | None = None
    description: str = ""

    @classmethod
    def parse(cls, text: str) -> WhatIf:
        """Parses an option of --what-if. Raises ValueError."""
        given: dict[str, str] = {}
        for word in text.split(","):
            key, equals, value = word.strip().partition("=")
            if not equals or key not in ("nodes", "link", "latency") or key in given:
                raise ValueError(f"--what-if {text!r}: {word.strip()!r} is not understood; accepted: {FORM}")
            given[key] = value
        nodes = given.get("nodes")
        if nodes is not None and not (nodes.isdecimal() and 1 < int(nodes) <= MAX_NODES):
            raise ValueError(f"--what-if {text!r}: nodes must be a whole number from 2 to {MAX_NODES}, got {nodes!r}")
        return cls(
            int(nodes) if nodes else None,
            rate(given["link"]) if "link" in given else None,
            duration(given["latency"]) if "latency" in given else None,
            ", ".join([given[key] + " latency" * (key == "latency") for key in ("link", "latency") if key in given]),
        )


def rate(text: str) -> float:
    """Bits per second. Raises ValueError."""
    return _number(text, RATES, "a link's rate", "1gbit, 2.5gbit or 100mbit")


def duration(text: str) -> float:
    """Seconds. Raises ValueError."""
    return _number(text, TIMES, "a latency", "5ms or 200us")


def _number(text: str, units: dict[str, float], what: str, accepted: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if not match or match[2] not in units or not float(match[1]):
        raise ValueError(f"{text!r} is not {what}; accepted: a number above 0 and its unit, as in {accepted}")
    return float(match[1]) * units[match[2]]
