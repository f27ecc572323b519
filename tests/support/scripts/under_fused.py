"""Several ranks train the same job under torch's DistributedDataParallel and under ours with SGD from factors.

    under_fused.py FOLDER [packed]

Rank 0 writes FOLDER/said.json: for each case how far the weights are apart, or what was refused. "packed": some cases
alone, as on a slow network; each rank writes FOLDER/saidRANK.json.
"""

from __future__ import annotations

import copy
import io
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from under_ddp import CASES, STEPS, Net, Ours, Theirs, as_on_a_slow_network, batches, gap, train

from paceline.ddp import fused
from paceline.ddp.sums.early import EarlySums

SGD = {"nesterov": True, "momentum": 0.9, "weight_decay": 1e-3}


def moved(kind, between=lambda module, loss, x: None, after=lambda made: None, kinds=1, some=None):
    """A plain training with something ``between`` forward and backward, or ``after`` the step; of ``kinds`` modules."""
    torch.manual_seed(0)
    modules = [kind(Net().double()) for _ in range(kinds)]
    trained = [each for module in modules for each in module.parameters()]
    made = torch.optim.SGD(trained[some:] if some else trained, lr=0.05, momentum=0.9)
    for x, y in batches(STEPS):
        made.zero_grad()
        x.requires_grad_(True)
        loss = sum(F.cross_entropy(module(x), y) for module in modules)
        if (seen := between(modules[0], loss, x)) is not None:
            loss = F.cross_entropy(modules[0](seen), y)
        loss.backward()
        made.step(None)
        after(made)
    return modules[-1]


def attacked(module, loss, x):
    """The fast gradient sign method: a pass that gives weights no gradient."""
    return (x + 0.1 * torch.autograd.grad(loss, x)[0].sign()).detach()


def by_hand(
    kind, clear="first", optimizer=torch.optim.SGD, scaled=False, reads=False, save=False, times=1, passes=1, **how
):
    """``clear``: when gradients are cleared: first; last; twice, also between two backward passes; to zero. ``times``
    as many rows. ``passes``: backward, before a step."""
    torch.manual_seed(0)
    module = kind(Net().double())
    made = optimizer(module.parameters(), lr=0.05, **how)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for number, (x, y) in enumerate((x.repeat(times, 1), y.repeat(times)) for x, y in batches(STEPS)):
        if clear == "zero":
            made.zero_grad(set_to_none=False)
        elif clear != "last":
            made.zero_grad()
        if clear == "twice":
            F.cross_entropy(module(x.flip(0)), y).backward()
            made.zero_grad()
        for _ in range(passes):
            scaler.scale(F.cross_entropy(module(x), y)).backward()
        if reads:
            float(module.module.first.weight.grad.abs().max())
        scaler.step(made)
        scaler.update()
        if clear == "last":
            made.zero_grad()
        if save and number == STEPS // 2:  # by either class, to either
            state = made.state_dict()
            made = optimizer(module.parameters(), lr=0.05, **how)
            made.load_state_dict(state)
    return module


MOVED = {
    "attacked": {"between": attacked},
    "two modules": {"kinds": 2},
    "a part of the weights": {"some": 2},
    "stepped twice": {"after": lambda made: made.step()},
    "never cleared": {"after": lambda made: setattr(made, "zero_grad", lambda: None)},
    "copied": {"between": lambda module, loss, x: copy.deepcopy(module) and None},
    "saved whole": {"between": lambda module, loss, x: torch.save(module.module, io.BytesIO())},
}
OWN = {
    "more rows than pay, to zero": {"times": 40, "momentum": 0.9, "clear": "zero"},
    "to zero, foreach": {"foreach": True, "momentum": 0.9, "clear": "zero"},
    "more rows than pay": {"times": 40, "momentum": 0.9},
    "more rows than pay, twice": {"times": 40, "momentum": 0.9, "passes": 2},
    "rows that pay on one rank": {"times": 26, "momentum": 0.9},
    "nesterov, decay": SGD,
    "no momentum": {},
    "cleared last": {"clear": "last", "momentum": 0.9},
    "cleared to zero": {"clear": "zero", "momentum": 0.9},
    "cleared in between": {"clear": "twice", "momentum": 0.9},
    "saved": {"save": True, "momentum": 0.9},
    "foreach": {"foreach": True, "momentum": 0.9},
    "fused of torch": {"fused": True, "momentum": 0.9},
    "Adam": {"optimizer": torch.optim.Adam},
    "scaled": {"scaled": True},
    "read": {"reads": True},
}


OF_BOTH = (
    *("plain", "clipped", "dropout", "penalty", "tied", "again", "accumulated", "two forwards", "module alone"),
    *(
        "joined",
        "unused here",
        "unused everywhere",
        "checkpointed",
        "own group",
        "ZeRO",
        "float32",
        "compiled",
        "allreduce hook",
    ),
)


class Counted(EarlySums):
    """``steps``: of each, how many sums backward began, and how many of them the step could use."""

    steps: list[list[int]]

    def close_round(self):
        self.steps.append([len(self._begun)])
        super().close_round()

    def take(self, layers, states):
        found = super().take(layers, states)
        self.steps[-1].append(len(found))
        return found


def outcome(play):
    theirs = play(Theirs)
    fused.EarlySums, Counted.steps = Counted, []
    os.environ[fused.OPTIMIZER] = fused.FUSED
    try:
        ours = play(Ours)
    except (RuntimeError, ValueError) as error:
        return {"refused": str(error)}
    finally:
        del os.environ[fused.OPTIMIZER]
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, [each.tolist() for each in ours.module.parameters()])
    found = {"gap": gap(ours, theirs), "bit-equal": told.count(told[0]) == len(told), "weights": len(ours._fused.names)}
    return {**found, "early": Counted.steps}


def main(folder, network=""):
    dist.init_process_group("gloo")
    if network:
        packed = as_on_a_slow_network()
        said = {name: outcome(partial(train, **CASES[name])) for name in ("plain", "unused here", "float32")}
        said["more rows than pay"] = outcome(partial(by_hand, **OWN["more rows than pay"]))
        (Path(folder) / f"said{dist.get_rank()}.json").write_text(json.dumps({**said, "packed": packed}))
        return
    said = {}
    for name in OF_BOTH:
        said[name] = outcome(partial(train, **CASES[name]))
    for name, how in MOVED.items():
        said[name] = outcome(partial(moved, **how))
    for name, how in OWN.items():
        said[name] = outcome(partial(by_hand, **how))
    if dist.get_rank() == 0:
        (Path(folder) / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
