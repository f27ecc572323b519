"""One run of the task from the start of its processes to their end: seconds, processor, memory, bytes.

On this machine, or on nodes of one core each, or of half a core; the nodes are network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.launch.child_processes import end_with
from paceline.report.usage import Tree
from paceline_bench.cluster import mpirun
from paceline_bench.cluster.namespaces import Cluster
from paceline_bench.cluster.slow_node import held
from paceline_bench.result import Show
from paceline_bench.seed.job import Job

SAMPLED_S, SCANNED_S = 0.5, 2.0
LIMIT_S = 1800.0
LAST_LINES = 12
PORT = 29600


@dataclass(frozen=True)
class Setup:
    """Where and how a job is run. ``nodes``: 0 for this machine, where ``cores`` are used by ``processes`` that we
    start, or by those of `paceline run`, where ours. ``mpi``: mpirun starts the nodes. ``part``: of a core, a node's.
    ``over``: batches per global batch (the others' habit of a whole batch on each node)."""

    name: str
    way: str
    row: str = "sequential"
    cores: int = 1
    nodes: int = 0
    processes: int = 1
    mpi: bool = False
    part: float = 1.0
    over: int = 1


@dataclass(frozen=True)
class Outcome:
    """*Units*: seconds from the first process's start to the last one's end, of those until the first step begins;
    percent of one core; bytes of memory (PSS, the most seen) and on the wire, of the node that sends most: in all, and
    per step.
    """

    setup: str
    whole_s: float
    until_first_s: float
    training_s: float
    cpu_percent: float
    memory_bytes: float
    sent_bytes: float
    step_bytes: float
    steps: int
    loss: float


def run(setup: Setup, job: Job, rate: str | None, show: Show) -> Outcome:
    """``rate``: of the cables between nodes. Raises ValueError where a process fails or none ends in time."""
    show(f"{job.model}, {job.limit} images: {setup.name}")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, contextlib.ExitStack() as stack:
        job = replace(job, way=setup.way, row=setup.row, said=folder, batch=job.batch * setup.over)
        words = ["-m", "paceline_bench.seed.job", job.to_json()]
        cluster = stack.enter_context(Cluster(setup.nodes, rate)) if setup.nodes else None
        if cluster and setup.mpi:
            stack.callback(mpirun.end, cluster)  # its daemons on the nodes do not hear of a failure
        errors = stack.enter_context((Path(folder) / "errors").open("w+"))
        before = [cluster.sent_bytes(node) for node in range(setup.nodes)] if cluster else []
        start = time.time()
        if cluster:
            started = list(_on_nodes(setup, cluster, words, Path(folder), errors))
        else:
            started = list(_here(setup, words, errors))
        if setup.part < 1:
            for process in started:
                stack.enter_context(held(process.pid, setup.part))
        seen = _watch(started, errors)
        ended = time.time()
        sent = [cluster.sent_bytes(node) - was for node, was in enumerate(before)] if cluster else [0]
        said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("[0-9]*.json"))]
    losses = said[0]["losses"]
    return Outcome(
        setup=setup.name,
        whole_s=ended - start,
        until_first_s=min(one["first"] for one in said) - start,
        training_s=max(one["ended"] for one in said) - min(one["first"] for one in said),
        cpu_percent=100 * seen.cpu_s / (ended - start),
        memory_bytes=seen.most_bytes,
        sent_bytes=max(sent),
        step_bytes=max(one["sent"] for one in said) / len(losses),
        steps=len(losses),
        loss=sum(losses[-3:]) / len(losses[-3:]),
    )


def _here(setup: Setup, words: Sequence[str], errors: Any) -> Iterator[subprocess.Popen[Any]]:
    """Ours by `paceline run`, others as so many processes, each with its part of the cores."""
    cores = sorted(os.sched_getaffinity(0))[: setup.cores]
    count = 1 if setup.way == "paceline" else setup.processes
    for rank in range(count):
        own = cores[rank * len(cores) // count : (rank + 1) * len(cores) // count]
        pinned = ["taskset", "-c", ",".join(map(str, own)), sys.executable]
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(own)), "MASTER_ADDR": "127.0.0.1"}
        if count > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_PORT": str(PORT)}
        if setup.way == "paceline":
            pinned += ["-m", "paceline", "run", "--plan", setup.row]
        yield subprocess.Popen(
            [*pinned, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - one system call, safe beside threads
        )


def _on_nodes(
    setup: Setup, cluster: Cluster, words: Sequence[str], folder: Path, errors: Any
) -> Iterator[subprocess.Popen[Any]]:
    more = {"PACELINE_FOLDER": "", "PACELINE_ENGINE": "", "PACELINE_SECRET": "of the benchmark alone"}
    if setup.mpi:
        command = ["env", "OMP_NUM_THREADS=1", *mpirun.over(cluster, folder, 1, *words)]
        yield cluster.start(0, command, more, stdout=errors, stderr=errors)
        return
    for node in range(setup.nodes):
        yield cluster.start(node, [sys.executable, *words], more, stdout=errors, stderr=errors)


@dataclass
class Seen:
    cpu_s: float = 0.0
    most_bytes: float = 0.0


def _watch(started: Sequence[subprocess.Popen[Any]], errors: Any) -> Seen:
    """Until all have ended. What they used of the processor is what the system says in the end: `Tree` misses what a
    process does after its last reading."""
    trees, seen = [Tree(process.pid) for process in started], Seen()
    until, scanned = time.monotonic() + LIMIT_S, 0.0
    running = list(started)
    before = os.times()
    try:
        while running:
            now = time.monotonic()
            if now > until:
                raise ValueError(f"the task was not done after {LIMIT_S:.0f} s; give fewer images")
            if now - scanned > SCANNED_S:
                scanned = now
                for tree in trees:
                    tree.scan(0.0)
            seen.most_bytes = max(seen.most_bytes, sum(tree.pss(0.0)["pss_bytes"] for tree in trees))
            time.sleep(SAMPLED_S if now - scanned else 0.0)
            for process in list(running):
                if process.poll() is not None:
                    running.remove(process)
                    if process.returncode:
                        errors.seek(0)
                        last = "\n".join(errors.read().strip().splitlines()[-LAST_LINES:])
                        raise ValueError(f"a process of the task failed (exit code {process.returncode}):\n{last}")
    finally:
        for process in running:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
            if process.poll() is None:
                process.kill()
                process.wait()
    after = os.times()
    seen.cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return seen
