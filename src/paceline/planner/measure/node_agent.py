"""Measurements of one node of several for a plan: its own step, the network, or a few steps together with the others.

The launcher starts `python -m paceline.planner.measure.node_agent JSON` on every host, as it would start a script. The
reply is one line on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.environment import LaunchEnvironment
from paceline.launch.ask_hosts import MARK
from paceline.launch.child_processes import ScratchFolder
from paceline.launch.machine import survey
from paceline.launch.supervise import trained_alone
from paceline.planner import planner as planning
from paceline.planner.candidates import split
from paceline.planner.measure import fresh_process, profile, trial
from paceline.planner.planner import Plan
from paceline.registry import ENCRYPTED, LINK, THREADS, head, says
from paceline.report.log import log

# this process's rank and rendezvous, which a single process that it starts must not inherit
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PACELINE_ENGINE", "PACELINE_SECRET", "PACELINE_HOST", "PACELINE_SHARES"),
)


def measure_node(
    command: list[str],
    fidelity: str = "exact",
    budget_s: float | None = None,
    rows: list[str] | None = None,
    made: Plan | None = None,
) -> dict[str, Any]:
    """Measures this machine alone: its plan (``made``, else cached, else made now), and a step layer by layer."""
    cached_plan, machine = None, survey()
    if not made and not rows:
        cached_plan, _ = planning.cached(command, fidelity)

    def record(made: Plan) -> profile.Recording:
        one, limit_s = single_process_engine(made, machine.cores), budget_s or planning.MIN_BUDGET_S
        return profile.record_step_models(command, one, fidelity, limit_s, machine, made.chosen)

    made = made or cached_plan or planning.make(command, fidelity=fidelity, budget_s=budget_s, rows=rows)
    recorded = record(made)
    if cached_plan and recorded.fingerprint != cached_plan.fingerprint:  # the same script trains another model
        made = planning.make(command, fidelity=fidelity, budget_s=budget_s)
        recorded = record(made)
    lines, methods = [recorded.whole, recorded.quarter], recorded.methods
    if says("engine", head(made.chosen)[0], "reproduces"):  # the recorded step used another exchange
        traffic = replace(recorded.whole.ways, factors=False, gathers=True)
        lines, methods = [replace(line, ways=traffic) for line in lines], ()
    return {
        "plan": made.to_dict(),
        "batch_size": recorded.batch_size,
        "lines": [asdict(line) for line in lines],
        "methods": [asdict(each) for each in methods],
        "machine": str(machine),
    }


def single_process_engine(made: Plan, cores: int) -> str:
    """The configuration that records a step: the plan's own, or threads on the same cores with the same options."""
    spec = split(made.chosen, cores)
    own = says("engine", spec.engine, "counts") in ("", "thread")
    engine = made.chosen.partition("+")[0] if own else f"{THREADS}:{cores}"
    return "+".join([engine, *(word for word in spec.words if word != "compile")])


def measure_network() -> dict[str, Any]:
    from paceline.elastic.membership import connect  # these import torch
    from paceline.planner.measure import network

    world = LaunchEnvironment.of_environment()
    name = os.environ.get("PACELINE_COLLECTIVE", "")
    # the same choice as for training on the CPU
    kind = ENCRYPTED if os.environ.get("PACELINE_ENCRYPT") == "1" else os.environ.get("PACELINE_LINK") or LINK
    link = connect(kind, world.node, world.num_nodes, world.host, world.port, collective=name).link
    found: dict[str, Any] = replace(network.measure(link), collective=name).to_dict()
    link.close()
    return found


def measure_trial(
    command: list[str], rows: list[str], timed_s: float = 2.5, limit_s: float = 120.0, times: int = 1
) -> dict[str, Any] | None:
    """Times a few steps of all nodes with ``times`` the job's global batch. Only rank 0 returns the result."""
    node = LaunchEnvironment.of_environment().node
    with ScratchFolder() as folder:
        report = Path(folder) / "trial.json"
        given = {"PACELINE_TRIAL": str(report), "PACELINE_TRIAL_S": str(timed_s), "PACELINE_TRIAL_TIMES": str(times)}
        given |= {"PACELINE_ENGINE": rows[node]}
        ended = fresh_process.run_in_process([sys.executable, *command], given, limit_s)
        found = trial.result_of(rows[node], ended, report, limit_s) if os.environ.get("RANK") == "0" else None
    if found and found.error:
        raise ValueError(found.error)
    if ended.code != 0:
        raise ValueError(ended.last_line if ended.code else f"no end within {limit_s:.0f} s")
    return asdict(found) if found else None


def main(text: str) -> int:
    request = json.loads(text)
    doing = request.pop("do")
    trained_alone.note("met")
    try:
        if doing == "node":
            for name in RANK_VARIABLES:
                os.environ.pop(name, None)
        kinds: dict[str, Callable[..., Any]] = {"node": measure_node, "wire": measure_network, "trial": measure_trial}
        answer = kinds[doing](**request)
    except (ValueError, ConnectionError) as error:
        log.error(str(error))
        return 1
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # a single write, on a new line even if the script printed no newline
        sys.stdout.write(f"\n{MARK} {json.dumps(answer)}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
