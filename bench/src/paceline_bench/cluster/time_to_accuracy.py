"""Fashion-MNIST to 90 % test accuracy on two nodes over 1 Gbit/s: seconds of ours, against DDP in the same run.

    python -m paceline_bench.cluster.time_to_accuracy FOLDER

is one node of it. A small network with large fully-connected layers; 128 images per step. Both contenders see the same
images in the same order from the same weights, and take turns of a tenth of an epoch; each is tested after its turn,
and only its steps are on its clock.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline_bench.cluster.driver import Desk, drive
from paceline_bench.cluster.namespaces import sent_bytes
from paceline_bench.cluster.race import Pace
from paceline_bench.result import Finding, Show

dist: Any = torch.distributed  # its stubs leave out what we use

PACKAGE = "dataset-fashion-mnist"
PLACES = (Path("/usr/share/datasets/fashion-mnist"),)
NODES, RATE = 2, "1gbit"
BATCH, RATE_OF_LEARNING, MOMENTUM = 128, 0.02, 0.9
GOAL, EPOCHS, PARTS = 0.90, 12, 10
MEAN, STD = 0.286, 0.353
LIMIT_S = 1500.0


def images(part: str, places: tuple[Path, ...] = PLACES) -> tuple[Tensor, Tensor]:
    """(n, 1, 28, 28) normalised and (n,) of "train" or "t10k". Raises ValueError where the package is absent."""
    for place in places:
        found = [sorted(place.rglob(f"{part}-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1")]
        if all(found):
            pixels, labels = (_idx(paths[0]) for paths in found)
            x = (torch.from_numpy(pixels).float() / 255 - MEAN) / STD
            return x.unsqueeze(1), torch.from_numpy(labels).long()
    raise ValueError(
        f"no Fashion-MNIST in {', '.join(map(str, places))}; it comes with the Debian package {PACKAGE}: "
        f"apt-get install {PACKAGE}"
    )


def _idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An IDX file of bytes, packed or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dims = data[3]
    shape = np.frombuffer(data, ">u4", dims, 4).tolist()
    return np.array(np.frombuffer(data, np.uint8, offset=4 + 4 * dims), np.uint8).reshape(tuple(shape))


def network() -> nn.Module:
    """10.7 million parameters, all but 19,000 of them in fully-connected layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(3136, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)),
    )


def to_goal(pace: Pace, show: Show) -> Iterator[Finding]:
    """Fashion-MNIST to 90 % test accuracy, two nodes, 1 Gbit/s: 12 minutes."""
    images("t10k")
    images("train")
    steps = pace.turns or 60_000 // BATCH // PARTS
    parts = EPOCHS * PARTS if pace.turns is None else 2
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        (Path(folder) / "fashion.json").write_text(json.dumps({"steps": steps, "parts": parts}))
        said = drive(NODES, ["-m", __name__], Path(folder), LIMIT_S, show)[0]
    lines = ["| contender | accuracy | seconds | steps | MB per node and step |", "|---|---|---|---|---|"]
    for name, one in said.items():
        lines.append(
            f"| {name} | {one['accuracy'][-1]:.2%} | {one['seconds']:.1f} | {one['steps']} | {one['sent_mb']:.2f} |"
        )
    lines += ["", *(f"{name}: {' '.join(f'{a:.3f}' for a in one['accuracy'])}" for name, one in said.items())]
    what = f"Fashion-MNIST to {GOAL:.0%} test accuracy, {NODES} nodes, {RATE}"
    yield Finding("fashion", f"{what}: accuracy after each part", "see below", "-", True, "\n".join(lines), said)
    figure = ", ".join(
        f"{name} {one['seconds']:.0f} s{'' if one['reached'] else ' (not reached)'}" for name, one in said.items()
    )
    sooner = said["paceline"]["reached"] and said["paceline"]["seconds"] < said["ddp"]["seconds"]
    yield Finding("fashion", what, figure, "sooner than DDP", sooner)


def main(folder: str) -> None:
    asked = json.loads((Path(folder) / "fashion.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    desk = Desk(Path(folder), rank)
    (x, y), test = images("train"), images("t10k")
    models = {"paceline": network(), "ddp": network()}
    sgd = {name: torch.optim.SGD(m.parameters(), RATE_OF_LEARNING, MOMENTUM) for name, m in models.items()}
    pace = paceline.join(
        models["paceline"], sgd["paceline"], F.cross_entropy, batch_size=BATCH, engine="sequential", shares="equal"
    )
    wrapped = DistributedDataParallel(models["ddp"])

    def by_hand(rows: Tensor, labels: Tensor) -> None:
        sgd["ddp"].zero_grad()
        F.cross_entropy(wrapped(rows), labels).backward()  # type: ignore[no-untyped-call]
        sgd["ddp"].step()

    steps = {"paceline": lambda rows, labels: pace.step((rows, labels)), "ddp": by_hand}
    said: dict[str, Any] = {
        name: {"seconds": 0.0, "steps": 0, "accuracy": [], "reached": False, "sent_mb": 0.0} for name in steps
    }
    dist.barrier()
    desk.ask(rate=RATE)
    each = BATCH // size
    for part in range(asked["parts"]):
        desk.ask(show=f"Fashion-MNIST, part {part + 1} of {asked['parts']}")
        rows = _order(part, asked["steps"], len(x))[:, rank * each : (rank + 1) * each]
        for name, step in steps.items():
            if not said[name]["reached"]:
                _part(said[name], models[name], step, x, y, rows, test, rank, size, desk)
        if all(one["reached"] for one in said.values()):
            break
    dist.barrier()
    desk.ask(rate=None)
    pace.close()
    desk.tell(said)
    dist.barrier()
    dist.destroy_process_group()


def _order(part: int, steps: int, count: int) -> Tensor:
    """(steps, BATCH) samples of a part of an epoch, the same on every node and for every contender."""
    dice = torch.Generator().manual_seed(part // PARTS)
    epoch = torch.randperm(count, generator=dice)
    first = part % PARTS * steps * BATCH % (count - steps * BATCH + 1)
    return epoch[first : first + steps * BATCH].view(steps, BATCH)


def _part(
    said: dict[str, Any],
    model: nn.Module,
    step: Any,
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    test: tuple[Tensor, Tensor],
    rank: int,
    size: int,
    desk: Desk,
) -> None:
    """Trains for a part of an epoch, by the clock, then tests each node's part of the test images."""
    desk.stay()
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    for mine in rows:
        step(x[mine], y[mine])
    dist.barrier()
    said["seconds"] += time.perf_counter() - start
    said["sent_mb"] = (sent_bytes() - before) / len(rows) / 1e6
    said["steps"] += len(rows)
    images_, labels = (torch.split(each[rank::size], 500) for each in test)
    model.eval()
    with torch.no_grad():
        hits = [(model(a).argmax(1) == b).sum() for a, b in zip(images_, labels, strict=True)]
    model.train()
    right = torch.stack(hits).sum().reshape(1)
    dist.all_reduce(right)
    said["accuracy"].append(int(right) / len(test[0]))
    said["reached"] = said["accuracy"][-1] >= GOAL


if __name__ == "__main__":
    main(*sys.argv[1:])
