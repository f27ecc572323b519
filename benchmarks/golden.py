"""The same trainings by two versions, on this machine, bit by bit: another checkout against this one.

    python benchmarks/golden.py --before CHECKOUT [--only WORDS] [--seeds N]

Every training is started in both versions, with the forms of gradients chosen by bytes and packing fixed, so that
nothing that is measured decides. Compared: each step's loss and norm, weights, optimizer state, evaluation, bytes sent.
Each checkpoint of the other version is restored by this one and trained on, as that version does itself. Then the
outcomes of simulated seeds, the words of every command's --help, and the signature of `join`.

Bits differ between processors and libraries, so nothing is kept: both versions run each time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent.parent
JOB = Path(__file__).with_name("golden_job.py")
LIMIT_S = 120.0
SEEDS = 1000
FIXED = "allreduce:forms=bytes,packed=never"
COMMANDS = ("train", "plan", "run", "attach", "pack", "predict", "report", "track", "list", "doctor", "verify", "bench")


ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # the installed version's entry point is not for another one


@dataclass(frozen=True)
class Case:
    """``sizes``: the processes of each node. ``job``: what golden_job.py is told."""

    name: str
    engine: str = "sequential"
    sizes: tuple[int, ...] = (1,)
    exchange: str = FIXED
    codec: str = "none"
    join: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    for engine in ("sequential", "threads:2", "replicas:2", "virtual:4"):
        exchange = "tree" if "virtual" in engine else FIXED
        yield Case(f"one node, {engine}", engine, exchange=exchange)
        yield Case(f"two nodes, {engine}", engine, (1, 1), exchange=exchange)
    yield Case("one node, processes:2", "processes:2", (2,))
    yield Case("two nodes, processes:2", "processes:2", (2, 2))
    yield Case("two nodes, two processes and one", "processes", (2, 1))
    yield Case("two nodes, replicas and accumulate", "replicas:2", (1, 1), join={"accumulate": 2})
    for codec in ("half", "topk:keep=0.1", "feedback/topk:keep=0.1", "feedback/half"):
        yield Case(f"two nodes, {codec}", sizes=(1, 1), codec=codec)
    for exchange in ("allreduce:forms=dense,packed=always", "allreduce:forms=factors,packed=never", "tree"):
        yield Case(f"two nodes, {exchange}", sizes=(1, 1), exchange=exchange)
    yield Case("two nodes, periodic:3", sizes=(1, 1), exchange="periodic:3")
    yield Case("two nodes of two, periodic:3", "processes:2", (2, 2), exchange="periodic:3")
    yield Case("two nodes, TLS", sizes=(1, 1), environment={"PACELINE_LINK": "tls"})
    yield Case("two nodes, ring", sizes=(1, 1), environment={"PACELINE_COLLECTIVE": "ring"})
    adam = {"optimizer": "AdamW", "numbers": {"lr": 0.002, "weight_decay": 0.1}}
    for sizes in ((1,), (1, 1), (2,), (2, 2)):
        engine = f"processes:{sizes[0]}" if sizes[0] > 1 else "sequential"
        where = f"{len(sizes)} nodes of {sizes[0]}"
        yield Case(f"{where}, AdamW, clip, accumulate", engine, sizes, join={"clip": 0.5, "accumulate": 2}, job=adam)
        yield Case(f"{where}, batch norm of all", engine, sizes, join={"batch_norm": "sync"}, job={"norm": True})
        yield Case(f"{where}, batch norm of each", engine, sizes, job={"norm": True})
        yield Case(f"{where}, own loop", engine, sizes, job={"own": True})
        yield Case(f"{where}, bf16", engine, sizes, join={"precision": "bf16"})
        yield Case(f"{where}, fp16", engine, sizes, join={"precision": "fp16"})
    yield Case(
        "two nodes, reproducible", sizes=(1, 1), exchange="allreduce", join={"reproducible": True, "engine": None}
    )
    yield Case("two nodes, forward overlap", sizes=(1, 1), join={"overlap": "forward"}, job={"folder": False})
    lost = {"PACELINE_NODES": "1:2", "PACELINE_WAIT": "5"}
    for name, more in (("", {}), (", batch norm of all, clip", {"batch_norm": "sync", "clip": 0.5})):
        yield Case(
            f"two nodes, one dies{name}", sizes=(1, 1), join=more, job={"dies_at": 7, "norm": True}, environment=lost
        )


def sources(home: Path) -> str:
    """For PYTHONPATH."""
    return os.pathsep.join((str(home / "src"), str(home / "bench/src")))


def environment(home: Path, case: Case, node: int, local_rank: int, port: int) -> dict[str, str]:
    rank, sizes = sum(case.sizes[:node]) + local_rank, case.sizes
    own = {"RANK": rank, "WORLD_SIZE": sum(sizes), "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": sizes[node]}
    own |= {"GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PACELINE_HOST": f"node{node}"}
    if len(set(sizes)) > 1:
        own["PACELINE_LOCAL_SIZES"] = ",".join(map(str, sizes))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    kept |= {"PYTHONPATH": sources(home), "OMP_NUM_THREADS": "1", "PACELINE_SECRET": "golden" * 6} | ALONE
    return kept | {name: str(value) for name, value in own.items()} | case.environment


def play(home: Path, case: Case, folder: Path, **more: Any) -> dict[str, Any]:
    """What each of its processes came to. Raises RuntimeError where one failed that was not to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    engine = case.engine if ":" in case.engine or case.engine == "sequential" else ""
    join = {"engine": engine or None, "exchange": case.exchange, "codec": case.codec} | case.join
    words = json.dumps(case.job | more | {"join": join})
    started = [
        (node, subprocess.Popen(
            [sys.executable, str(JOB), str(folder), words],
            env=environment(home, case, node, local_rank, port),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ))
        for node, size in enumerate(case.sizes)
        for local_rank in range(size)
    ]  # fmt: skip
    failed = []
    try:
        for node, process in started:
            _, said = process.communicate(timeout=LIMIT_S)
            if process.returncode and not (node == 1 and "dies_at" in case.job):
                failed.append(said[-1500:])
    finally:
        for _, process in started:
            process.kill()
            process.wait()
    if failed:
        raise RuntimeError("\n".join(failed))
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return found | {"bytes": sent(folder / "run")}


