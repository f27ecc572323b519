"""Machines with an sshd each: namespaces on one bridge, on which the tests are as well; firewalls among them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cluster import Cluster
from cluster import unavailable as no_cluster
from needs import needs
from paceline_bench.chaos import hosts
from paceline_bench.chaos.hosts import do
from paceline_bench.cluster import namespaces
from paceline_bench.cluster.delay import CLONE
from sshd import unavailable as no_sshd

__all__ = ["Machines", "left_behind", "needs_cluster", "needs_machines", "needs_tun", "refuse_calls"]
HERE = Path(__file__).parent
_no_cluster = no_cluster()  # asked once
needs_cluster = needs(namespaces=_no_cluster)
needs_machines = needs(sshd=no_sshd(), namespaces=_no_cluster)
needs_tun = needs(tun="" if os.access(CLONE, os.R_OK | os.W_OK) else f"{CLONE} cannot be opened here")


def left_behind(pid: int | None = None) -> set[str]:
    """Of the clusters that a process made, this one by default: namespaces, their files, and devices in ours."""
    words = ["ip", "-o", "link"], ["ip", "netns", "list"]
    said = "".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in words)
    said += " ".join(folder.name for folder in namespaces.HOSTS.glob("pl*"))
    return set(re.findall(rf"\bpl{pid or os.getpid()}[-bvw]\d*", said))


class Machines(hosts.Machines):
    """With the tests' own modules."""

    def __init__(self, num_nodes: int, rate: str | None = None):
        super().__init__(num_nodes, rate, [HERE])

    def fail_power(self, node: int) -> None:
        """Nothing is left of what ran there. All of it stands still first, so that none sees another end."""
        inside = ["ip", "netns", "pids", self.cluster.name(node)]
        pids = subprocess.run(inside, check=True, capture_output=True, text=True, timeout=20).stdout.split()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    def move(self, node: int, address: str) -> None:
        """It has another address from now on, under which its name is known and its sshd listens. Its cable is in."""
        name, before, others = self.cluster.name(node), self.cluster.address(node), self.cluster.address
        do("ip", "-n", name, "addr", "del", f"{before}/24", "dev", "e0")
        do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "e0")
        do("ip", "link", "set", f"{self.cluster.mark}v{node}", "up")
        self.cluster.address = lambda one: address if one == node else others(one)  # type: ignore[method-assign]
        nodes = range(self.cluster.num_nodes)
        self._write_client(nodes)
        self._write_node(node, nodes)
        self._serve(node)


@contextlib.contextmanager
def refuse_calls(cluster: Cluster, node: int, caller: int, but: int = 0) -> Iterator[None]:
    """``node`` lets in no connection that ``caller`` begins, except to port ``but``; what it begins itself works.

    The kernels of small machines have neither a drop action nor, always, the tools of netfilter: the first packet of a
    connection (SYN without ACK, in byte 33 of an IPv4 packet) is sent into a cable that is not plugged in.
    """
    name = cluster.name(node)
    do("ip", "-n", name, "link", "add", "x0", "type", "veth", "peer", "name", "x1")
    do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "e0", "ingress")
    rule = ["ip", "netns", "exec", name, "tc", "filter", "add", "dev", "e0", "parent", "ffff:", "protocol", "ip"]
    tcp = ["match", "ip", "src", f"{cluster.address(caller)}/32", "match", "ip", "protocol", "6", "0xff"]
    if but:
        do(*rule, "prio", "1", "u32", *tcp, "match", "ip", "dport", str(but), "0xffff", "flowid", ":1")
    first = ["match", "u8", "0x02", "0x12", "at", "33"]
    do(*rule, "prio", "2", "u32", *tcp, *first, "action", "mirred", "egress", "redirect", "dev", "x0")
    try:
        yield
    finally:
        do("ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", "e0", "ingress")
        do("ip", "-n", name, "link", "del", "x0")
