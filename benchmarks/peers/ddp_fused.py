"""As ddp-paceline, with SGD that takes factors: PACELINE_DDP_OPTIMIZER=fused."""

import os
from unittest import mock

from paceline import DistributedDataParallel
from paceline.ddp.fused import FUSED, VARIABLE


def start(work):
    with mock.patch.dict(os.environ, {VARIABLE: FUSED}):
        return work.by_hand(DistributedDataParallel(work.model()))
