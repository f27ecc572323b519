"""Trains with each optimizer, gathers its state, loads it into a new one and goes on: states.py FOLDER CASE..."""

import copy
import json
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows
from paceline.data.sampler import Assignment
from paceline.errors import LinkError

STEPS, BATCH = 4, 21


class Lars(torch.optim.Optimizer):
    """Each tensor's step is as long as the tensor: its norm is of the whole."""

    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.calls = {"steps": 0}

    @torch.no_grad()
    def step(self, closure=None):
        self.calls["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    trust = p.norm() / (p.grad.norm() + 1e-12)
                    buffer = state.setdefault("buffer", torch.zeros_like(p))
                    state["count"] = state.get("count", 0) + 1
                    buffer.mul_(group["momentum"]).add_(p.grad, alpha=float(trust) * group["lr"])
                    p.sub_(buffer)


class Clipping(torch.optim.SGD):
    """Clips all tensors together: no tensor's update is its own."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.01)
        return super().step(closure)


class Wide(Clipping):
    """Refuses small tensors: what a trial with few values cannot show."""

    def step(self, closure=None):
        if any(p.dim() == 2 and p.shape[1] <= 4 for g in self.param_groups for p in g["params"]):
            raise ValueError("more than four columns, please")
        return super().step(closure)


class Bound(torch.optim.SGD):
    """Takes the parameters it was made with and no others."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.known = [id(p) for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        if any(id(p) not in self.known for g in self.param_groups for p in g["params"]):
            raise KeyError("a parameter that is not known")
        return super().step(closure)


def large(model):
    return [p for p in model.parameters() if p.dim() == 2]


def groups(model):
    first, *rest = model.named_parameters()
    return [{"params": [first], "lr": 0.003}, {"params": rest}]


CASES = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "groups": lambda model: torch.optim.Adam(groups(model), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "muon": lambda model: torch.optim.Muon(large(model), lr=0.01),
    "lars": lambda model: Lars(model.parameters()),
}


def join(model, optimizer):
    return paceline.join(model, optimizer, F.cross_entropy, batch_size=BATCH)


def train(case):
    """(division, losses, state in the middle, weights at the end): two steps, a new optimizer and model, two more."""
    model = build()
    optimizer = CASES[case](model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []

    def steps(pace, seeds):
        for seed in seeds:
            data = rows(BATCH, seed)
            mine = Assignment(0, 1, pace.world.local_rank, pace.world.local_size).rows(BATCH)
            losses.append(pace.step(tuple(part[mine.start : mine.stop] for part in data)))
            optimizer.zero_grad()
            schedule.step()

    with join(model, optimizer) as pace:
        steps(pace, range(2))
        state = copy.deepcopy(optimizer.state_dict())
        middle = {name: value.clone() for name, value in model.state_dict().items()}
        division = pace.engine.division
        parts = in_parts(pace)
    model = build()
    model.load_state_dict(middle)
    optimizer = CASES[case](model)
    with join(model, optimizer) as pace:
        for part, windows in parts:
            pace.engine.take_optimizer_rows(part, windows)
        same(pace.engine.optimizer_state()["state"], state["state"])
        pace.engine.load_optimizer_state(state)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        steps(pace, range(2, STEPS))
    return division, losses, state, model.state_dict()


def in_parts(pace):
    """All of the optimizer's state, some rows of each weight at a time where these stand alone."""
    found, weights = [], dict(pace.job.model.named_parameters())
    for third in range(3):
        windows = {}
        for name in pace.engine.optimizer_index:
            rows_ = len(weights[name]) if pace.engine.division == "slices" and weights[name].dim() else 0
            windows[name] = third * rows_ // 3, (third + 1) * rows_ // 3
            if windows[name][1] == windows[name][0]:
                del windows[name]
            if not rows_ and third == 0:
                windows[name] = 0, 0
        found.append((copy.deepcopy(pace.engine.optimizer_rows(windows)), windows))
    return found


def same(some, others):
    assert some.keys() == others.keys()
    for number, state in some.items():
        assert state.keys() == others[number].keys()
        for key, value in state.items():
            other = others[number][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (number, key)


def refusals():
    """What each wrong use says, as seen by this process."""
    said = {}

    def note(name, call):
        try:
            call()
        except (ValueError, RuntimeError, LinkError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    model = build()
    note("coupled", lambda: join(model, Clipping(model.parameters(), lr=0.1)))
    note("wide", lambda: join(model, Wide(model.parameters(), lr=0.1)))
    note("bound", lambda: join(model, Bound(model.parameters(), lr=0.1)))
    note("closure", lambda: join(model, torch.optim.LBFGS(model.parameters())))
    optimizer = CASES["sgd"](model)
    pace = join(model, optimizer)
    note("group", lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]}))
    note("groups", lambda: optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}))
    if pace.leader:
        note("alone", optimizer.state_dict)
    else:
        note("alone", lambda: pace.step(rows(2, 0)))
    pace.close()
    note("late", optimizer.state_dict)
    said["cores"] = sorted(os.sched_getaffinity(0))
    return said


def main(folder, *cases):
    rank = os.environ["LOCAL_RANK"]
    for case in cases:
        if case == "refusals":
            Path(folder, f"refusals-{rank}.json").write_text(json.dumps(refusals()))
        else:
            torch.save(train(case), Path(folder, f"{case}-{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
