"""`paceline verify`: N nodes and one process run the user's script for a few steps from the same weights.

Over ssh everything stays on the first host, where rank 0 keeps its weights: the nodes' steps, the one process's, and,
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

from paceline.environment import FORMER_NAMES
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
WAIT = 5.0  # times as long as one process took: a script that is given another rank may wait for others
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
BY_SIGNAL = 128 + signal.SIGINT, 128 + signal.SIGTERM
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
        order = _order(many, steps, dtype)
        if "RANK" in os.environ:
            code = _run(command, {**os.environ, **order})
            if os.environ["RANK"] != "0":
                if code:
                    raise ValueError(f"verify: the script failed on rank {os.environ['RANK']} (exit code {code})")
                return None
        else:
            code = local.start(command, engine, nodes, order)
        _demand(bool(ended(many)), code, steps, "on all nodes")
        alone = {**os.environ, "PACELINE_ENGINE": BASELINE}
        ticket = "PACELINE_JOIN_TICKET"
        for name in ("PACELINE_LOCAL_SIZES", "PACELINE_NODES", ticket, FORMER_NAMES[ticket]):
            alone.pop(name, None)
        # set, and not left out: mpirun and srun have set other values
        begin = time.monotonic()
        code = _run(command, {**alone, **_order(one, steps, dtype, many), **ALONE})
        limit_s = WAIT * (time.monotonic() - begin)
        _demand(bool(ended(one)), code, steps, "in one process")
        compared = compare(many, one, dtype)
        if compared.close:
            return compared
        again, size = Path(folder) / AGAIN, int(os.environ.get("WORLD_SIZE", nodes * local.num_processes(engine)))
        _run(command, {**alone, **_order(again, steps, dtype, many, examines=many), **ALONE})
        others = []
        for rank in dict.fromkeys((0, size - 1)) if size > 1 else ():
            others.append(Path(folder) / f"{TOLD}{rank}")
            told = _order(others[-1], steps, dtype, many, told=(rank, size))
            given = {"RANK": str(rank), "WORLD_SIZE": str(size), "GROUP_RANK": str(rank)}
            with contextlib.suppress(ValueError):
                _run(command, {**alone, **told, **ALONE, **given}, limit_s)
        found = explained(compared, many, one, again, others)
    if found.unknown and steps > 1 and "RANK" not in os.environ:
        # the experiments use the weights after the last step, which may hide what the first ones show
        early = verify(command, 1, nodes, engine, dtype)
        if early is not None and not early.same and not early.unknown:
            found = dataclasses.replace(found, causes=early.causes)
    return found


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
    # a name that cannot be guessed; the first host's own temporary folder need not be this one's
    folder = Path("/tmp") / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        many = {**carried, **_order(folder / MANY, steps, dtype)}
        code = ssh.start(nodes, ssh.Orders(command, each, way, many), meeting)
        _demand(code == 0, code, steps, "on all nodes")
        one = {**carried, **_order(folder / ONE, steps, dtype, folder / MANY)}
        code = ssh.start(nodes[:1], ssh.Orders(command, [BASELINE], way, one), meeting)
        _demand(code == 0, code, steps, f"in one process on {nodes[0].name}")
        compared = _there(nodes[0], way, folder, steps, dtype)
        if not compared.close:
            again = {**carried, **_order(folder / AGAIN, steps, dtype, folder / MANY, examines=folder / MANY)}
            ssh.start(nodes[:1], ssh.Orders(command, [BASELINE], way, again), meeting)
            compared = _there(nodes[0], way, folder, steps, dtype)
        return compared
    finally:
        sweep = way.command(nodes[0], "-c", SWEEP, str(folder))
        with contextlib.suppress(subprocess.SubprocessError):  # the answer, or the error, is known already
            subprocess.run(sweep, stdin=subprocess.DEVNULL, capture_output=True, timeout=SWEEP_S, check=False)


def _there(host: Host, way: Way, folder: Path, steps: int, dtype: str) -> Comparison:
    command = way.command(host, "-c", COMPARE, str(folder), dtype)
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": LIMIT_S}
    try:
        done = subprocess.run(command, text=True, errors="replace", check=False, **how)
    except subprocess.TimeoutExpired:
        raise ValueError(f"verify: {host.name} had not compared after {LIMIT_S:.0f} s; look there") from None
    if done.returncode:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise ValueError(f"verify: {host.name} could not compare (exit code {done.returncode}): {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for part, where in ((MANY, "on all nodes"), (ONE, f"in one process on {host.name}")):
        _demand(part not in found.get("missing", ()), 0, steps, where)
    if "error" in found:
        raise ValueError(found["error"])
    return Comparison(**{**found, "causes": tuple(Cause(**cause) for cause in found["causes"])})


def main(folder: str, dtype: str) -> None:
    """What was kept in ``folder``, compared, as a line of JSON."""
    many, one = Path(folder) / MANY, Path(folder) / ONE
    found: dict[str, object] = {"missing": [part.name for part in (many, one) if not ended(part)]}
    if not found["missing"]:
        try:
            compared, again = compare(many, one, dtype), Path(folder) / AGAIN
            if again.exists():
                compared = explained(compared, many, one, again, ())
            found = dataclasses.asdict(compared)
        except ValueError as error:
            found = {"error": str(error)}
    print(json.dumps(found))


def _run(command: Sequence[str], environment: Environment, limit_s: float | None = None) -> int:
    """``limit_s``: of a run that may well fail, of which nothing is shown; LIMIT_S of any other."""
    shown, limit_s = None if limit_s is None else subprocess.DEVNULL, min(limit_s or LIMIT_S, LIMIT_S)
    try:
        done = subprocess.run(command, env=environment, check=False, timeout=limit_s, stdout=shown, stderr=shown)
        return done.returncode
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"verify: the script had not ended after {LIMIT_S:.0f} s; give fewer --steps, or --float32"
        ) from None


def _demand(ended: bool, code: int, steps: int, where: str) -> None:
    if ended:
        return
    if code in BY_SIGNAL:
        raise SystemExit(code)
    raise ValueError(
        f"verify: the script ended {where} (exit code {code}) before step {steps}; it must call pace.step at least "
        f"that often: give fewer --steps, or fix the error above"
    )


def _order(
    folder: Path, steps: int, dtype: str, start: Path | str = "", examines: Path | str = "", told: Sequence[int] = ()
) -> Environment:
    """For the script's `EquivalenceRun`. ``start``: another run's folder, to begin from its first weights.
    ``examines``: likewise, to look for the causes of a difference. ``told``: rank and number of processes that a
    process alone is given.
    """
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    order = {"folder": str(folder), "steps": steps, "dtype": dtype, "start": str(start), "examines": str(examines)}
    return {"PACELINE_VERIFY": json.dumps({**order, **({"told": told} if told else {})})}
