"""What a benchmark found, beside what was demanded."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.machine import survey

Show = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """``reached``: the lower bound (or the figure, where it is one) is at least what was demanded.

    ``details``: for people, ``raw``: what JSON can hold, for whoever computes with it.
    """

    task: str
    what: str
    figure: str
    demanded: str
    reached: bool
    details: str = ""
    raw: Any = None


def write(out: Path, title: str, how: str, findings: Sequence[Finding]) -> None:
    """A record: what was demanded and reached, what else was found, tables, environment, command; raw.json has all.

    ``how``: as the command continues, from who ran it to what a figure means.
    """
    out.mkdir(parents=True, exist_ok=True)
    machine = survey()
    rows = [
        f"| {f.what} | {f.figure} | {f.demanded} | {'yes' if f.reached else 'NO'} |"
        for f in findings
        if f.demanded != "-"
    ]
    head = ["| what | measured | demanded | reached |", "|---|---|---|---|"] if rows else []
    plain = [f"- {f.what}: {f.figure}" for f in findings if f.demanded == "-" and not f.details]
    details = [f"## {f.what}\n\n{f.details}" for f in findings if f.details]
    parts = [
        f"# {title}",
        f"{time.strftime('%Y-%m-%d')}, {machine}, {machine.cpu}, {len(os.sched_getaffinity(0))} cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}.",
        f"`{' '.join(['paceline', *sys.argv[1:]])}` {how}",
        "\n".join([*head, *rows]),
        "\n".join(plain),
        *details,
    ]
    (out / "README.md").write_text("\n\n".join(filter(None, parts)) + "\n")
    (out / "raw.json").write_text(json.dumps([vars(f) for f in findings], indent=1))
