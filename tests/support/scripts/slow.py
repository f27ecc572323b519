"""One sum that takes long: prints its seconds."""

import os
import time

import torch

from paceline.elastic.membership import connect

rank = int(os.environ["RANK"])
link = connect("gloo", rank, 2, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).link
tensor = torch.full((1_000_000,), rank + 1.0)
link.lane("warm").sum(torch.zeros(1)).wait()
start = time.monotonic()
link.sum(tensor).wait()
assert (tensor == 3).all()
print(time.monotonic() - start)
link.close()