def sent(run: Path) -> list[int]:
    """Of each step, by the record."""
    lines = [json.loads(line) for path in run.glob("record.jsonl") for line in path.read_text().splitlines()]
    return [line["sent_bytes"] for line in lines if line["event"] == "step" and "sent_bytes" in line]


def unlike(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two of them differ, each by the way to it."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            each
            for key in sorted(one.keys() | other.keys())
            for each in unlike(one.get(key), other.get(key), f"{where}/{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [each for i, pair in enumerate(zip(one, other, strict=True)) for each in unlike(*pair, f"{where}/{i}")]
    return [] if one == other else [f"{where}: {one!r} before, {other!r} now"]


SIMULATED = """
import importlib, json, sys
first = ("paceline.bench.simulated.{}", ("tally", "play")), ("paceline_bench.simulated.{}", ("summary", "simulate"))
for room, (tally, play) in first:
    try:
        tally, play = importlib.import_module(room.format(tally)), importlib.import_module(room.format(play))
        break
    except ModuleNotFoundError:
        pass
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    for waits in (False, True):
        o = play.play(tally.schedule(seed, waits))
        came = [sorted(o.fired.items()), o.violations, o.num_messages, o.num_meetings, o.left_out, o.given_up]
        print(json.dumps([seed, waits, *came, o.num_starts, o.num_admitted]))
"""
SIGNATURE = "import inspect, paceline; print(inspect.signature(paceline.join))"


def asked(home: Path, words: Sequence[str], limit_s: float = 3600.0) -> str:
    own = {"PYTHONPATH": sources(home), "OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | ALONE | own,
        capture_output=True, text=True, check=False, timeout=limit_s,
    )  # fmt: skip
    return done.stdout + (done.stderr if done.returncode else "")


def both(before: Path, words: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda home: asked(home, words).splitlines(), (before, HOME))
    return (
        unlike(one, other) if len(one) == len(other) else [f"{len(one)} lines before, {len(other)} now: {other[-3:]}"]
    )


def compare(before: Path, case: Case, folder: Path) -> list[str]:
    """How the two versions differ in it, and in going on from the other one's checkpoint."""
    places = {name: folder / name for name in ("before", "now", "before-restored", "now-restored")}
    for place in places.values():
        place.mkdir(parents=True)
    try:
        found = unlike(play(before, case, places["before"]), play(HOME, case, places["now"]))
        if case.job.get("folder", True) and "dies_at" not in case.job:
            for name in ("before-restored", "now-restored"):
                subprocess.run(["cp", "-r", str(places["before"] / "run"), str(places[name] / "run")], check=True)
            more = {"restores": True, "epochs": 3}
            one = play(before, case, places["before-restored"], **more)
            found += unlike(one, play(HOME, case, places["now-restored"], **more), "restored")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return found


def shown(found: Sequence[str]) -> list[str]:
    """The first of each kind: bytes of every step would hide all else."""
    kinds: dict[str, list[str]] = {}
    for one in found:
        kinds.setdefault(re.sub(r"/\d+.*", "", one), []).append(one)
    return [f"{each[0]}; {len(each)} such" for each in kinds.values()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True, help="another checkout, which holds src/paceline")
    parser.add_argument("--only", default="", help="trainings whose names hold this")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    before, wrong = given.before.resolve(), 0
    if not (before / "src/paceline").is_dir():
        parser.error(f"--before is another checkout, which holds src/paceline; got {before}")
    checks: list[tuple[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-golden-") as home:
        for i, case in enumerate(case for case in cases() if given.only in case.name):
            checks.append((case.name, lambda i=i, case=case: compare(before, case, Path(home) / f"{i}")))
        if not given.only:
            checks += [
                (f"{name} --help", lambda name=name: both(before, ["-m", "paceline", name, "--help"]))
                for name in COMMANDS
            ]
            checks.append(("join's signature", lambda: both(before, ["-c", SIGNATURE])))
            checks.append(
                (f"{given.seeds} simulated seeds", lambda: both(before, ["-c", SIMULATED, "0", f"{given.seeds}"]))
            )
        for name, check in checks:
            found = check()
            wrong += bool(found)
            print(f"{'DIFFERS' if found else 'same   '}  {name}", *shown(found), sep="\n           ", flush=True)
    print(f"{len(checks) - wrong} of {len(checks)} the same")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
