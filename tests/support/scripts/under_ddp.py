"""Two ranks train the same job under torch's DistributedDataParallel and under ours, case by case.

    under_ddp.py FOLDER [packed]

Rank 0 writes FOLDER/said.json: for each case how far the weights are apart, and how many steps sent factors. "packed":
some cases alone, as on a slow network.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel.distributed import DistributedDataParallel as Theirs
from torch.utils.checkpoint import checkpoint

from paceline.ddp import module as ours_module
from paceline.ddp.module import DistributedDataParallel as Ours
from paceline.ddp.sums import bucket_sums, hierarchical, lane

STEPS, IN, OUT = 10, 300, 5
bucket_sums.Trial.next = lambda self: True  # from the first step on, whatever is faster here
ours_module.BUCKET_BYTES = 1 << 11
hierarchical.MIN_BYTES, hierarchical.CHUNK_BYTES, hierarchical.GATHERED_BYTES = 64, 1 << 16, 1 << 14


class Counted(hierarchical.Hierarchical):
    """Which counts its sums and gathers."""

    count = gathers_made = 0

    def add(self, own):
        Counted.count += 1
        super().add(own)

    def gather(self, own):
        Counted.gathers_made += 1
        return super().gather(own)


hierarchical.Hierarchical = Counted


class Net(nn.Module):
    def __init__(self, drop=0.0, tied=False, again=False, unused="", saved=False, norm=True):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(IN, 400), nn.Linear(400, 400), nn.Linear(400, OUT)
        self.norm = nn.BatchNorm1d(400) if norm else nn.Identity()
        self.drop, self.tied, self.again, self.unused, self.saved = drop, tied, again, unused, saved

    def forward(self, x):
        skips = self.unused == "everywhere" or (self.unused == "here" and dist.get_rank() == 1)
        x = F.dropout(torch.relu_(self.norm(self.first(x))), self.drop)
        if self.saved:
            x = checkpoint(self.second, x, use_reentrant=False)
        elif not skips:
            x = self.second(x)
        if self.again:
            x = self.second(torch.tanh(x))
        if self.tied:
            x = F.linear(torch.tanh(x), self.second.weight)
        return self.head(torch.relu(x))


def batches(steps, kind=torch.float64, uneven=True):
    dice = torch.Generator().manual_seed(dist.get_rank() + 1)
    for step in range(steps):
        rows = 6 + dist.get_rank() if step % 3 and uneven else 4
        yield torch.randn(rows, IN, generator=dice, dtype=kind), torch.randint(0, OUT, (rows,), generator=dice)


def train(
    kind, net=None, wrap=None, steps=STEPS, penalty=0.0, accumulate=0, twice=False, join=None, hook=None, alone=False,
    zero=False, dtype=torch.float64, autocast=False, compiled="", clip=None, late=False, traced=False, scaled=False,
):  # fmt: skip
    torch.manual_seed(0)
    wrap = {name: dist.new_group() if value == "new" else value for name, value in (wrap or {}).items()}
    made = Net(**(net or {})).to(dtype)
    if traced:
        made = torch.jit.trace(made, torch.randn(4, IN, dtype=dtype), check_trace=False)
    module = kind(torch.compile(made, backend="eager") if compiled == "inside" else made, **wrap)
    forward = torch.compile(module, backend="eager") if compiled == "outside" else module
    if hook:
        hook(module)
    sgd = {"lr": 0.05, "momentum": 0.9}
    if zero:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, **sgd)
    else:
        optimizer = torch.optim.SGD(module.parameters(), **sgd)
    torch.manual_seed(100 + dist.get_rank())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def loss_of(x, y, forward=forward):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(forward(x), y)
        return loss + penalty * sum((each**2).sum() for each in module.parameters()) if penalty else loss

    def loop():
        for x, y in batches(steps if join is None else steps - 3 * dist.get_rank(), dtype, not autocast):
            optimizer.zero_grad()
            for _ in range(accumulate):
                with module.no_sync():
                    loss_of(x, y).backward()
            if alone:
                loss_of(x, y, module.module).backward()
            loss = loss_of(x, y)
            if twice:
                loss = loss + loss_of(x.flip(0), y.flip(0))
            scaler.scale(loss).backward()
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()

    with module.join(divide_by_initial_world_size=join) if join is not None else contextlib.nullcontext():
        loop()
    return module


def half_of_builtin(module):
    module._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def power(module):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


CASES = {
    "plain": {},
    "clipped": {"clip": 0.1},
    "dropout": {"net": {"drop": 0.3}},
    "penalty": {"penalty": 1e-4},
    "tied": {"net": {"tied": True}},
    "again": {"net": {"again": True}},
    "accumulated": {"accumulate": 2},
    "two forwards": {"twice": True},
    "module alone": {"alone": True},
    "joined": {"join": True},
    "joined, mean of those left": {"join": False},
    "unused here": {"net": {"unused": "here"}, "wrap": {"find_unused_parameters": True}},
    "unused everywhere": {"net": {"unused": "everywhere"}, "wrap": {"find_unused_parameters": True}},
    "static graph": {"wrap": {"static_graph": True}},
    "views": {"wrap": {"gradient_as_bucket_view": True}},
    "small buckets": {"wrap": {"bucket_cap_mb": 1}},
    "checkpointed": {"net": {"saved": True}},
    "own group": {"wrap": {"process_group": "new"}},
    "buffers of each": {"wrap": {"broadcast_buffers": False}},
    "allreduce hook": {"hook": lambda module: module.register_comm_hook(None, default_hooks.allreduce_hook)},
    "fp16 hook": {"hook": lambda module: module.register_comm_hook(None, default_hooks.fp16_compress_hook)},
    "built-in fp16 hook": {"hook": half_of_builtin},
    # in one bucket: over gloo its callbacks would begin their sums in another order on each rank
    "PowerSGD hook": {"hook": power, "wrap": {"bucket_cap_mb": 100}},
    "ZeRO": {"zero": True},
    "float32": {"dtype": torch.float32, "net": {"norm": False}},
    "autocast": {"dtype": torch.float32, "autocast": True, "net": {"norm": False}},
    "scaled": {"scaled": True},
    "traced": {"traced": True},
    "compiled": {"compiled": "inside"},
    "compiled whole": {"compiled": "outside"},
}


def buckets(module):
    return module._get_ddp_logging_data().get("rebuilt_bucket_sizes", "").count(",") + 1


def gap(ours, theirs):
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max(float((a - b).double().norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)


def equal_everywhere(module):
    own = torch.cat([each.detach().reshape(-1).view(torch.uint8) for each in module.parameters()])
    other = own.clone()
    dist.broadcast(other, 0)
    return torch.equal(own, other)


PACKED = ("plain", "accumulated", "joined", "joined, mean of those left", "unused here", "small buckets", "float32")


def as_on_a_slow_network():
    """Whatever is measured; returns a list that gets a number for each payload that is packed."""
    packed, pack = [], lane.pack
    lane.SLOW_S, lane.TIMED_BYTES, lane.MIN_BYTES = 0.0, 0, 64
    lane.Lane.distant = property(lambda self: True, lambda self, value: None)
    lane.pack = lambda own: packed.append(own.numel()) or pack(own)
    return packed


def main(folder, network=""):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said, packed = {}, as_on_a_slow_network() if network else []
    for name, options in ((name, CASES[name]) for name in (PACKED if network else CASES)):
        packed.clear()
        Counted.count = Counted.gathers_made = 0
        theirs = train(Theirs, **options)
        before = torch.get_rng_state()
        ours = train(Ours, **options)
        alike = torch.tensor([torch.equal(before, torch.get_rng_state()), equal_everywhere(ours)])
        dist.all_reduce(alike, dist.ReduceOp.MIN)
        sums = ours._sums
        said[name] = {
            "gap": gap(ours, theirs),
            "factored": sum(trial.steps[True] for trial in sums.trials.values()) if sums else None,
            "same dice": bool(alike[0]),
            "bit-equal": bool(alike[1]),
            "buckets": [buckets(ours), buckets(theirs)],
            "packed": packed[:],
            "shared": Counted.count,
            "gathers": Counted.gathers_made,
            "keys": list(ours.state_dict()) == list(theirs.state_dict()),
            "copies": 0.0
            if options.keys() & {"compiled", "hook", "traced"} or name == "own group"
            else gap(copy.deepcopy(ours), ours),
        }
    if dist.get_rank() == 0:
        (Path(folder) / "said.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
