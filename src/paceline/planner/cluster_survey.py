"""Prediction of clusters from nodes measured one by one: their configurations, batch sizes and seconds per step.

Nodes are sorted, the fastest first. Hypothetical further machines repeat the measured ones in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.data.load_balance import fair_shares
from paceline.messages import FACTORS
from paceline.planner.cluster_model import NetworkModel, predict
from paceline.planner.measure.trial import Trial
from paceline.planner.methods import FIDELITIES, REFUSED, MeasuredMethod, Method, first_refusal, on_all, reason
from paceline.planner.plan_file import CHOSEN, Plan, Row
from paceline.planner.step_model import StepModel
from paceline.planner.teams import EACH, FAILED, SHARED, Team, WhatIf

UNMEASURED = NetworkModel(2e-4, 1.0, 3e-10, 6e-10, assumed=True)  # typical values; the user always gives the rate
EQUAL_WITHIN = 0.1  # relative difference of speed up to which nodes get equal shares


@dataclass(frozen=True)
class Node:
    """One machine's own measurements: its plan, and step models with the whole batch and a quarter of it."""

    name: str
    plan: Plan
    batch_size: int
    whole: StepModel
    quarter: StepModel
    methods: tuple[MeasuredMethod, ...] = ()

    @classmethod
    def of(cls, name: str, report: dict[str, Any]) -> Node:
        whole, quarter = (StepModel.read(step_model) for step_model in report["lines"])
        methods = tuple(map(MeasuredMethod.of, report["methods"]))
        return cls(name, Plan.of(report["plan"]), report["batch_size"], whole, quarter, methods)

    @property
    def rows(self) -> int:
        """Samples of the recorded step: fewer than the batch size if the data set has fewer."""
        return round(self.whole.rows)

    def measured(self, engine: str) -> Row | None:
        return next((one for one in self.plan.rows if one.engine == engine and one.measured_s), None)

    def step_model(self, rows: float, engine: str) -> StepModel:
        """A step of ``rows`` samples: the recorded step model, scaled to the measured time of ``engine``."""
        ran = self.measured(engine)
        step_model = self.whole.at(rows, self.quarter)
        return step_model.scaled(ran.measured_s / self.whole.alone_s()) if ran and ran.measured_s else step_model

    def alone_s(self, engine: str) -> float:
        return self.step_model(self.whole.rows, engine).alone_s()

    def cost_per_sample(self, engine: str) -> tuple[float, float]:
        """(constant seconds per step, seconds per sample)."""
        few, many = self.step_model(self.quarter.rows, engine).alone_s(), self.alone_s(engine)
        apart = self.whole.rows - self.quarter.rows
        per_row = (many - few) / apart if apart > 0 and many > few else many / self.whole.rows
        return max(0.0, many - per_row * self.whole.rows), per_row


@dataclass
class TeamTrial:
    """A team: its prediction, the configuration and samples of each node, and its trial."""

    team: Team
    rows: tuple[str, ...]
    shares: tuple[int, ...]
    trial: Trial | None = None


def assign_samples(total: int, nodes: Sequence[Node], rows: Sequence[str]) -> tuple[int, ...]:
    """Samples per node: equal for nodes of similar speed, else such that the slowest node ends as early as possible."""
    costs = [node.cost_per_sample(engine) for node, engine in zip(nodes, rows, strict=True)]
    each_s = [fixed + per_row * total / len(nodes) for fixed, per_row in costs]
    if max(each_s) <= min(each_s) * (1 + EQUAL_WITHIN):
        costs = [(0.0, 1.0)] * len(nodes)
    fixed_s, per_row_s = zip(*costs, strict=True)
    return fair_shares(total, fixed_s, per_row_s, [1] * len(nodes), [total] * len(nodes))


def divided(nodes: Sequence[Node], rows: Sequence[str], kind: str) -> tuple[list[StepModel], tuple[int, ...]]:
    """(the step of each node, samples per node). Raises ValueError for fewer samples than nodes."""
    total = nodes[0].batch_size * len(nodes) if kind == EACH else nodes[0].rows
    if total < len(nodes):
        raise ValueError(f"a global batch of {total} samples is too small for {len(nodes)} nodes; raise --batch-size")
    shares = assign_samples(total, nodes, rows)
    return [node.step_model(n, engine) for node, engine, n in zip(nodes, rows, shares, strict=True)], shares


def assumed(network: NetworkModel, what: WhatIf) -> str:
    """The network values that a prediction over a hypothetical link assumes."""
    if not network.assumed:
        return ""
    work = f"{1e9 * (network.adding_s + network.cpu_s):.1f} ns of work per byte"
    latency = f"latency assumed {network.latency_s * 1e3:g} ms"
    return f"{work} assumed" if what.latency_s is not None else f"{latency}, and {work}"


