"""The last rank leaves after one sum, the others want two, and print how that ended for them."""

import os

import torch

from paceline.elastic.membership import connect
from paceline.errors import LinkError
from paceline.link import mpi

mpi.LEFT_S = 0.5
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
link = connect("mpi", rank, size, "", 0).link
link.sum(torch.ones(1)).wait(10)
if rank == size - 1:
    link.close()
else:
    try:
        link.sum(torch.ones(1)).wait(10)
    except LinkError as error:
        print(error, flush=True)
    raise SystemExit(3)
