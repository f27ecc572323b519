"""What may strike a run, how, and how it is taken back.

A node is struck as a whole: all its processes, or its cable. What a loss in one direction swallows goes to a card that
nobody has; a partition plugs some cables into another bridge.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from paceline_bench.chaos.hosts import LAUNCHER
from paceline_bench.cluster.namespaces import Cluster

NOBODY = "02:00:00:00:00:01"
RATE = "1mbit"
OTHER_BRIDGE = 99  # named as a cable, so that whoever sweeps finds it

KILL, KILL_0, STOP, CABLE = "SIGKILL of a node", "SIGKILL of rank 0", "SIGSTOP", "cable pulled"
ONE_WAY, PAIR, PARTITION = "one-way loss", "loss from one node to another", "partition"
SLOW, DISK = "link of 1 Mbit/s", "disk full"
LAUNCHER_KILLED, ALL = "launcher killed", "SIGKILL of all nodes"
CLASSES = (KILL, KILL_0, STOP, CABLE, ONE_WAY, PAIR, PARTITION, SLOW, DISK, LAUNCHER_KILLED, ALL)
LOSING = (KILL, KILL_0, STOP, CABLE, ONE_WAY, PAIR, PARTITION)  # may cost the run nodes
ENDING = (ALL,)  # end it, to be gone on with from its checkpoint
# how long, in seconds: less than what makes a node lost, and more; ssh gives a silent host up after 15, and does not
# mind a stopped process, which stands still for longer than the others wait for it in any case
LASTS: dict[str, Sequence[tuple[float, float]]] = {
    STOP: ((0.5, 2.5), (12.5, 14.0), (20.0, 30.0)),
    CABLE: ((0.5, 2.5), (12.5, 14.0)),
    ONE_WAY: ((0.5, 2.5), (12.5, 14.0)),
    PAIR: ((0.5, 2.5), (12.5, 14.0)),
    PARTITION: ((12.5, 14.0),),
    SLOW: ((3.0, 6.0),),
    DISK: ((2.0, 4.0),),
}


@dataclass(frozen=True)
class Fault:
    """``victims``: nodes. ``lasts_s``: until it is taken back; 0: what cannot be."""

    kind: str
    victims: tuple[int, ...]
    lasts_s: float = 0.0

    @classmethod
    def of(cls, dice: Random, kind: str, nodes: Sequence[int], first: int) -> Fault:
        """``nodes``: that take part; ``first``: of rank 0."""
        others = [node for node in nodes if node != first]
        lasts = LASTS.get(kind, ((0.0, 0.0),))
        lasts_s = round(dice.uniform(*dice.choice(lasts)), 1)
        if kind in (DISK, LAUNCHER_KILLED):
            return cls(kind, (), lasts_s)
        if kind == ALL:
            return cls(kind, tuple(nodes))
        if kind == KILL_0:
            return cls(kind, (first,))
        if kind == KILL:
            return cls(kind, (dice.choice(others),))
        if kind == PAIR:
            return cls(kind, tuple(dice.sample(list(nodes), 2)), lasts_s)
        count = dice.randint(1, len(nodes) // 2) if kind == PARTITION else 1
        return cls(kind, tuple(sorted(dice.sample(list(nodes), count))), lasts_s)

    def __str__(self) -> str:
        who = ", ".join(f"node{node}" for node in self.victims)
        return f"{self.kind}{f' of {who}' if who else ''}{f' for {self.lasts_s} s' if self.lasts_s else ''}"


class Scene(Protocol):
    """What a fault needs to know of a run."""

    cluster: Cluster
    disk: Path

    def pids(self, node: int) -> list[int]: ...

    def launcher(self) -> int | None: ...


Undo = Callable[[], None]


def strike(fault: Fault, scene: Scene) -> Undo:
    """Begins it; what is returned takes it back, also when that comes late."""
    begin, end = _WAYS[fault.kind]
    begin(fault, scene)
    return lambda: end(fault, scene)


def _signal(number: int) -> Callable[[Fault, Scene], None]:
    def send(fault: Fault, scene: Scene) -> None:
        for pid in [pid for node in fault.victims for pid in scene.pids(node)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    return send


def _nothing(fault: Fault, scene: Scene) -> None:
    pass


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def _tc(cluster: Cluster, node: int, *words: str) -> None:
    """Both ends of the node's cable."""
    for inside, device in ((["-n", cluster.name(node)], "e0"), ([], _cable(cluster, node))):
        action, *how = words
        subprocess.run(
            ["tc", *inside, "qdisc", action, "dev", device, "root", *how], check=True, capture_output=True, timeout=20
        )


