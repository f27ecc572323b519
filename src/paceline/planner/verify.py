"""N nodes against one process: both run the user's script for a few steps from the same weights.

Over ssh all of it stays on the first host, where rank 0 keeps its weights: the nodes' steps, the one process's, and,
by `main` there, the comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.environment import FORMERLY
from paceline.launch import local, ssh
from paceline.launch.child_processes import ScratchFolder
from paceline.launch.deploy.packages import needed
from paceline.launch.doctor.preflight import check
from paceline.launch.hosts import OWN_PATH, Host, Way, parse, rows
from paceline.planner.diagnose.causes import Cause
from paceline.planner.diagnose.equivalence import Comparison, compare, ended, explained
from paceline.registry import BASELINE

LIMIT_S = 600.0
SWEEP_S = 20.0
SWEEP = f"{OWN_PATH}; import shutil; shutil.rmtree(sys.argv[1], ignore_errors=True)"
COMPARE = f"{OWN_PATH}; from paceline.planner import verify; verify.main(*sys.argv[1:])"
MANY, ONE, AGAIN, TOLD, PREFIX = "many", "one", "again", "told", "paceline-verify-"
WAIT = 5.0  # times as long as one process took: a script that is told another rank may wait for others
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
ASKED = 128 + signal.SIGINT, 128 + signal.SIGTERM
Environment = Mapping[str, str]


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP are exits like any other, and what sweeps then is not cut short by another one."""
    before: dict[int, Any] = {}

    def leave(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@_leaving()
def verify(command: Sequence[str], steps: int, nodes: int, engine: str, dtype: str) -> Comparison | None:
    """None on a launcher's ranks other than 0. Raises ValueError when a run failed, or was too short."""
    if nodes < 1:
        raise ValueError(f"--nodes must be at least 1, got {nodes}")
    with ScratchFolder(PREFIX) as folder:
        many, one = Path(folder) / MANY, Path(folder) / ONE
        told = _told(many, steps, dtype)
        if "RANK" in os.environ:
            code = _run(command, {**os.environ, **told})
            if os.environ["RANK"] != "0":
                if code:
                    raise ValueError(f"verify: the script failed on rank {os.environ['RANK']} (exit code {code})")
                return None
        else:
            code = local.start(command, engine, nodes, told)
        _demand(bool(ended(many)), code, steps, "on all nodes")
        alone = {**os.environ, "PACELINE_ENGINE": BASELINE}
        ticket = "PACELINE_JOIN_TICKET"
        for name in ("PACELINE_LOCAL_SIZES", "PACELINE_NODES", ticket, FORMERLY[ticket]):
            alone.pop(name, None)
        # said, and not left out: mpirun and srun have said otherwise
        begin = time.monotonic()
        code = _run(command, {**alone, **_told(one, steps, dtype, many), **ALONE})
        limit_s = WAIT * (time.monotonic() - begin)
        _demand(bool(ended(one)), code, steps, "in one process")
        compared = compare(many, one, dtype)
        if compared.close:
            return compared
        again, size = Path(folder) / AGAIN, int(os.environ.get("WORLD_SIZE", nodes * local.num_processes(engine)))
        _run(command, {**alone, **_told(again, steps, dtype, many, examines=many), **ALONE})
        others = []
        for rank in dict.fromkeys((0, size - 1)) if size > 1 else ():
            others.append(Path(folder) / f"{TOLD}{rank}")
            told = _told(others[-1], steps, dtype, many, told=(rank, size))
            with contextlib.suppress(ValueError):
                _run(command, {**alone, **told, **ALONE, **_as(rank, size)}, limit_s)
        found = explained(compared, many, one, again, others)
    if found.unknown and steps > 1 and "RANK" not in os.environ:
        # the experiments use the weights after the last step, which may hide what the first ones show
        early = verify(command, 1, nodes, engine, dtype)
        if early is not None and not early.same and not early.unknown:
            found = dataclasses.replace(found, causes=early.causes)
    return found


def _as(rank: int, size: int) -> Environment:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "GROUP_RANK": str(rank)}


