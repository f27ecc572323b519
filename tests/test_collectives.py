"""Every algorithm gives the closed form and the same bits everywhere, and costs what it says: messages, bytes, steps."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import traceback
from collections import Counter, defaultdict

import pytest
import torch

import ranks
from paceline import contract
from paceline.find import find
from paceline.launch.local import free_port
from paceline.link import memory
from paceline.link.chosen import Chosen
from paceline.link.collective import Collective, Traffic, names, seconds
from paceline.link.collectives import double_tree
from paceline.link.schedule import Message, packed
from test_links_add_up import LAWS, LIMIT_S, everyone, pattern, same

ALGORITHMS = names()
SIZES = range(1, 10)
LONG = 2 * 3 * double_tree.SEGMENT + 5  # three segments in each half of the double tree, unequal ones


def counts(size):
    return sorted({0, 1, 2, 7, size - 1, size, size + 1, 1001})


def placed(size):
    """Ranks on nodes of unequal size, not side by side."""
    return [(rank * rank) % 3 for rank in range(size)]


class Meter:
    """What really goes over the links: messages and bytes, and the clock of each rank, one tick per message.

    A rank sends one and receives one at a time, and a message takes both ends.
    """

    def __init__(self, size):
        self.changed = threading.Condition()
        self.clocks = [0] * size
        self.sent, self.received = Counter(), Counter()
        self.messages = 0
        self.posts = {}


class Metered(contract.Link):
    """A link whose messages are counted and timed by a meter."""

    def __init__(self, link, meter):
        self.link, self.meter = link, meter
        self.rank, self.size, self.hosts = link.rank, link.size, link.hosts
        self.number = Counter()
        self.ended = 0  # when all that was posted last is over

    def _post(self, handle, source, target):
        meter, key = self.meter, (source, target, self.number[source, target])
        self.number[source, target] += 1
        other = target if self.rank == source else source
        with meter.changed:
            meter.posts[key, self.rank] = self.ended if not self.flying else self.flying[0]
            meter.changed.notify_all()
        self.flying.append(meter.posts[key, self.rank])
        return Timed(self, handle, key, other)

    flying: list = []

    def send(self, tensor, peer, tag=0):
        with self.meter.changed:
            self.meter.messages += 1
            self.meter.sent[self.rank] += tensor.nbytes
        return self._post(self.link.send(tensor, peer, tag), self.rank, peer)

    def recv(self, tensor, peer, tag=0):
        return self._post(self.link.recv(tensor, peer, tag), peer, self.rank)
