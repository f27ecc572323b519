"""One golden training, as golden.py starts it in each version: golden_job.py FOLDER CASE.

CASE is JSON (see golden.py). Every process writes what it came to: FOLDER/<node>.<local rank>.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline

IN, WIDE, OUT, COUNT, BATCH = 48, 256, 3, 100, 24  # the last batch of an epoch is a short one


class Net(nn.Module):
    """A layer that may travel as factors, batch norm, and layers that are too small for factors."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(IN, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, OUT)
        self.norm = nn.BatchNorm1d(WIDE) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.second(F.relu(self.first(x))))))


def data() -> torch.utils.data.TensorDataset:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, IN, generator=rng)
    return torch.utils.data.TensorDataset(x, (x[:, :OUT] + 0.1 * torch.randn(COUNT, OUT, generator=rng)).argmax(1))


def digest(value: Any) -> str:
    """Of tensors, and of what holds them, bit by bit."""
    mark = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            part = part.detach().cpu().contiguous()
            mark.update(f"{part.dtype}{tuple(part.shape)}".encode())
            mark.update(part.reshape(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                mark.update(str(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for each in part:
                add(each)
        else:
            mark.update(repr(part).encode())

    add(value)
    return mark.hexdigest()[:16]


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).sum()


def main(folder: Path, case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = Net(case.get("norm", False))
    kind = getattr(torch.optim, case.get("optimizer", "SGD"))
    optimizer = kind(model.parameters(), **case.get("numbers", {"lr": 0.05, "momentum": 0.9}))
    dies_at, node, tries = case.get("dies_at"), int(os.environ.get("GROUP_RANK", "0")), 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal tries
        tries += 1
        if dies_at and tries == dies_at and node == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)

    found: dict[str, Any] = {"losses": [], "norms": []}
    with paceline.join(
        model,
        optimizer,
        loss,
        batch_size=BATCH,
        shares="equal",
        metric=right,
        folder=folder / "run" if case.get("folder", True) else None,
        **case.get("join", {}),
    ) as pace:
        if case.get("restores"):
            pace.restore()
            found["restored"] = digest([model.state_dict(), optimizer.state_dict(), pace.epoch, pace.next_step])
        for batch in pace.batches(data(), epochs=case.get("epochs", 2)):
            if case.get("own"):
                optimizer.zero_grad()
                rows = pace.rows(batch)
                if rows is None:
                    value = pace.update()
                else:
                    *inputs, target = rows
                    pace.backward(F.cross_entropy(model(*inputs), target))
                    pace.clip(0.5)
                    value = pace.update()
            else:
                value = pace.step(batch)
            found["losses"].append(float(value).hex())
            found["norms"].append(None if pace.grad_norm is None else float(pace.grad_norm).hex())
        pace.settle()
        found["right"] = float(pace.evaluate(data())).hex()
        found["weights"] = digest(model.state_dict())
        found["optimizer"] = digest(optimizer.state_dict())
        if case.get("folder", True):
            pace.save()
    name = f"{node}.{os.environ.get('LOCAL_RANK', '0')}.json"
    (folder / name).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
