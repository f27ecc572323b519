"""No exchange: paceline on every node, each alone, with the same local plan. The limit of its own exchange."""

import os

from torch.nn.functional import cross_entropy

import paceline

ONE_OF_MANY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def start(work):
    model = work.network()
    kept = {name: os.environ.pop(name) for name in ONE_OF_MANY if name in os.environ}
    try:
        pace = paceline.join(model, work.sgd(model), cross_entropy, batch_size=work.batch, engine=work.row)
    finally:
        os.environ.update(kept)
    return lambda: pace.step((work.x, work.y))
