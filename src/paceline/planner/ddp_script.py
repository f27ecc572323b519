"""A script that uses DistributedDataParallel, timed with torch's class and with ours, on one machine."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.ddp import import_hook
from paceline.planner.measure.fresh_process import run_in_process
from paceline.registry import PROCESSES

USES = re.compile(
    r"^\s*(?:from|import)\s+(accelerate|lightning|lightning_fabric|pytorch_lightning|trl)\b"
    r"|\b(DistributedDataParallel|init_process_group|\w*TrainingArguments)\b",
    re.MULTILINE,
)
LAUNCHES = re.compile(r"\b(Trainer|Fabric|LightningCLI)\(")  # Lightning's, which starts processes
SPAWNS = re.compile(r"\b(?:mp|multiprocessing)\.(?:spawn|start_processes)\(|\bnotebook_launcher\(")
SGD = re.compile(r"\bSGD\b")
TORCHS, OURS = "torch's class", "paceline's class"
UPDATING = f"{OURS}, updates in the exchange"
CALLS = "join", "Pace", "launch"  # what a script calls that needs no wrapper
ITSELF = "DistributedDataParallel", "init_process_group"  # what a script calls that uses no library
MOST_FILES = 200  # of a script and what it imports, that are looked at
STEPS, LIMIT_S = 25, 600.0  # of `paceline.ddp.stopwatch`


def used(command: Sequence[str]) -> str:
    """What of torch's or a library's data parallelism a script uses that does not call `paceline.join`; else empty."""
    texts = _texts(command)
    found = [each for text in texts for each in USES.finditer(text)]
    # a library's own name before those of torch that stand in the script as well
    names = [each[1] for each in found if each[1]] + [each[2] for each in found if each[2]]
    return "" if not names or any(map(_joins, texts)) else names[0]


def starts_processes(command: Sequence[str]) -> bool:
    """Whether the script, or its library, starts processes where it is given no ranks."""
    text, name = "\n".join(_texts(command)), used(command)
    if "lightning" in name:
        return bool(LAUNCHES.search(text)) and "init_process_group" not in text
    return bool(name and SPAWNS.search(text))


def _texts(command: Sequence[str]) -> list[str]:
    """The sources of a script, or of a module after -m in this folder, and of what it imports from there."""
    path = Path(command[0])
    if command[0] == "-m":
        folder = Path(*command[1].split("."))
        path = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
    root = Path() if command[0] == "-m" else path.parent
    found, left = dict[Path, str](), [path]
    while left and len(found) < MOST_FILES:
        path = left.pop(0)
        if path not in found and path.is_file():
            found[path] = path.read_text(errors="replace")
            left += _imported(found[path], path, root)
    return list(found.values())


def _imported(text: str, path: Path, root: Path) -> list[Path]:
    """The files of a folder's own modules that a source imports, wherever in it."""
    modules = list[Path]()
    for node in _nodes(text):
        if isinstance(node, ast.Import):
            modules += [root.joinpath(*alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else root
            module = start.joinpath(*(node.module or "").split("."))
            modules += [module, *(module / alias.name for alias in node.names)]
    return [each for one in modules for each in (one.parent / f"{one.name}.py", one / "__init__.py")]


def _nodes(text: str) -> list[ast.AST]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # which Python will show
        return []


def _joins(text: str) -> bool:
    nodes = _nodes(text)
    ours = {
        alias.asname or "paceline"
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] == "paceline"
    }
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paceline"
        for alias in node.names
    }
    reached = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).partition(".")[0] in ours
    }
    return bool((imported | reached).intersection(CALLS))


@dataclass(frozen=True)
class Timing:
    """*Units*: seconds of a step, of the slowest rank; ``alone_s``: of one that sends nothing, 0 if not timed.
    ``rows``: of a rank's step, all its passes; 0: unknown. ``error``: why it could not be timed."""

    name: str
    ranks: int
    step_s: float = 0.0
    alone_s: float = 0.0
    rows: int = 0
    error: str = ""

    def words(self, base: Timing) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        batch = f", global batch {self.ranks * self.rows}" if self.rows else ""
        text = f"{self.name}: {self.step_s:.4g} s per step{batch}"
        if base is self or not base.step_s:
            return text
        samples = self.ranks * base.step_s / (base.ranks * self.step_s)
        return f"{text}, {samples:.2f}x the samples per second"


