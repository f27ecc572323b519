"""DDP with PowerSGD of matrix rank 1 from the third step on: lossy, two thin matrices instead of each gradient.

One bucket holds everything: with several, gloo meets the hook's chained sums in another order on each rank.
"""

from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

ONE_BUCKET_MB = 4000


def start(work):
    model = DistributedDataParallel(work.model(), bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    return work.by_hand(model)
