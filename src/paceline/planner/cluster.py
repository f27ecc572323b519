"""The planner for several hosts: how many nodes to use, from measured nodes and network and a few trials.

    wire      measure the network between every pair of nodes, and all-reduces of all nodes
    node      on each node alone: make its plan, and time a step layer by layer with the batch and a quarter of it
    predict   1 to N nodes, the fastest first: the global batch divided by their speed, or the same batch on each
    try       run the most promising teams for a few real steps
    answer    the fewest machines that are as fast as any, or one

Hypothetical machines repeat the measured ones in order; a hypothetical link replaces the measured one.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.exchange.flow.costs import CostFunction, ring
from paceline.launch.ask_hosts import RemoteQuery
from paceline.launch.child_processes import ScratchFolder
from paceline.launch.hosts import Host
from paceline.messages import SUM
from paceline.planner import plan_cache
from paceline.planner import planner as planning
from paceline.planner.cluster_model import NetworkModel
from paceline.planner.cluster_survey import UNMEASURED, Node, Survey, TeamTrial
from paceline.planner.measure.node_agent import measure_node
from paceline.planner.measure.trial import Trial
from paceline.planner.methods import Method
from paceline.planner.plan_file import CHOSEN, Between
from paceline.planner.planner import Plan
from paceline.planner.teams import EACH, SHARED, Team, WhatIf, answer

TRIES = 4  # teams that are run
WIRE_LIMIT_S, START_LIMIT_S = 120.0, 240.0
TRIAL_S, TRIAL_LIMIT_S = 2.5, 120.0

Show = Callable[[str], None]


def make_over(
    hosts: Sequence[Host],
    remote: RemoteQuery,
    command: Sequence[str],
    *,
    fidelity: str = "exact",
    budget_s: float | None = None,
    rows: Sequence[str] | None = None,
    what_if: Sequence[WhatIf] = (),
    trial_s: float = TRIAL_S,
    show: Show = lambda doing: None,
) -> tuple[Plan, str]:
    """(the plan for ``command`` over ``hosts``, the answer in a sentence). Caches the plan unless ``rows`` are given.

    Raises ValueError with the error message of a host that cannot take part.
    """
    from paceline.planner.measure.network import NetworkMeasurement

    names = [host.name for host in hosts]
    if len(hosts) == 1:
        check_links(what_if)
    show("measuring the network between the hosts")
    reply = remote.query(hosts, {"do": "wire"}, WIRE_LIMIT_S)[names[0]] if len(hosts) > 1 else None
    measured = NetworkMeasurement.of(reply) if reply else NetworkMeasurement(1)
    show("measuring each host by itself")
    budget_s = budget_s or planning.MIN_BUDGET_S  # the wait for a host needs a deadline
    request = {"do": "node", "command": list(command), "fidelity": fidelity, "budget_s": budget_s, "rows": rows}
    limit_s = START_LIMIT_S + 20 * budget_s
    replies = remote.query(hosts, request, limit_s)
    nodes = [Node.of(name, replies[name]) for name in names]
    sizes = {node.batch_size for node in nodes}
    if len(sizes) > 1:
        given = ", ".join(f"{node.name} {node.batch_size}" for node in nodes)
        raise ValueError(f"the hosts gave the same script different batch sizes: {given}; make it the same everywhere")
    rank_of = {name: i for i, name in enumerate(names)}

    def network(count: int) -> NetworkModel:
        ranks = [rank_of[node.name] for node in survey.nodes[:count]]
        return measured.model_for(ranks, collectives_by(measured.collective)) if len(hosts) > 1 else _unmeasured()

    survey = Survey(nodes, network, real=True)
    found = [survey.team(count, kind) for kind in (SHARED, EACH) for count in range(2, len(hosts) + 1)]
    tries = [one for one in found if one]
    by_name = {host.name: host for host in hosts}
    for one in promising([one for one in tries if not one.team.failed]):
        show(f"trying {one.team.nodes} hosts with a global batch of {one.team.batch_size}")
        one.trial = _run(remote, [by_name[name] for name in one.team.hosts.split(",")], one, command, trial_s)
    teams = [survey.alone, *(survey.with_trial(one) for one in tries), *_imagined(survey, what_if)]
    pairs = (Between(names[pair.one], names[pair.other], pair.latency_s, pair.bytes_per_s) for pair in measured.pairs)
    plan = dataclasses.replace(_plan(survey, teams, what_if), pairs=tuple(pairs))
    if not rows:  # with ``rows`` the choice is not among all candidates
        plan_cache.store_over(plan, names, command)
    return plan, plan.reason


def imagine(
    made: Plan, command: Sequence[str], what_if: Sequence[WhatIf], budget_s: float | None = None
) -> tuple[Plan, str]:
    """``made``, the plan for this machine, extended by teams of equal machines. Every ``what_if`` must name a link."""
    check_links(what_if)
    report = measure_node(list(command), made.fidelity, budget_s, made=made)
    survey = Survey([Node.of(made.machine.get("name", "here"), report)], lambda _: _unmeasured(), real=False)
    plan = _plan(survey, [survey.alone, *_imagined(survey, what_if)], what_if)
    return dataclasses.replace(plan, num_nodes=None, hosts={}, reason=made.reason, chosen=made.chosen), plan.reason


def _unmeasured() -> NetworkModel:
    return dataclasses.replace(UNMEASURED, collectives=collectives_by(os.environ.get("PACELINE_COLLECTIVE", "")))


def check_links(what_if: Sequence[WhatIf]) -> None:
    """Raises ValueError for a hypothetical cluster without a link, if no link was measured."""
    if missing := [what for what in what_if if what.bits_per_s is None]:
        raise ValueError(
            f"a prediction for {missing[0].nodes or 2} machines needs the link between them, and without -H there is "
            f"none to measure; add its rate, as in link=1gbit"
        )


def collectives_by(name: str) -> Callable[[int], CostFunction]:
    """The costs of collectives among so many nodes, all-reduces by the one of that name; if it is empty, gloo's."""
    if not name:
        return ring
    from paceline.link.net.collective_run import Collective  # it imports torch

    collective = Collective(name)

    def of(nodes: int) -> CostFunction:
        return lambda operation, num_bytes: (
            collective.cost(nodes, num_bytes // 4 * 4) if operation == SUM else ring(nodes)(operation, num_bytes)
        )

    return of


def promising(tries: Sequence[TeamTrial]) -> list[TeamTrial]:
    """The teams to run: alternating between both kinds of batch, the fastest by prediction first."""
    kinds = [
        sorted((one for one in tries if one.team.batch == kind), key=lambda one: -(one.team.predicted_speedup or 0.0))
        for kind in (SHARED, EACH)
    ]
    longest = max(map(len, kinds), default=0)
    return [kind[i] for i in range(longest) for kind in kinds if i < len(kind)][:TRIES]


def _run(remote: RemoteQuery, hosts: Sequence[Host], one: TeamTrial, command: Sequence[str], trial_s: float) -> Trial:
    times = one.team.nodes if one.team.batch == EACH else 1
    request: dict[str, Any] = {"do": "trial", "command": list(command), "rows": one.rows, "times": times}
    shares = ",".join(map(str, one.shares)) if len(set(one.shares)) > 1 else "equal"
    limit_s = TRIAL_LIMIT_S + 20 * trial_s
    request |= {"timed_s": trial_s, "limit_s": limit_s}
    with ScratchFolder() as folder:
        plan_path = Path(folder) / "plan.toml"
        Plan(one.rows[0], hosts=dict(zip((host.name for host in hosts), one.rows, strict=True))).write(plan_path)
        options = ["--plan", str(plan_path), "--shares", shares]
        try:
            reply = remote.query(hosts, request, limit_s + START_LIMIT_S, options)[hosts[0].name]
        except (ValueError, TimeoutError) as error:
            return Trial(one.rows[0], error=str(error).splitlines()[-1])
    return Trial(**{**reply, "steps_s": tuple(reply["steps_s"])})


def _imagined(survey: Survey, what_if: Sequence[WhatIf]) -> list[Team]:
    """Predicted teams of each hypothetical cluster; by default as many nodes as were measured, at least two."""
    found = []
    for what in what_if:
        count = what.nodes or max(2, len(survey.nodes))
        found += [survey.team(count, kind, what) for kind in (SHARED, EACH)]
    return [one.team for one in found if one]


def _methods(survey: Survey, teams: Sequence[Team], count: int, what_if: Sequence[WhatIf]) -> tuple[Method, ...]:
    """Of the team to use; where that is one machine, of the fastest team of real ones, if any."""
    real = [team for team in teams[1:] if team.hosts and not team.failed]
    used = [team for team in real if team.nodes == count and team.batch == SHARED]
    if not (among := used or real or [team for team in teams[1:] if not team.hosts]):
        return ()
    best = max(among, key=lambda team: team.speedup)
    return survey.methods(best, next((what for what in what_if if what.description == best.link), None))


def _plan(survey: Survey, teams: Sequence[Team], what_if: Sequence[WhatIf]) -> Plan:
    """The plan of the fastest node with all teams; its reason is the answer in a sentence."""
    count, sentence = answer(teams)
    marked = tuple(
        dataclasses.replace(team, reason=CHOSEN)
        if team.nodes == count and (count == 1 or (team.hosts and team.batch == SHARED))
        else team
        for team in teams
    )
    first = survey.nodes[0]
    return dataclasses.replace(
        first.plan,
        chosen=survey.engine_of[first.name],
        reason=sentence,
        batch_size=first.batch_size,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions=plan_cache.versions(),
        num_nodes=count,
        hosts={node.name: survey.engine_of[node.name] for node in survey.nodes},
        teams=marked,
        methods=_methods(survey, teams, count, what_if),
    )
