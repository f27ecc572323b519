"""Parameters that do not train: rank 0's in every process when all join, as those that do."""

from __future__ import annotations

import torch

from paceline.contract import Exchange


def plant(model: torch.nn.Module, exchange: Exchange, own: Exchange, seat: tuple[int, int]) -> None:
    """They lie in each process, and not in the memory that a node's processes share.

    ``own``: what the process that holds the link has of ``exchange``. ``seat``: (this process, of how many here).
    """
    rank, size = seat
    still = [each.detach() for each in model.parameters() if not each.requires_grad]
    if rank == 0 and still:
        own.spread(still)
    for frozen in still if size > 1 else ():
        if frozen.numel():
            here = frozen.cpu().contiguous().reshape(-1)
            words = exchange.hand(here.view(torch.uint8).numpy().tobytes() if rank == 0 else b"")
            if rank:
                frozen.copy_(torch.frombuffer(bytearray(words), dtype=here.dtype).view(frozen.shape))