class Survey:
    """Nodes, the fastest first; ``network(n)``: the network between the first n. ``real``: the nodes are hosts."""

    def __init__(self, nodes: Sequence[Node], network: Callable[[int], NetworkModel], real: bool):
        self.engine_of = {node.name: node.plan.chosen for node in nodes}
        self.nodes = sorted(nodes, key=lambda node: node.alone_s(self.engine_of[node.name]))
        self.network, self.real = network, real
        first = self.nodes[0]
        ran = first.measured(self.engine_of[first.name])
        self.alone_per_s = [node.rows / node.alone_s(self.engine_of[node.name]) for node in self.nodes]
        self.measured_per_s = first.rows / ran.measured_s if ran and ran.measured_s else None
        self.alone = Team(
            1,
            first.name if real else "",
            batch_size=first.batch_size,
            engines=self.engine_of[first.name],
            predicted_s=ran.predicted_s if ran and ran.predicted_s else first.alone_s(self.engine_of[first.name]),
            measured_s=ran.measured_s if ran else None,
            spread_s=ran.spread_s if ran else None,
            per_s=self.measured_per_s or self.alone_per_s[0],
            predicted_speedup=1.0,
            measured_speedup=1.0 if ran else None,
            efficiency=1.0,
            sent_bytes=0.0,
            exposed_s=0.0,
        )

    def _first(self, count: int) -> list[Node]:
        return [self.nodes[i % len(self.nodes)] for i in range(count)]

    def _network(self, count: int, what: WhatIf | None) -> NetworkModel:
        network = self.network(min(count, len(self.nodes)))
        return network.with_link(what.bits_per_s, what.latency_s) if what else network

    def methods(self, team: Team, what: WhatIf | None = None) -> tuple[Method, ...]:
        """Each method of communication, as ``team`` would train with it. ``what``: the team's hypothetical network."""
        nodes, network = self._first(team.nodes), self._network(team.nodes, what)
        models, _ = divided(nodes, [self.engine_of[node.name] for node in nodes], team.batch)
        own_s, found = team.predicted_s or 0.0, list[Method]()
        own = next((each.fidelity for each in nodes[0].methods if each.chosen), FIDELITIES[0])
        for first in nodes[0].methods:
            per_node = on_all(first, [node.methods for node in nodes[1:]])
            line = Method(first.exchange, first.codec, team.nodes, team.batch_size, team.link, first.fidelity)
            if refused := first_refusal(per_node):
                found.append(replace(line, reason=REFUSED + refused))
                continue
            pairs = zip(models, per_node, strict=True)
            seen = predict([replace(model, ways=each.traffic) for model, each in pairs], network)
            found.append(
                replace(
                    line,
                    predicted_s=seen.step_s,
                    predicted_speedup=seen.per_s / self.alone_per_s[0],
                    sent_bytes=seen.sent_bytes,
                    exposed_s=seen.exposed_s,
                    reason=CHOSEN if first.chosen else reason(own_s, seen.step_s, first.fidelity, own),
                )
            )
        return tuple(found)

    def team(self, count: int, kind: str, what: WhatIf | None = None) -> TeamTrial | None:
        """The predicted team of ``count`` nodes; None if the batch has fewer samples than nodes."""
        nodes = self._first(count)
        rows = tuple(self.engine_of[node.name] for node in nodes)
        network = self._network(count, what)
        if kind == SHARED and nodes[0].rows < count:
            return None
        models, shares = divided(nodes, rows, kind)
        prediction = predict(models, network)
        ideal = sum(self.alone_per_s[i % len(self.nodes)] for i in range(count))
        team = Team(
            count,
            ",".join(node.name for node in nodes) if self.real and not what else "",
            kind,
            int(prediction.rows),
            ",".join(rows),
            what.description if what else "",
            assumed(network, what) if what else "",
            prediction.step_s,
            per_s=prediction.per_s,
            predicted_speedup=prediction.per_s / self.alone_per_s[0],
            efficiency=prediction.per_s / ideal,
            sent_bytes=prediction.sent_bytes,
            exposed_s=prediction.exposed_s,
            factors=f"{prediction.forms.count(FACTORS)} of {len(prediction.why)}" if prediction.why else "",
            forms="; ".join(prediction.why),
            reason="predicted only",
        )
        own = [each for node in nodes for each in node.methods if each.chosen]
        if own and (refused := first_refusal(own)):
            team = Team(count, team.hosts, kind, team.batch_size, team.engines, team.link, reason=FAILED + refused)
        return TeamTrial(team, rows, shares)

    def with_trial(self, one: TeamTrial) -> Team:
        """The team with the measurements of its trial beside the prediction."""
        trial = one.trial
        if trial is None:
            return one.team
        if trial.error:
            return replace(one.team, reason=f"{FAILED}{trial.error}")
        rows, wanted = round(trial.per_s * trial.step_s), one.team.batch_size or 0
        per_s, reason = trial.per_s, one.team.waiting
        if rows != wanted:
            reason = "; ".join(filter(None, (f"its steps had {rows} samples, as the data set provides", reason)))
        base, predicted_s = self.measured_per_s, one.team.predicted_s or trial.step_s
        return replace(
            one.team,
            measured_s=trial.step_s,
            spread_s=trial.spread_s,
            per_s=per_s,
            measured_speedup=per_s / base if base else None,
            efficiency=(one.team.efficiency or 0.0) * per_s * predicted_s / wanted if wanted else None,
            reason=reason,
        )
