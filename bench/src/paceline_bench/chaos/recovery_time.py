"""What a killed node costs: time until the training is further than it had been, here and under others.

    torchrun    the workers of all nodes are started again, and go on from a checkpoint
    horovod     those that are left keep their processes, and go on from what each had committed to memory

Only a worker is killed, and what started it lives, which is quicker for both than to lose that as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from paceline_bench.chaos import ddp, horovod, journal, training
from paceline_bench.chaos.campaign import suffer
from paceline_bench.chaos.faults import KILL
from paceline_bench.chaos.hosts import Machines
from paceline_bench.chaos.journal import Life
from paceline_bench.chaos.summary import quantile

Show = Callable[[str], None]
PORT = 29400
DEMANDED = 10.0  # times less
LIMIT_S, END_S = 300.0, 20.0
WARM = 25  # steps, so that there is a checkpoint
EPOCHS = 16  # of each training of ours, in which two nodes of four are killed
POLL_S = 0.01
MIN_NODES = 2  # nodes that go on
STEPS = 10**6
# else agents that restart for another's loss find the addresses of the attempt before, and start again for ever
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Run:
    """A training on all of the machines' nodes; ``folder`` is seen by all."""

    name = what = ""
    again = True  # who was killed comes back

    def __init__(self, machines: Machines, folder: Path):
        self.machines, self.cluster, self.folder = machines, machines.cluster, folder
        self.known: dict[str, Life] = {}
        self.processes = self.start()

    def start(self) -> list[subprocess.Popen[Any]]:
        raise NotImplementedError

    def run(self, node: int, words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[Any]:
        with (self.folder / f"{node}.err").open("w") as errors:
            return self.cluster.start(node, words, environment, stdout=errors, stderr=errors)

    def newest(self) -> int:
        journal.read(self.folder, self.known)
        return max((life.newest for life in self.known.values()), default=-1)

    def wait_for(self, step: int) -> None:
        """Until it was applied by anybody. Raises ValueError."""
        end = time.monotonic() + LIMIT_S
        while self.newest() < step:
            if time.monotonic() > end or any(process.poll() is not None for process in self.processes):
                said = (self.folder / "0.err").read_text().strip()[-1500:]
                raise ValueError(
                    f"{self.name} came to step {self.newest()} of {step} in {LIMIT_S:.0f} s; it said:\n{said}"
                )
            time.sleep(POLL_S)

    def kill(self, dice: Random) -> float:
        """The worker of a node, at once, but not of that where all began. When that was."""
        journal.read(self.folder, self.known)
        victim = dice.choice([life for life in self.known.values() if life.node and life.lives])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        return time.monotonic()

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:  # it ends its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        journal.read(self.folder, self.known)
        for life in self.known.values():
            if life.lives:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(life.pid, signal.SIGKILL)


class Torchrun(Run):
    """An agent on each node."""

    name, what = "torchrun", "torchrun, started again from a checkpoint"

    def start(self) -> list[subprocess.Popen[Any]]:
        return [self._agent(node) for node in range(self.cluster.num_nodes)]

    def _agent(self, node: int) -> subprocess.Popen[Any]:
        here, first = self.cluster.address(node), self.cluster.address(0)
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{self.cluster.num_nodes}"),
            *("--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "chaos"),
            *("--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-conf", f"is_host={int(here == first)}"),
            *("--local-addr", here, "-m", ddp.__name__),
            *(str(self.folder), str(STEPS)),
        ]
        return self.run(node, words, OWN_STORE)


class Horovod(Run):
    """One launcher, on the first node; the others over ssh. Who failed once is left out from then on."""

    name, what, again = "horovod", "Horovod elastic, from a commit of each step to memory", False

    def start(self) -> list[subprocess.Popen[Any]]:
        count, client = self.cluster.num_nodes, self.folder / "bin" / "ssh"
        client.parent.mkdir()
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.machines.folder}/config "$@"\n')
        hosts = self.folder / "hosts"
        places = "".join(f"echo {self.cluster.address(node)}:1\n" for node in range(count))
        hosts.write_text(f"#!/bin/sh\n{places}")
        for script in (client, hosts):
            script.chmod(0o755)
        words = [
            *(sys.executable, "-c", "from horovod.runner.launch import run_commandline; run_commandline()"),
            *(
                "--gloo",
                "--network-interfaces",
                "e0",
                "-np",
                str(count),
                "--min-np",
                str(MIN_NODES),
                "--max-np",
                str(count),
            ),
            *(
                "--host-discovery-script",
                str(hosts),
                sys.executable,
                "-m",
                horovod.__name__,
                str(self.folder),
                str(STEPS),
            ),
        ]
        # it asks for the address of each node's own name, which must not lead home
        names = "".join(f"{self.cluster.address(node)} node{node}\n" for node in range(count))
        for node in range(count):
            (self.machines.folder / f"hosts{node}").write_text(f"127.0.0.1 localhost\n{names}")
        path = f"{client.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        mount = f"mount --bind {self.machines.folder}/hosts0 /etc/hosts"
        words = ["sh", "-c", f'{mount} && exec "$@"', "sh", *words]
        return [self.run(0, words, {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})]


