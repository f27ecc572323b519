"""Codecs of several nodes on given values, in one process."""

import torch

from paceline.codec.encoding.in_process import in_process
from paceline.messages import Bucket, StepContext


def bucket_of(*shapes, index=0):
    return Bucket(index, tuple(f"weight{i}" for i in range(len(shapes))), tuple(shapes))


def collected(codec, values, step=0, bucket=None, states=None, wants_sent=True):
    """(each node's Coded, its collectives) of a step in which each node has one of ``values``."""
    bucket = bucket or bucket_of((values[0].numel(),))
    states = [codec.init(bucket, 5) for _ in values] if states is None else states
    runs = [
        codec.run(bucket, flat, state, StepContext(step, rank, len(values), wants_sent))
        for rank, (flat, state) in enumerate(zip(values, states, strict=True))
    ]
    return in_process(runs)


def noise(count, dtype=torch.float32, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)
