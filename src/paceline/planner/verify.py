"""`paceline verify`: N nodes and one process run the user's script for a few steps from the same weights.

Over ssh, all results stay on the first host, where rank 0 saves its weights. The single process runs there too, and
`main` compares both runs there.
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
from paceline.launch.hosts import OWN_PATH, Host, Way, configurations, parse
from paceline.planner.diagnose.causes import Cause
from paceline.planner.diagnose.equivalence import Comparison, compare, explain, finished
from paceline.registry import BASELINE

LIMIT_S = 600.0
SWEEP_S = 20.0
SWEEP = f"{OWN_PATH}; import shutil; shutil.rmtree(sys.argv[1], ignore_errors=True)"
COMPARE = f"{OWN_PATH}; from paceline.planner import verify; verify.main(*sys.argv[1:])"
DISTRIBUTED, SINGLE, REPEATED, SIMULATED, PREFIX = "many", "one", "again", "told", "paceline-verify-"
TIMEOUT_FACTOR = 5.0  # times the duration of one process: a script with a simulated rank may wait for other ranks
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
BY_SIGNAL = 128 + signal.SIGINT, 128 + signal.SIGTERM
Environment = Mapping[str, str]
Folder = Path | str


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Within the context, SIGTERM and SIGHUP raise SystemExit, and further ones do not interrupt the clean-up."""
    before: dict[int, Any] = {}

    def leave(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@_leaving()
def verify(command: Sequence[str], steps: int, nodes: int, engine: str, dtype: str) -> Comparison | None:
    """The comparison; None on a launcher's ranks other than 0. Raises ValueError if a run failed or was too short."""
    if nodes < 1:
        raise ValueError(f"--nodes must be at least 1, got {nodes}")
    with ScratchFolder(PREFIX) as folder:
        distributed, single = Path(folder) / DISTRIBUTED, Path(folder) / SINGLE
        request = _request(distributed, steps, dtype)
        if "RANK" in os.environ:
            code = _run(command, {**os.environ, **request})
            if os.environ["RANK"] != "0":
                if code:
                    raise ValueError(f"verify: the script failed on rank {os.environ['RANK']} (exit code {code})")
                return None
        else:
            code = local.start(command, engine, nodes, request)
        _check_ended(bool(finished(distributed)), code, steps, "on all nodes")
        alone = {**os.environ, "PACELINE_ENGINE": BASELINE}
        ticket = "PACELINE_JOIN_TICKET"
        for name in ("PACELINE_LOCAL_SIZES", "PACELINE_NODES", ticket, FORMER_NAMES[ticket]):
            alone.pop(name, None)
        # set explicitly, since mpirun and srun set other values
        begin = time.monotonic()
        code = _run(command, {**alone, **_request(single, steps, dtype, distributed), **ALONE})
        limit_s = TIMEOUT_FACTOR * (time.monotonic() - begin)
        _check_ended(bool(finished(single)), code, steps, "in one process")
        compared = compare(distributed, single, dtype)
        if compared.close:
            return compared
        repeated, size = Path(folder) / REPEATED, int(os.environ.get("WORLD_SIZE", nodes * local.num_processes(engine)))
        _run(command, {**alone, **_request(repeated, steps, dtype, distributed, examines=distributed), **ALONE})
        others = []
        for rank in dict.fromkeys((0, size - 1)) if size > 1 else ():
            others.append(Path(folder) / f"{SIMULATED}{rank}")
            simulated = _request(others[-1], steps, dtype, distributed, simulated=(rank, size))
            given = {"RANK": str(rank), "WORLD_SIZE": str(size), "GROUP_RANK": str(rank)}
            with contextlib.suppress(ValueError):
                _run(command, {**alone, **simulated, **ALONE, **given}, limit_s)
        found = explain(compared, distributed, single, repeated, others)
    if found.unknown and steps > 1 and "RANK" not in os.environ:
        # the experiments use the weights after the last step, which may hide a difference in the first step
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
    """`verify` with the nodes ``hosts``, such as hostA,hostB. ``names``: environment variables to pass on."""
    nodes = parse(hosts)
    each = [name or BASELINE for name in configurations(nodes, engine)]
    carried = ssh.carried(names)
    rendezvous = check(nodes, way, [] if command[0] == "-m" else [command[0]], address, needed(command))
    # an unguessable name; the first host's temporary folder may differ from this machine's
    folder = Path("/tmp") / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        distributed = {**carried, **_request(folder / DISTRIBUTED, steps, dtype)}
        code = ssh.start(nodes, ssh.Orders(command, each, way, distributed), rendezvous)
        _check_ended(code == 0, code, steps, "on all nodes")
        single = {**carried, **_request(folder / SINGLE, steps, dtype, folder / DISTRIBUTED)}
        code = ssh.start(nodes[:1], ssh.Orders(command, [BASELINE], way, single), rendezvous)
        _check_ended(code == 0, code, steps, f"in one process on {nodes[0].name}")
        compared = _compare_on(nodes[0], way, folder, steps, dtype)
        if not compared.close:
            start = folder / DISTRIBUTED
            repeated = {**carried, **_request(folder / REPEATED, steps, dtype, start, examines=start)}
            ssh.start(nodes[:1], ssh.Orders(command, [BASELINE], way, repeated), rendezvous)
            compared = _compare_on(nodes[0], way, folder, steps, dtype)
        return compared
    finally:
        sweep = way.command(nodes[0], "-c", SWEEP, str(folder))
        with contextlib.suppress(subprocess.SubprocessError):  # the result or the error is already known
            subprocess.run(sweep, stdin=subprocess.DEVNULL, capture_output=True, timeout=SWEEP_S, check=False)


def _compare_on(host: Host, way: Way, folder: Path, steps: int, dtype: str) -> Comparison:
    command = way.command(host, "-c", COMPARE, str(folder), dtype)
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": LIMIT_S}
    try:
        done = subprocess.run(command, text=True, errors="replace", check=False, **how)
    except subprocess.TimeoutExpired:
        raise ValueError(f"verify: {host.name} had not compared after {LIMIT_S:.0f} s; check that host") from None
    if done.returncode:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise ValueError(f"verify: {host.name} could not compare (exit code {done.returncode}): {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for part, where in ((DISTRIBUTED, "on all nodes"), (SINGLE, f"in one process on {host.name}")):
        _check_ended(part not in found.get("missing", ()), 0, steps, where)
    if "error" in found:
        raise ValueError(found["error"])
    return Comparison(**{**found, "causes": tuple(Cause(**cause) for cause in found["causes"])})


def main(folder: str, dtype: str) -> None:
    """Compares the runs saved in ``folder``; prints a line of JSON."""
    distributed, single = Path(folder) / DISTRIBUTED, Path(folder) / SINGLE
    found: dict[str, object] = {"missing": [part.name for part in (distributed, single) if not finished(part)]}
    if not found["missing"]:
        try:
            compared, repeated = compare(distributed, single, dtype), Path(folder) / REPEATED
            if repeated.exists():
                compared = explain(compared, distributed, single, repeated, ())
            found = dataclasses.asdict(compared)
        except ValueError as error:
            found = {"error": str(error)}
    print(json.dumps(found))


def _run(command: Sequence[str], environment: Environment, limit_s: float | None = None) -> int:
    """The exit code of a run. ``limit_s``: the time limit of a run that may fail, whose output is hidden."""
    shown, limit_s = None if limit_s is None else subprocess.DEVNULL, min(limit_s or LIMIT_S, LIMIT_S)
    try:
        done = subprocess.run(command, env=environment, check=False, timeout=limit_s, stdout=shown, stderr=shown)
        return done.returncode
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"verify: the script had not ended after {LIMIT_S:.0f} s; give fewer --steps, or --float32"
        ) from None


def _check_ended(ended: bool, code: int, steps: int, where: str) -> None:
    if ended:
        return
    if code in BY_SIGNAL:
        raise SystemExit(code)
    raise ValueError(
        f"verify: the script ended {where} (exit code {code}) before step {steps}; it must call pace.step at least "
        f"that often: give fewer --steps, or fix the error above"
    )


def _request(
    folder: Path, steps: int, dtype: str, start: Folder = "", examines: Folder = "", simulated: Sequence[int] = ()
) -> Environment:
    """The environment for the script's `EquivalenceRun`. ``start``: the folder of a run whose first weights it loads.
    ``examines``: the folder of a run to find the causes of a difference from. ``simulated``: rank and number of
    processes that the script of a single process sees.
    """
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    request = {"folder": str(folder), "steps": steps, "dtype": dtype, "start": str(start), "examines": str(examines)}
    return {"PACELINE_VERIFY": json.dumps({**request, **({"told": simulated} if simulated else {})})}
