"""Shows what each node of a run is doing at present, as the processes on this machine report it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.report import activity, status_server

STACK_S = 3.0  # for each that is asked for over the network

KNOWN = {"run", "folder", "node", "local_rank"}  # keys of every answer of a run; what else answers is none

Answers = Sequence[dict[str, Any]]


def ask(run: str, stacks: bool = False) -> Answers:
    """Of all processes of ``run`` here, first ranks first. ``run``: its folder, or the id of a detached one, or how
    that begins. Raises ValueError where none is there."""
    told = {name: status_server.query(name) for name in status_server.names()}
    found = {name: answer for name, answer in told.items() if answer and answer.keys() >= KNOWN}
    place = Path(run).absolute().resolve()
    mine = [
        name
        for name, answer in found.items()
        if (answer["folder"] and Path(answer["folder"]) == place) or (run and answer["run"].startswith(run))
    ]
    mine.sort(key=lambda name: (found[name]["node"], found[name]["local_rank"]))
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
            limit_s = status_server.TIMEOUT_S + STACK_S * len(ranks)
            found[name] = status_server.query(name, limit_s, stacks=ranks) or found[name]
    return [found[name] for name in mine]


def _name(answer: dict[str, Any]) -> str:
    return str(answer["run"] or answer["folder"])


def lines(answers: Answers) -> list[str]:
    """A line for each node, then one for each process here where nodes have several; stacks below, where asked."""
    first = answers[0]
    everyone = {int(rank): told for rank, told in first["everyone"].items()}
    text = [f"{_name(first)}: {' '.join(first['command'])}, {first['num_nodes']} node{'s' * (first['num_nodes'] > 1)}"]
    for rank, told in everyone.items():
        absent = activity.absent_ranks(everyone, rank) if told["waits"] else []
        for_whom = f"; waits for {', '.join(f'rank {other}' for other in absent)}" if absent else ""
        text.append(activity.state(rank, told) + for_whom)
        text += [f"    {sign}" for sign in told["signs"]]
    for answer in (answer for answer in answers if answer["local_size"] > 1):
        who, mine = f"rank {answer['node']}, local rank {answer['local_rank']}, pid {answer['pid']}", answer["mine"]
        text.append(f"  {who}, at step {mine['step']}: {mine['doing']}, for {mine['for_s']:.1f} s")
    for answer in answers:
        for who, stack in answer.get("stacks", {}).items():
            text += ["", f"{who}:", *(stack.rstrip().splitlines() or [f"  {activity.UNANSWERED}"])]
    return text