def _cable(cluster: Cluster, node: int) -> str:
    return f"{cluster.mark}v{node}"


def _pull(fault: Fault, scene: Scene) -> None:
    for node in fault.victims:
        _ip("link", "set", _cable(scene.cluster, node), "down")


def _plug(fault: Fault, scene: Scene) -> None:
    for node in fault.victims:
        _ip("link", "set", _cable(scene.cluster, node), "up")


def _others(fault: Fault, scene: Scene) -> list[tuple[int, str]]:
    """(victim, whom it does not reach any more)."""
    cluster = scene.cluster
    if fault.kind == PAIR:
        one, other = fault.victims
        return [(one, cluster.address(other))]
    everyone = [*(cluster.address(node) for node in range(cluster.num_nodes)), LAUNCHER]
    return [(node, address) for node in fault.victims for address in everyone if address != cluster.address(node)]


def _mute(fault: Fault, scene: Scene) -> None:
    for node, address in _others(fault, scene):
        where = "-n", scene.cluster.name(node), "neigh", "replace", address
        _ip(*where, "lladdr", NOBODY, "dev", "e0", "nud", "permanent")


def _unmute(fault: Fault, scene: Scene) -> None:
    for node, address in _others(fault, scene):
        _ip("-n", scene.cluster.name(node), "neigh", "del", address, "dev", "e0")


def _slow(fault: Fault, scene: Scene) -> None:
    for node in fault.victims:
        _tc(scene.cluster, node, "add", "tbf", "rate", RATE, "burst", "16kb", "latency", "400ms")


def _fast(fault: Fault, scene: Scene) -> None:
    for node in fault.victims:
        _tc(scene.cluster, node, "del")


def part(cluster: Cluster, nodes: Sequence[int]) -> None:
    """Plugs their cables into another bridge."""
    other = _cable(cluster, OTHER_BRIDGE)
    _ip("link", "add", other, "type", "bridge")
    _ip("link", "set", other, "up")
    for node in nodes:
        _ip("link", "set", _cable(cluster, node), "master", other)


def rejoin(cluster: Cluster, nodes: Sequence[int]) -> None:
    for node in nodes:
        _ip("link", "set", _cable(cluster, node), "master", f"{cluster.mark}b")
    _ip("link", "del", _cable(cluster, OTHER_BRIDGE))


def _part(fault: Fault, scene: Scene) -> None:
    part(scene.cluster, fault.victims)


def _rejoin(fault: Fault, scene: Scene) -> None:
    rejoin(scene.cluster, fault.victims)


def _fill(fault: Fault, scene: Scene) -> None:
    with contextlib.suppress(OSError), (scene.disk / "junk").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def _clear(fault: Fault, scene: Scene) -> None:
    (scene.disk / "junk").unlink(missing_ok=True)


def _kill_launcher(fault: Fault, scene: Scene) -> None:
    if pid := scene.launcher():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_all(fault: Fault, scene: Scene) -> None:
    """As when the power goes."""
    _kill_launcher(fault, scene)
    _signal(signal.SIGKILL)(fault, scene)


_WAYS: dict[str, tuple[Callable[[Fault, Scene], None], Callable[[Fault, Scene], None]]] = {
    **dict.fromkeys((KILL, KILL_0), (_signal(signal.SIGKILL), _nothing)),
    ALL: (_kill_all, _nothing),
    STOP: (_signal(signal.SIGSTOP), _signal(signal.SIGCONT)),
    CABLE: (_pull, _plug),
    **dict.fromkeys((ONE_WAY, PAIR), (_mute, _unmute)),
    PARTITION: (_part, _rejoin),
    SLOW: (_slow, _fast),
    DISK: (_fill, _clear),
    LAUNCHER_KILLED: (_kill_launcher, _nothing),
}
