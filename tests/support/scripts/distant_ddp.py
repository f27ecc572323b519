"""Two machines train layers that have no factors under torch's DistributedDataParallel and under ours.

    distant_ddp.py FOLDER SLOW_SUM_S

Rank 0 writes FOLDER/said.json: for each case the largest relative gap between weights, the numbers of buckets, ours
first, how many sums were made in shared memory, and how many parts of sums were packed.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel as Theirs
from under_ddp import Counted, buckets

from paceline.ddp import module as ours_module
from paceline.ddp.module import DistributedDataParallel as Ours
from paceline.ddp.sums import packed_sums

STEPS = 12  # the sixth to the tenth are packed on a slow network
CASES = {
    **{"plain": {}, "static graph": {"static_graph": True}, "own size": {"bucket_cap_mb": 1}, "hook": {}},
    **{"views": {"gradient_as_bucket_view": True}, "unused": {"find_unused_parameters": True}},
    **{"joined": {}, "joined, mean of those left": {}, "accumulated": {}},
}
packed = list[int]()
ours_module.BUCKET_BYTES = 1 << 20  # torch's first bucket
ours_module.SLOW_SUM_S = float(sys.argv[2])
pack = packed_sums.pack
packed_sums.pack = lambda own: packed.append(own.numel()) or pack(own)


class Branches(nn.Sequential):
    """The last layer is not used on the second rank."""

    def forward(self, x):
        return nn.Sequential(*self[:-1])(x) if dist.get_rank() == 1 else super().forward(x)


def train(kind, case):
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 256, 5), nn.BatchNorm1d(256), *(nn.Conv1d(256, 256, 5) for _ in range(3))]
    model = kind((Branches if case == "unused" else nn.Sequential)(*layers), **CASES[case])
    if case == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())

    def loop():
        for _ in range(STEPS - (dist.get_rank() if "joined" in case else 0)):
            optimizer.zero_grad()
            if case == "accumulated":
                with model.no_sync():
                    model(torch.randn(3, 4, 40)).square().mean().backward()
            model(torch.randn(3, 4, 40)).square().mean().backward()
            optimizer.step()

    mean_of_those_left = case == "joined, mean of those left"
    joining = model.join(divide_by_initial_world_size=not mean_of_those_left) if "joined" in case else nullcontext()
    with joining:
        loop()
    return model


def main(folder, _):
    dist.init_process_group("gloo")
    said = {}
    for case in CASES:
        Counted.count = 0
        packed.clear()
        ours, theirs = train(Ours, case), train(Theirs, case)
        pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        gap = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        said[case] = {"gap": gap, "buckets": [buckets(ours), buckets(theirs)], "shared": Counted.count}
        said[case]["packed"] = len(packed)
    if dist.get_rank() == 0:
        (Path(folder) / "said.json").write_text(json.dumps(said))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
