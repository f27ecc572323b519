"""What is trained while faults strike: python -m paceline_bench.chaos.training FOLDER LAUNCH EPOCHS [CLIP [WAY]].

A small network with factors, and batch norm over everyone where the way can, in float64, steps of some STEP_S. It goes
on from the run's newest checkpoint, keeps a journal in FOLDER, saves beside the training, and leaves its weights there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.checkpoint import checkpoint
from paceline.data.sampler import permutation
from paceline.errors import CheckpointError
from paceline.transport import ViewChange
from paceline_bench.chaos.journal import Journal
from paceline_bench.chaos.ways import ALLREDUCE, WAYS

INPUTS, HIDDEN, CLASSES = 96, 128, 3
SEED, BATCH, COUNT = 3, 24, 24 * 12 + 7  # the last batch of an epoch is a short one
STEPS = -(-COUNT // BATCH)  # of an epoch
STEP_S = 0.05
SAVE_EVERY = 20
AUTO = "auto"  # in place of a launch's number


class Net(nn.Module):
    """Two layers that travel as factors, one that is too small to."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, HIDDEN), {"batch": nn.BatchNorm1d, "row": nn.LayerNorm}[norm](HIDDEN)
        self.second, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.second(F.relu(self.norm(self.first(x))))))
        return out


def build(norm: str = "batch") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(7)
    net = Net(norm).double()
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)


class Samples:
    """A sample's target is its class and its own number."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(COUNT, INPUTS, generator=dice, dtype=torch.float64)
        classes = torch.randint(0, CLASSES, (COUNT,), generator=dice)
        self.y = torch.stack([classes, torch.arange(COUNT)], 1)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def rows(step: int) -> list[int]:
    """The samples of a global batch."""
    at = step % STEPS * BATCH
    return [int(i) for i in permutation(SEED, step // STEPS, COUNT)[at : at + BATCH]]


def mark(tensors: Iterable[Tensor]) -> int:
    """The same for the same bits."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.detach().numpy().tobytes(), total)
    return total


def undisturbed(steps: int, clip: float | None = None, norm: str = "batch") -> tuple[list[float], dict[str, Tensor]]:
    """(losses, weights) of plain PyTorch in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other on so small a network
    net, optimizer = build(norm)
    source, losses = Samples(), []
    for step in range(steps):
        mine = rows(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(source.x[mine]), source.y[mine][:, 0])
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.set_num_threads(threads)
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


def node() -> str:
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def slowly(note: Callable[[list[int]], None]) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss, after it was noted whose it is, and a step's time has passed. Looking at it trains on nothing."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            note(target[:, 1].tolist())
            time.sleep(0.8 * STEP_S)
        return F.cross_entropy(output, target[:, 0])

    return loss


def starts(folder: Path) -> list[str]:
    """The starts of all nodes by the launcher, each by its rendezvous port, in their order."""
    path = folder / "starts"
    return list(dict.fromkeys(path.read_text().split())) if path.exists() else []


def _this_start(folder: Path) -> int:
    """Its number: a launcher that starts all nodes again does not say it. Nodes are given names of their own."""
    name = f"node{os.environ.get('PACELINE_NODE') or os.environ['GROUP_RANK']}"
    os.environ["PACELINE_HOST"] = os.environ.get("PACELINE_HOST") or name
    if os.environ.get("PACELINE_JOIN_TICKET"):  # its processes meet at a port of their own
        return len(starts(folder))
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ['MASTER_PORT']}\n")
    return starts(folder).index(os.environ["MASTER_PORT"]) + 1


def found(folder: Path, launch: int) -> Path:
    """Where the checkpoints are kept that a start by the launcher found."""
    return folder / "found" / f"{launch}"


def _keep_found(folder: Path, launch: int) -> None:
    """By the first of its processes, before it joins: the next checkpoint of the run may remove the oldest."""
    kept = found(folder, launch)
    if kept.exists():
        return
    part = kept.with_name(f"{launch}.{os.getpid()}")
    part.mkdir(parents=True)
    for path in checkpoint.all_of(Path(os.environ["PACELINE_FOLDER"])):
        shutil.copytree(path, part / path.name)
    (part / "whole").touch()  # a folder that is not empty is replaced by no other
    try:
        part.rename(kept)
    except OSError:
        shutil.rmtree(part)


def main(folder: str, launch: str, epochs: str, clip: str = "", name: str = ALLREDUCE) -> None:
    torch.set_num_threads(1)
    if launch == AUTO:
        launch = str(_this_start(Path(folder)))
        _keep_found(Path(folder), int(launch))
    journal = Journal(Path(folder), int(launch), node(), int(os.environ.get("LOCAL_RANK", "0")))
    way = WAYS[name]
    net, optimizer = build(way.norm)
    loss = slowly(lambda mine: journal.note(tried=journal.step, rows=mine))
    pace = paceline.join(
        net,
        optimizer,
        loss,
        batch_size=BATCH,
        seed=SEED,
        batch_norm="sync" if way.norm == "batch" else "local",
        clip=float(clip) if clip else None,
        exchange=way.exchange,
    )
    follow(pace, journal)
    with saved_or_told(), pace:
        pace.restore()
        for batch in pace.batches(Samples(), epochs=int(epochs)):
            # also of a node that came late, which has counted nothing itself
            journal.step, journal.generation = pace.num_steps, pace.control.generation
            try:
                with saved_or_told():  # the step was made, also where what is written beside it was not
                    pace.step(batch)
            except paceline.Stopped:  # after the step, or while too few nodes were left for it
                if pace.num_steps > journal.step:
                    note(pace, journal, way.period == 1)
                raise
            saves = pace.num_steps % SAVE_EVERY == 0
            if saves:  # before which weights are averaged, where they are not in every step
                with saved_or_told():
                    pace.save(wait=False)
            note(pace, journal, saves or way.period == 1)
        state = {name: value.clone() for name, value in net.state_dict().items()}
    own = f"{launch}.{node()}.{pace.world.local_rank}"
    part = Path(folder) / f"{own}.part"
    torch.save(state, part)
    part.replace(Path(folder) / f"{own}.pt")
    journal.note(ended=pace.num_steps)


def note(pace: paceline.Pace, journal: Journal, equal: bool) -> None:
    """``equal``: all have the same weights now."""
    vote = pace.agreement.vote
    # the processes of a node share their weights, and the others may still be at theirs
    seen = mark(pace.job.model.parameters()) if equal and pace.world.local_size == 1 else 0
    loss = vote.loss_sum / vote.weight
    journal.note(applied=journal.step, loss=loss, mark=seen, nodes=pace.world.num_nodes)


def follow(pace: paceline.Pace, journal: Journal) -> None:
    """The journal knows of a new generation while a step is still being made."""
    told = pace.control.on_view_change

    def regrouped(news: ViewChange) -> None:
        journal.generation = news.generation
        if told:
            told(news)

    pace.control.on_view_change = regrouped


@contextlib.contextmanager
def saved_or_told() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        print(f"not saved: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
