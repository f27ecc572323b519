"""Which rank was lost: said beside torch's error, and soon.

A collective of torch's names no rank that has died, and waits half an hour for one whose machine is gone. Here every
connection between machines ends with an error when the other does not acknowledge for some seconds, which one whose
process is merely busy still does. And every rank says once a second over the script's own store that
it is there; where a collective has failed, and ended the script, the ranks that no longer do are named.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
import torch.distributed

from paceline.link.net import keepalive
from paceline.link.net.works import QUIET_S
from paceline.report.log import log

BEAT_S, STORE_S = 1.0, 3.0
SUSPECT_S = 2.5  # of silence, where a collective has failed already
LEFT = "left"
FAILED = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection timed out", "/gloo/"),
    " lost local rank ",  # of one machine
)


class LostRanks:
    """One for each process. ``store``: of the process group, in which ``rank`` is one of ``size``."""

    def __init__(self, store: Any, rank: int, size: int, host: str):
        self.rank, self.size, self.host, self.pid = rank, size, host, os.getpid()
        self.store = store.clone()  # a connection of its own: a wait on the script's would hold this one up
        self.store.set_timeout(timedelta(seconds=STORE_S))
        self.heard: dict[int, tuple[str, float]] = {}  # (what it said last, when that was new)
        self.left: set[int] = set()
        self.checked_s = time.monotonic()
        self.cut_off = False  # from the store, which rank 0 or a launcher beside it holds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.stop)
        atexit.register(time.sleep, QUIET_S)  # gloo's threads may abort it otherwise
        Finalize(None, self.stop, exitpriority=0)  # a child of multiprocessing's runs no exit handlers
        before = sys.excepthook

        def explained(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            if any(words in str(error) for words in FAILED) and (text := self.explain()):
                log.error(text)

        sys.excepthook = explained

    def stop(self) -> None:
        """At the end of the script, or of its process group."""
        if os.getpid() == self.pid and not self._stop.is_set():
            self._stop.set()
            self._thread.join(STORE_S)
            if self.cut_off:
                return
            with contextlib.suppress(RuntimeError):
                self.store.set(self._key(self.rank), LEFT)

    def explain(self) -> str:
        """The ranks that have ended, fell silent or cannot be reached; waits until that can be said."""
        if self._stop.is_set():
            return ""
        end = time.monotonic() + SUSPECT_S + 2 * BEAT_S
        while not (found := self.silent()) and not self.left and not self.cut_off and time.monotonic() < end:
            time.sleep(BEAT_S / 4)
        ends = f"this process (rank {self.rank}) ends"
        if not found and not self.left and not self.cut_off:  # who ended before the first beat
            found = [rank for rank in range(self.size) if rank not in self.heard and rank != self.rank]
        if found:
            return f"{self._named(found)} was not heard for {SUSPECT_S:g} s and is taken for lost; {ends}"
        if self.left:
            return f"{self._named(sorted(self.left))} has ended; {ends}"
        if self.cut_off and self.rank:
            return f"{self._named([0])} cannot be reached and is taken for lost; {ends}"
        return ""

    def silent(self) -> list[int]:
        now = time.monotonic()
        if now - self.checked_s > SUSPECT_S:
            return []  # nobody was listened to
        return [rank for rank, (_, since) in self.heard.items() if now - since > SUSPECT_S and rank not in self.left]

    def _named(self, ranks: Sequence[int]) -> str:
        hosts = {rank: words.partition(" ")[2] for rank, (words, _) in self.heard.items()}
        return ", ".join(f"rank {rank} ({hosts[rank]})" if rank in hosts else f"rank {rank}" for rank in ranks)

    def _key(self, rank: int) -> str:
        return f"paceline/rank/{rank}"

    def _run(self) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        beat = 0
        while not self._stop.wait(BEAT_S):
            beat += 1
            try:
                self.store.set(self._key(self.rank), f"{beat} {self.host}")
                there = [rank for rank in others if rank in self.heard or self.store.check([self._key(rank)])]
                said = self.store.multi_get([self._key(rank) for rank in there]) if there else []
            except RuntimeError:
                self.cut_off = True
                return
            self._take(there, [each.decode() for each in said])

    def _take(self, ranks: Sequence[int], said: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self.checked_s > SUSPECT_S:  # this process itself stood still
            self.heard = {rank: (words, now) for rank, (words, _) in self.heard.items()}
        self.checked_s = now
        for rank, words in zip(ranks, said, strict=True):
            if words == LEFT:
                self.left.add(rank)
            elif words != self.heard.get(rank, ("", 0.0))[0]:
                self.heard[rank] = words, now


_watched: list[tuple[Any, LostRanks]] = []  # the last of them, and its process group


def watch(group: Any, store: Any, known: Collection[str]) -> None:
    """The connections of ``group``, whose ranks have these addresses, and the ranks of the default group."""
    dist: Any = torch.distributed
    world, whole = dist.group.WORLD, getattr(store, "_underlying_non_prefix_store", store)
    if group is world and isinstance(whole, dist.TCPStore) and not any(one is world for one, _ in _watched):
        for _, before in _watched:
            before.stop()
        host = os.environ.get("PACELINE_HOST") or socket.gethostname()
        _watched[:] = [(world, LostRanks(store, dist.get_rank(), dist.get_world_size(), host))]
        _watched[0][1].start()
    # last, so that the connection to the store is one of them
    _watch_connections({address for address in known if not ipaddress.ip_address(address).is_loopback})


def _watch_connections(among: Collection[str]) -> None:
    """TCP connections of this process to one of these addresses end when its machine is not there any more."""
    for descriptor in keepalive.sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.type == socket.SOCK_STREAM and line.family in keepalive.FAMILIES:
                address = str(line.getpeername()[0]).partition("%")[0].removeprefix("::ffff:")
                if address in among:
                    keepalive.watch(line)
