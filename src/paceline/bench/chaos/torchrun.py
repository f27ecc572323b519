"""What a killed node costs: time until the training is further than it had been, here and under torchrun.

There, the workers of all nodes are started again, and go on from a checkpoint. Only the worker is killed, and its agent
starts it again, which is quicker than to lose the agent as well.
"""

from __future__ import annotations

import contextlib
import os
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

from paceline.bench.chaos import ddp, journal, training
from paceline.bench.chaos.faults import KILL
from paceline.bench.chaos.journal import Life
from paceline.bench.chaos.many import suffer
from paceline.bench.chaos.tally import quantile
from paceline.bench.cluster.namespaces import Cluster

Show = Callable[[str], None]
PORT = 29400
DEMANDED = 10.0  # times less
LIMIT_S, END_S = 300.0, 20.0
WARM = 25  # steps, so that there is a checkpoint
EPOCHS = 16  # of each training of ours, in which two nodes of four are killed
GLANCE_S = 0.01
# else agents that restart for another's loss find the addresses of the attempt before, and start again for ever
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Torchrun:
    """An agent on each node; ``folder`` is seen by all."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int):
        self.cluster, self.folder = cluster, folder
        self.known: dict[str, Life] = {}
        self.agents = [self._start(node, steps) for node in range(cluster.num_nodes)]

    def _start(self, node: int, steps: int) -> subprocess.Popen[Any]:
        here, first = self.cluster.address(node), self.cluster.address(0)
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{self.cluster.num_nodes}"),
            *("--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "chaos"),
            *("--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-conf", f"is_host={int(here == first)}"),
            *("--local-addr", here, "-m", ddp.__name__),
            *(str(self.folder), str(steps)),
        ]
        with (self.folder / f"{node}.err").open("w") as errors:
            return self.cluster.start(node, words, OWN_STORE, stdout=errors, stderr=errors)

    def newest(self) -> int:
        journal.read(self.folder, self.known)
        return max((life.newest for life in self.known.values()), default=-1)

    def wait_for(self, step: int) -> None:
        """Until it was applied by anybody. Raises ValueError."""
        end = time.monotonic() + LIMIT_S
        while self.newest() < step:
            if time.monotonic() > end or any(agent.poll() is not None for agent in self.agents):
                said = (self.folder / "0.err").read_text().strip()[-1500:]
                raise ValueError(
                    f"torchrun came to step {self.newest()} of {step} in {LIMIT_S:.0f} s; it said:\n{said}"
                )
            time.sleep(GLANCE_S)

    def kill(self, node: int) -> float:
        """Its worker, at once. When that was."""
        for life in self.known.values():
            if life.node == node and life.lives:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(life.pid, signal.SIGKILL)
        return time.monotonic()

    def close(self) -> None:
        for agent in self.agents:
            agent.terminate()
        for agent in self.agents:  # it ends its worker
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(END_S)
        journal.read(self.folder, self.known)
        for life in self.known.values():
            if life.lives:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(life.pid, signal.SIGKILL)


def lost(num_faults: int, seed: int, nodes: int, show: Show) -> list[float]:
    """Seconds, for each of so many kills of a node's worker."""
    dice, found = Random(seed), []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-torchrun-")))
        run = Torchrun(stack.enter_context(Cluster(nodes)), folder, steps=10**6)
        stack.callback(run.close)
        run.wait_for(WARM)
        for number in range(num_faults):
            time.sleep(dice.uniform(0.5, 2.0))
            run.newest()
            struck_s = run.kill(dice.randrange(1, nodes))
            before = run.newest()
            run.wait_for(before + 1)
            found.append(_first_after(run.known.values(), before) - struck_s)
            show(f"torchrun, fault {number + 1}, step {before}: {found[-1]:.2f} s")
            run.wait_for(before + WARM)
    return found


def _first_after(lives: Iterable[Life], step: int) -> float:
    return min(each.t for life in lives for number, each in life.applied.items() if number > step)


def compare(num_faults: int, seed: int, nodes: int, folder: Path | None, show: Show) -> int:
    """Prints both. Returns 1 where ours is not DEMANDED times less."""
    theirs = lost(num_faults, seed, nodes, show)
    outcomes, _ = suffer(num_faults, seed, [KILL], nodes, EPOCHS, show)
    ours = [one.recovery_s for one in outcomes if one.recovery_s is not None]
    words = _told(ours, theirs, nodes)
    print(words)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "torchrun.md").write_text(words + "\n")
    return int(statistics.median(theirs) < DEMANDED * statistics.median(ours))


def _told(ours: Sequence[float], theirs: Sequence[float], nodes: int) -> str:
    rows = [
        f"| {name} | {len(each)} | {quantile(each, 0.5):.2f} | {quantile(each, 0.99):.2f} |"
        for name, each in (("`paceline run --nodes`", ours), ("torchrun, started again from a checkpoint", theirs))
    ]
    ratio = statistics.median(theirs) / statistics.median(ours)
    return "\n".join(
        [
            f"A killed node of {nodes}: seconds from the kill to the first step that nobody had applied before; steps "
            f"of {training.STEP_S * 1e3:.0f} ms, a checkpoint every {training.SAVE_EVERY}.",
            "",
            "| | kills | p50, s | p99, s |",
            "|---|---|---|---|",
            *rows,
            "",
            f"{ratio:.1f} times less (demanded: {DEMANDED:.0f}). Horovod elastic is not compared here.",
        ]
    )
