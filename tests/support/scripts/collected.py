"""Threads read and draw random state while garbage is collected at every allocation; ends within seconds, or never."""

import faulthandler
import gc
import sys
import threading
from types import SimpleNamespace

import torch

from paceline.engine.compute import rng

ROUNDS = 10_000


class Late:
    """Garbage in a cycle, whose destructor lets other threads run."""

    def __init__(self):
        self.own = self

    def __del__(self):
        for _ in range(50):
            pass


def reads():
    for _ in range(ROUNDS):
        Late()
        rng.state()


def draws():
    with rng.ThreadRng(1):
        for _ in range(ROUNDS):
            Late()
            torch.rand(1)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(30, exit=True)
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1, 1, 1)
    rng.random = SimpleNamespace(getstate=Late)  # garbage right before torch's state is read
    threads = [threading.Thread(target=one) for one in (reads, reads, draws, draws)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