@_leaving()
def over_ssh(
    hosts: str,
    way: Way,
    command: Sequence[str],
    steps: int,
    engine: str,
    dtype: str,
    names: Sequence[str] = (),
    address: str | None = None,
) -> Comparison:
    """`verify`, its nodes being ``hosts``, such as hostA,hostB. ``names``: variables that go along."""
    nodes = parse(hosts)
    each = [row or BASELINE for row in rows(nodes, engine)]
    carried = ssh.carried(names)
    meeting = check(nodes, way, [] if command[0] == "-m" else [command[0]], address, needed(command))
    # nobody guesses that name, and the first host's own folder for such things need not be this one's
    folder = Path("/tmp") / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        many = {**carried, **_told(folder / MANY, steps, dtype)}
        code = ssh.start(nodes, ssh.Orders(command, each, way, many), meeting)
        _demand(code == 0, code, steps, "on all nodes")
        one = {**carried, **_told(folder / ONE, steps, dtype, folder / MANY)}
        code = ssh.start(nodes[:1], ssh.Orders(command, [BASELINE], way, one), meeting)
        _demand(code == 0, code, steps, f"in one process on {nodes[0].name}")
        compared = _there(nodes[0], way, folder, steps, dtype)
        if not compared.close:
            again = {**carried, **_told(folder / AGAIN, steps, dtype, folder / MANY, examines=folder / MANY)}
            ssh.start(nodes[:1], ssh.Orders(command, [BASELINE], way, again), meeting)
            compared = _there(nodes[0], way, folder, steps, dtype)
        return compared
    finally:
        sweep = way.command(nodes[0], "-c", SWEEP, str(folder))
        with contextlib.suppress(subprocess.SubprocessError):  # the answer, or the error, is known already
            subprocess.run(sweep, stdin=subprocess.DEVNULL, capture_output=True, timeout=SWEEP_S, check=False)


def _there(host: Host, way: Way, folder: Path, steps: int, dtype: str) -> Comparison:
    compare_there = way.command(host, "-c", COMPARE, str(folder), dtype)
    try:
        done = subprocess.run(
            compare_there,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"verify: {host.name} had not compared after {LIMIT_S:.0f} s; look there") from None
    return _compared(done, steps, host)


def _compared(done: subprocess.CompletedProcess[str], steps: int, host: Host) -> Comparison:
    last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
    if done.returncode:
        raise ValueError(f"verify: {host.name} could not compare (exit code {done.returncode}): {last}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    for part, where in ((MANY, "on all nodes"), (ONE, f"in one process on {host.name}")):
        _demand(part not in said.get("missing", ()), 0, steps, where)
    if "error" in said:
        raise ValueError(said["error"])
    return Comparison(**{**said, "causes": tuple(Cause(**cause) for cause in said["causes"])})


def main(folder: str, dtype: str) -> None:
    """What was kept in ``folder``, compared, as a line of JSON."""
    many, one = Path(folder) / MANY, Path(folder) / ONE
    said: dict[str, object] = {"missing": [part.name for part in (many, one) if not ended(part)]}
    if not said["missing"]:
        try:
            compared, again = compare(many, one, dtype), Path(folder) / AGAIN
            if again.exists():
                compared = explained(compared, many, one, again, ())
            said = dataclasses.asdict(compared)
        except ValueError as error:
            said = {"error": str(error)}
    print(json.dumps(said))


def _run(command: Sequence[str], environment: Environment, limit_s: float | None = None) -> int:
    """``limit_s``: of a run that may well fail, of which nothing is shown; LIMIT_S of any other."""
    try:
        shown = None if limit_s is None else subprocess.DEVNULL
        limit_s = min(limit_s or LIMIT_S, LIMIT_S)
        return subprocess.run(
            command, env=environment, check=False, timeout=limit_s, stdout=shown, stderr=shown
        ).returncode
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"verify: the script had not ended after {LIMIT_S:.0f} s; give fewer --steps, or --float32"
        ) from None


def _demand(ended: bool, code: int, steps: int, where: str) -> None:
    if not ended and code in ASKED:
        raise SystemExit(code)
    if not ended:
        raise ValueError(
            f"verify: the script ended {where} (exit code {code}) before step {steps}; it must call pace.step at "
            f"least that often: give fewer --steps, or mend the error above"
        )


def _told(
    folder: Path,
    steps: int,
    dtype: str,
    start: Path | None = None,
    examines: Path | None = None,
    told: tuple[int, int] | None = None,
) -> Environment:
    """For the script's witness. ``start``: a witness's folder, to begin from its first weights. ``examines``: likewise,
    to look for the causes for which it is unlike. ``told``: rank and number of processes that a process alone is told.
    """
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    said = {"folder": str(folder), "steps": steps, "dtype": dtype, "start": str(start or "")}
    said |= {"examines": str(examines or ""), **({"told": told} if told else {})}
    return {"PACELINE_VERIFY": json.dumps(said)}