PEERS: dict[str, type[Run]] = {each.name: each for each in (Torchrun, Horovod)}


def lost(peer: type[Run], num_faults: int, seed: int, nodes: int, show: Show) -> list[float]:
    """Seconds, for each of so many kills of a node's worker."""
    dice, found = Random(seed), list[float]()
    while len(found) < num_faults:
        most = num_faults if peer.again else min(num_faults, len(found) + nodes - MIN_NODES)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-killed-")))
            run = peer(stack.enter_context(Machines(nodes)), folder)
            stack.callback(run.close)
            run.wait_for(WARM)
            while len(found) < most:
                time.sleep(dice.uniform(0.5, 2.0))
                struck_s = run.kill(dice)
                before = run.newest()
                run.wait_for(before + 1)
                found.append(_first_after(run.known.values(), before) - struck_s)
                show(f"{run.name}, fault {len(found)}, step {before}: {found[-1]:.2f} s")
                run.wait_for(before + WARM)
    return found


def _first_after(lives: Iterable[Life], step: int) -> float:
    return min(each.t for life in lives for number, each in life.applied.items() if number > step)


def compare(names: Sequence[str], num_faults: int, seed: int, nodes: int, folder: Path | None, show: Show) -> int:
    """Prints all. Returns 1 where ours is not DEMANDED times less than each. Raises ValueError."""
    if strange := [name for name in names if name not in PEERS]:
        raise ValueError(f"nothing to compare with is called {', '.join(strange)}; known: {', '.join(PEERS)}")
    theirs = {name: lost(PEERS[name], num_faults, seed, nodes, show) for name in names}
    outcomes, _ = suffer(num_faults, seed, [KILL], nodes, EPOCHS, show)
    ours = [one.recovery_s for one in outcomes if one.recovery_s is not None]
    words = _told(ours, theirs, nodes)
    print(words)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "killed.md").write_text(words + "\n")
    return int(any(statistics.median(each) < DEMANDED * statistics.median(ours) for each in theirs.values()))


def _told(ours: Sequence[float], theirs: dict[str, list[float]], nodes: int) -> str:
    mine = statistics.median(ours)
    rows = [("`paceline run --nodes`", ours), *((PEERS[name].what, each) for name, each in theirs.items())]
    return "\n".join(
        [
            f"A killed node of {nodes}: seconds from the kill to the first step that nobody had applied before; steps "
            f"of {training.STEP_S * 1e3:.0f} ms, a checkpoint every {training.SAVE_EVERY}.",
            "",
            "| | kills | p50, s | p99, s | times ours |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {len(each)} | {quantile(each, 0.5):.2f} | {quantile(each, 0.99):.2f} | "
                f"{statistics.median(each) / mine:.1f} |"
                for name, each in rows
            ),
            "",
            f"Demanded: {DEMANDED:.0f} times ours.",
        ]
    )
