"""Shows what each node of a run is doing, as the processes on this machine report it (`paceline doctor --run`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.report import activity, status_server

STACK_S = 3.0  # for each stack trace that is requested over the network

KNOWN = {"run", "folder", "node", "local_rank"}  # keys of every answer of a run; other answers are ignored

Answers = Sequence[dict[str, Any]]


def query(run: str, stacks: bool = False) -> Answers:
    """The answers of all processes of a run on this machine, by rank. ``run``: its folder, or the id of a detached run,
    or the beginning of the id. Raises ValueError if there is none."""
    replies = {name: status_server.query(name) for name in status_server.names()}
    found = {name: answer for name, answer in replies.items() if answer and answer.keys() >= KNOWN}
    folder = Path(run).absolute().resolve()
    names = [
        name
        for name, answer in found.items()
        if (answer["folder"] and Path(answer["folder"]) == folder) or (run and answer["run"].startswith(run))
    ]
    names.sort(key=lambda name: (found[name]["node"], found[name]["local_rank"]))
    if not names:
        known = ", ".join(sorted({_name(answer) for answer in found.values()})) or "none"
        silent = "; ".join(filter(None, (status_server.state(name) for name, answer in replies.items() if not answer)))
        raise ValueError(
            f"no process of run {run!r} answers on this machine; give the folder of its record, or the id of a "
            f"detached run, where it trains; running here: {known}"
            + (f"; here, and without an answer: {silent}" if silent else "")
        )
    if stacks:
        local_nodes = {found[name]["node"] for name in names}
        remote_nodes = [int(rank) for rank in found[names[0]]["everyone"] if int(rank) not in local_nodes]
        for name in names:
            ranks = remote_nodes if name == names[0] else []
            limit_s = status_server.TIMEOUT_S + STACK_S * len(ranks)
            found[name] = status_server.query(name, limit_s, stacks=ranks) or found[name]
    return [found[name] for name in names]


def _name(answer: dict[str, Any]) -> str:
    return str(answer["run"] or answer["folder"])


def lines(answers: Answers) -> list[str]:
    """A line for each node, then one for each process here if a node has several, then stack traces if requested."""
    first = answers[0]
    peers = {int(rank): state for rank, state in first["everyone"].items()}
    text = [f"{_name(first)}: {' '.join(first['command'])}, {first['num_nodes']} node{'s' * (first['num_nodes'] > 1)}"]
    for rank, state in peers.items():
        absent = activity.absent_ranks(peers, rank) if state["waits"] else []
        for_whom = f"; waits for {', '.join(f'rank {other}' for other in absent)}" if absent else ""
        text.append(activity.state(rank, state) + for_whom)
        text += [f"    {sign}" for sign in state["signs"]]
    for answer in (answer for answer in answers if answer["local_size"] > 1):
        name, mine = f"rank {answer['node']}, local rank {answer['local_rank']}, pid {answer['pid']}", answer["mine"]
        text.append(f"  {name}, at step {mine['step']}: {mine['doing']}, for {mine['for_s']:.1f} s")
    for answer in answers:
        for name, stack in answer.get("stacks", {}).items():
            text += ["", f"{name}:", *(stack.rstrip().splitlines() or [f"  {activity.UNANSWERED}"])]
    return text
