"""The same script with paceline's DistributedDataParallel in torch's place."""

from paceline import DistributedDataParallel


def start(work):
    return work.by_hand(DistributedDataParallel(work.model()))
