"""What each node of a run is at just now, as the processes of this machine tell it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.report import activity, status_server

STACK_S = 3.0  # for each that is asked for over the network

KNOWN = {"run", "folder", "node", "local_rank"}  # what every answer of a run says; what else answers is none

Answers = Sequence[dict[str, Any]]


def ask(run: str, stacks: bool = False) -> Answers:
    """Of all processes of ``run`` here, first ranks first. ``run``: its folder, or the id of a detached one, or how
    that begins. Raises ValueError where none is there."""
    told = {name: status_server.query(name) for name in status_server.names()}
    found = {name: answer for name, answer in told.items() if answer and answer.keys() >= KNOWN}
    mine = sorted(
        (name for name, answer in found.items() if _is(answer, run)),
        key=lambda name: (found[name]["node"], found[name]["local_rank"]),
    )
    if not mine:
        known = ", ".join(sorted({_name(answer) for answer in found.values()})) or "none"
        mute = "; ".join(filter(None, (status_server.state(name) for name, answer in told.items() if not answer)))
        raise ValueError(
            f"no process of run {run!r} answers on this machine; give the folder of its record, or the id of a "
            f"detached run, where it trains; running here: {known}"
            + (f"; here, and without an answer: {mute}" if mute else "")
        )
    if stacks:
        here = {found[name]["node"] for name in mine}
        far = [int(rank) for rank in found[mine[0]]["everyone"] if int(rank) not in here]
        for name in mine:
            ranks = far if name == mine[0] else []
            found[name] = (
                status_server.query(name, status_server.LIMIT_S + STACK_S * len(ranks), stacks=ranks) or found[name]
            )
    return [found[name] for name in mine]


def _is(answer: dict[str, Any], run: str) -> bool:
    if answer["folder"] and Path(answer["folder"]) == Path(run).absolute().resolve():
        return True
    return bool(run and answer["run"].startswith(run))


def _name(answer: dict[str, Any]) -> str:
    return str(answer["run"] or answer["folder"])


def lines(answers: Answers) -> list[str]:
    """A line for each node, then one for each process here where nodes have several; stacks below, where asked."""
    first = answers[0]
    everyone = {int(rank): told for rank, told in first["everyone"].items()}
    said = [f"{_name(first)}: {' '.join(first['command'])}, {first['num_nodes']} node{'s' * (first['num_nodes'] > 1)}"]
    for rank, told in everyone.items():
        absent = activity.missing(everyone, rank) if told["waits"] else []
        for_whom = f"; waits for {', '.join(f'rank {other}' for other in absent)}" if absent else ""
        said.append(activity.state(rank, told) + for_whom)
        said += [f"    {sign}" for sign in told["signs"]]
    said += [_local(answer) for answer in answers if answer["local_size"] > 1]
    for answer in answers:
        for who, stack in answer.get("stacks", {}).items():
            said += ["", f"{who}:", *(stack.rstrip().splitlines() or [f"  {activity.UNANSWERED}"])]
    return said


def _local(answer: dict[str, Any]) -> str:
    mine = answer["mine"]
    return (
        f"  rank {answer['node']}, local rank {answer['local_rank']}, pid {answer['pid']}, at step {mine['step']}: "
        f"{mine['doing']}, for {mine['for_s']:.1f} s"
    )
