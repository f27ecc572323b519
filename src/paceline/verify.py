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
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.launch import local, ssh
from paceline.launch.check import check
from paceline.launch.hosts import OWN_PATH, Host, Way, parse, rows
from paceline.launch.packages import needed
from paceline.probe.witness import Comparison, compare, ended

LIMIT_S = 600.0
SWEEP_S = 20.0
SWEEP = f"{OWN_PATH}; import shutil; shutil.rmtree(sys.argv[1], ignore_errors=True)"
COMPARE = f"{OWN_PATH}; from paceline import verify; verify.main(*sys.argv[1:])"
MANY, ONE, PREFIX = "many", "one", "paceline-verify-"
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
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
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
        alone = {**os.environ, **_told(one, steps, dtype, many), "PACELINE_ENGINE": "sequential"}
        for name in ("PACELINE_LOCAL_SIZES", "PACELINE_NODES", "PACELINE_JOIN"):
            alone.pop(name, None)
        # said, and not left out: mpirun and srun have said otherwise
        code = _run(command, {**alone, **ALONE})
        _demand(bool(ended(one)), code, steps, "in one process")
        return compare(many, one, dtype)


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
    each = [row or "sequential" for row in rows(nodes, engine)]
    carried = ssh.carried(names)
    meeting = check(nodes, way, [] if command[0] == "-m" else [command[0]], address, needed(command))
    # nobody guesses that name, and the first host's own folder for such things need not be this one's
    folder = Path("/tmp") / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        many = {**carried, **_told(folder / MANY, steps, dtype)}
        code = ssh.start(nodes, command, each, way, many, meeting)
        _demand(code == 0, code, steps, "on all nodes")
        one = {**carried, **_told(folder / ONE, steps, dtype, folder / MANY)}
        code = ssh.start(nodes[:1], command, "sequential", way, one, meeting)
        _demand(code == 0, code, steps, f"in one process on {nodes[0].name}")
        compare_there = way.command(nodes[0], "-c", COMPARE, str(folder), dtype)
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
            raise ValueError(f"verify: {nodes[0].name} had not compared after {LIMIT_S:.0f} s; look there") from None
        return _compared(done, steps, nodes[0])
    finally:
        sweep = way.command(nodes[0], "-c", SWEEP, str(folder))
        with contextlib.suppress(subprocess.SubprocessError):  # the answer, or the error, is known already
            subprocess.run(sweep, stdin=subprocess.DEVNULL, capture_output=True, timeout=SWEEP_S, check=False)


def _compared(done: subprocess.CompletedProcess[str], steps: int, host: Host) -> Comparison:
    last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
    if done.returncode:
        raise ValueError(f"verify: {host.name} could not compare (exit code {done.returncode}): {last}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    for part, where in ((MANY, "on all nodes"), (ONE, f"in one process on {host.name}")):
        _demand(part not in said.get("missing", ()), 0, steps, where)
    if "error" in said:
        raise ValueError(said["error"])
    return Comparison(**said)


def main(folder: str, dtype: str) -> None:
    """What was kept in ``folder``, compared, as a line of JSON."""
    many, one = Path(folder) / MANY, Path(folder) / ONE
    said: dict[str, object] = {"missing": [part.name for part in (many, one) if not ended(part)]}
    if not said["missing"]:
        try:
            said = dataclasses.asdict(compare(many, one, dtype))
        except ValueError as error:
            said = {"error": str(error)}
    print(json.dumps(said))


def _run(command: Sequence[str], environment: Environment) -> int:
    try:
        return subprocess.run(command, env=environment, check=False, timeout=LIMIT_S).returncode
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


def _told(folder: Path, steps: int, dtype: str, start: Path | None = None) -> Environment:
    """For the script's witness. ``start``: a witness's folder, to begin from its first weights."""
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    said = {"folder": str(folder), "steps": steps, "dtype": dtype, "start": str(start or "")}
    return {"PACELINE_VERIFY": json.dumps(said)}