@dataclass(frozen=True)
class Machines:
    """``hosts``: all that take part, and ``options`` of `paceline run` by which they are reached."""

    hosts: Sequence[str] = ()
    options: Sequence[str] = ()


def timings(
    command: Sequence[str], ranks: int, show: Callable[[str], None], machines: Machines = Machines()
) -> list[Timing]:
    """One process, then ``ranks`` of them with torch's class and with ours; then as many on each of several machines. A
    library, or a script that starts its processes itself, has no such first row. One that names SGD is timed with the
    update in the exchange as well, as `paceline.join` does it."""
    own, found = starts_processes(command), list[Timing]()
    classes = [(TORCHS, {import_hook.VARIABLE: import_hook.TORCHS}), (OURS, {})]
    if any(map(SGD.search, _texts(command))):
        classes.append((UPDATING, {import_hook.OPTIMIZER: import_hook.FUSED}))
    if used(command) in ITSELF and not own:
        found.append(_timed(command, ("--plan", f"{PROCESSES}:1"), "1 process", 1, classes[0][1], show))
    else:
        ranks = max(ranks, 2)
    launch: tuple[str, ...] = () if own else ("--plan", f"{PROCESSES}:{ranks}")
    ways = [(launch, f"{ranks} processes", ranks)] if ranks > 1 else []
    if (count := len(machines.hosts)) > 1:
        there = "-H", ",".join(machines.hosts), *machines.options, "--plan", f"{PROCESSES}:{ranks}"
        ways.append((there, f"{count * ranks} processes on {count} machines", count * ranks))
    for words, where, size in ways:
        for name, given in classes:
            found.append(_timed(command, words, f"{where}, {name}", size, given, show))
    return found


def _timed(
    command: Sequence[str],
    launch: Sequence[str],
    name: str,
    ranks: int,
    given: Mapping[str, str],
    show: Callable[[str], None],
) -> Timing:
    show(f"trying {name}")
    start = [sys.executable, "-m", "paceline", "run", *launch]
    variables = {import_hook.VARIABLE: "", import_hook.OPTIMIZER: "", **given}
    variables |= {import_hook.TIMED: "1", "PACELINE_LOG": "info"}
    ended = run_in_process([*start, *command], variables, LIMIT_S, wanted=import_hook.FOUND)
    if ended.found:
        timed = json.loads(ended.found)
        return Timing(name.replace(str(ranks), str(timed["ranks"]), 1), **timed)
    if ended.code is None:
        return Timing(name, ranks, error=f"{STEPS} steps took more than {LIMIT_S:.0f} s")
    hint = "; Lightning wraps no model with devices=1" if "lightning" in used(command) else ""
    why = f"it ended before {STEPS} steps under DistributedDataParallel ({ended.last_line}){hint}"
    return Timing(name, ranks, error=why)


def report(found: Sequence[Timing], cores: int) -> list[str]:
    """Lines for people; what `join` would add is the last."""
    lines, gain = [one.words(found[0]) for one in found], ""
    ways = {one.name: one for one in found if one.step_s}
    pairs = [(one, ours) for one in found if (ours := ways.get(one.name.replace(TORCHS, OURS))) and one is not ours]
    for theirs, ours in pairs:
        where = f" with {ours.ranks} processes" if len(pairs) > 1 else ""
        if theirs.step_s:
            lines.append(f"paceline's class{where}: {theirs.step_s / ours.step_s:.2f}x torch's")
        # an update in the exchange computes less, and may be faster than a step that sends nothing
        updating = ways.get(ours.name.replace(OURS, UPDATING), ours).step_s
        least_s, why = min(
            (updating, "updates in the exchange"), (ours.alone_s or updating, "a step that sends nothing")
        )
        if least_s < ours.step_s:
            gain = f"up to {ours.step_s / least_s:.2f}x as fast{where}, as {why}; "
    if os.environ.get("OMP_NUM_THREADS") is None and len(found) > 1:
        lines.append(f"each process had its part of {cores} cores")
    lines.append(
        f"paceline.join in place of the wrapper: {gain}plans with other engines, one global batch for any number of "
        "machines, training that survives lost nodes (docs/from-ddp.md)"
    )
    return lines
