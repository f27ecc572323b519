"""The seed's task, as one process of it: train a network on a folder of images, by ours or by another's means.

    python -m paceline_bench.seed.job '{"way": "paceline", "model": "alexnet", "folder": ..., "said": ..., ...}'

Preprocessing, order of the samples, weights at the beginning, optimizer and loss are the same in every way. Into the
folder ``said`` goes RANK.json: when the program began, when its first step did, when the last one ended.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEGAN = time.time()

import torch  # noqa: E402 - a program's start is counted with its imports
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from paceline.data import images  # noqa: E402
from paceline.data.encoded_images import EncodedImages  # noqa: E402
from paceline.data.sampler import permutation  # noqa: E402
from paceline.train.network import network  # noqa: E402
from paceline_bench.cluster.namespaces import sent_bytes  # noqa: E402

RATE, MOMENTUM, SEED = 0.001, 0.9, 0
MEETS_S = 60.0


@dataclass(frozen=True)
class Job:
    """``way``: "paceline", "torch", "ddp" or "horovod". ``batch``: of all processes together. ``limit``: of the images
    in ``folder``, so many. ``row``: an engine and numerics of ours."""

    way: str
    model: str
    folder: str
    said: str
    batch: int
    limit: int
    epochs: int = 1
    row: str = "sequential"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(text: str) -> None:
    job = Job(**json.loads(text))
    train, _ = images.load(job.folder, seed=SEED)
    assert isinstance(train, images.ImageFolder)
    train = _some(train, job.limit)
    torch.manual_seed(SEED)
    model = network(job.model).build(len(train.classes))
    ways: dict[str, Callable[[Job, nn.Module, EncodedImages], tuple[int, Iterator[float]]]] = {
        "paceline": ours,
        "torch": by_hand,
        "ddp": ddp,
        "horovod": horovod,
    }
    rank, losses = ways[job.way](job, model, train)
    first, before, each = time.time(), _sent(), list[float]()
    for loss in losses:
        each.append(loss)
    said = {"began": BEGAN, "first": first, "ended": time.time(), "sent": _sent() - before, "losses": each}
    (Path(job.said) / f"{rank}.json").write_text(json.dumps(said))


def _sent() -> int:
    """Bytes that left this node; 0 where it has no cable."""
    return sent_bytes() if "e0:" in Path("/proc/self/net/dev").read_text() else 0


def _some(train: images.ImageFolder, count: int) -> images.ImageFolder:
    """The first of each class, by turns."""
    by_class = [
        [path for path, label in zip(train.paths, train._labels.tolist(), strict=True) if label == one]
        for one in range(len(train.classes))
    ]
    chosen = [
        (paths[i], label) for i in range(len(train.paths)) for label, paths in enumerate(by_class) if i < len(paths)
    ]
    paths, labels = zip(*sorted(chosen[:count]), strict=True)
    return images.ImageFolder(paths, labels, train.classes, True, SEED, train.threads)


def ours(job: Job, model: nn.Module, train: EncodedImages) -> tuple[int, Iterator[float]]:
    import paceline

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    pace = paceline.join(model, optimizer, cross_entropy, batch_size=job.batch, seed=SEED, engine=job.row)

    def steps() -> Iterator[float]:
        with pace:
            for batch in pace.batches(train, epochs=job.epochs):
                yield float(pace.step(batch))

    return pace.world.rank, steps()


def by_hand(
    job: Job, model: nn.Module, train: EncodedImages, rank: int = 0, size: int = 1, made: Any = None
) -> tuple[int, Iterator[float]]:
    """``made``: the optimizer, where it is not torch's own."""
    optimizer = made or torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def batches(pool: ThreadPoolExecutor) -> Iterator[tuple[Tensor, Tensor]]:
        """A process's part of each batch; the next one is decoded meanwhile."""
        asked = []
        for epoch in range(job.epochs):
            order = permutation(SEED, epoch, len(train)).tolist()
            for first in range(0, len(order), job.batch):
                whole = order[first : first + job.batch]
                asked.append(
                    pool.submit(train.fetch, whole[rank * len(whole) // size : (rank + 1) * len(whole) // size], epoch)
                )
                if len(asked) > 1:
                    yield asked.pop(0).result()
        yield asked.pop().result()

    def steps() -> Iterator[float]:
        with ThreadPoolExecutor(1) as pool:
            for x, y in batches(pool):
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                yield float(loss)

    return rank, steps()


def ddp(job: Job, model: nn.Module, train: EncodedImages) -> tuple[int, Iterator[float]]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    return by_hand(job, DistributedDataParallel(model), train, dist.get_rank(), dist.get_world_size())


def horovod(job: Job, model: nn.Module, train: EncodedImages) -> tuple[int, Iterator[float]]:
    """Horovod over its gloo; the package horovod (0.28.1), built for this torch, is found by PYTHONPATH."""
    import horovod.torch as hvd  # type: ignore[import-not-found,unused-ignore]
    from horovod.runner.common.util.hosts import (  # type: ignore[import-not-found,unused-ignore]
        get_host_assignments,
        parse_hosts,
    )
    from horovod.runner.http.http_server import (  # type: ignore[import-not-found,unused-ignore]
        RendezvousServer,
    )

    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    own = Path(job.said) / "horovod"
    if not rank:
        server = RendezvousServer(0)
        port = server.start()
        server.init(get_host_assignments(parse_hosts(",".join(f"node{node}:1" for node in range(size))), size))
        own.with_suffix(".part").write_text(str(port))
        own.with_suffix(".part").rename(own)
    until = time.monotonic() + MEETS_S
    while not own.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 of Horovod opened no port within {MEETS_S:.0f} s")
        time.sleep(0.02)
    said: dict[str, Any] = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": 0,
        "LOCAL_SIZE": 1,
        "CROSS_RANK": rank,
        "CROSS_SIZE": size,
    }
    said |= {"HOSTNAME": socket.gethostname(), "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "e0"}
    said |= {"GLOO_RENDEZVOUS_ADDR": host, "GLOO_RENDEZVOUS_PORT": int(own.read_text())}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in said.items()})
    hvd.init()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return by_hand(job, model, train, rank, size, optimizer)


if __name__ == "__main__":
    main(*sys.argv[1:])
