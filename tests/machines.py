"""Machines with an sshd each: namespaces on one bridge, on which the tests are as well; firewalls among them."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from cluster import unavailable as no_cluster

import paceline
from paceline.bench.cluster.delay import CLONE
from sshd import SSHD
from sshd import unavailable as no_sshd

HERE = Path(__file__).parent
OURS = "10.77.0.200"
needs_cluster = pytest.mark.skipif(bool(no := no_cluster()), reason=no or "clusters can be made here")  # asked once
needs_tun = pytest.mark.skipif(not os.access(CLONE, os.R_OK | os.W_OK), reason=f"{CLONE} cannot be opened here")


def left_behind(pid: int | None = None) -> set[str]:
    """Of the clusters that a process made, this one by default: namespaces, and devices in ours."""
    words = ["ip", "-o", "link"], ["ip", "netns", "list"]
    said = "".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in words)
    return set(re.findall(rf"\bpl{pid or os.getpid()}[-bvw]\d*", said))


def unavailable() -> str:
    return no_cluster() or no_sshd() or ""


def do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


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


class Machines:
    """``ssh`` is a client's command line that knows them as node0, node1, ... ; their names lead home, as on Debian."""

    def __init__(self, num_nodes: int, rate: str | None = None):
        self.cluster = Cluster(num_nodes, rate)

    def __enter__(self) -> Machines:
        self._temporary = tempfile.TemporaryDirectory(prefix="paceline-test-machines-")
        self.folder = Path(self._temporary.name)
        self.cluster.__enter__()
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        do("ip", "addr", "add", f"{OURS}/24", "dev", f"{self.cluster.mark}b")
        for name in ("host", "user"):
            do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        nodes = range(self.cluster.num_nodes)
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        (self.folder / "known").write_text("".join(f"{self.cluster.address(node)} {key}\n" for node in nodes))
        (self.folder / "config").write_text(
            "".join(f"Host node{node}\n  HostName {self.cluster.address(node)}\n" for node in nodes)
            + f"Host *\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/user\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  UserKnownHostsFile {self.folder}/known\n  GlobalKnownHostsFile /dev/null\n"
        )
        (self.folder / "authorized").write_text((self.folder / "user.pub").read_text())
        path = f"{Path(paceline.__file__).parent.parent}:{HERE}"
        for node in nodes:
            (self.folder / f"sshd{node}").write_text(
                f"Port 22\nListenAddress {self.cluster.address(node)}\nHostKey {self.folder}/host\nPidFile none\n"
                f"UsePAM no\nAuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPermitRootLogin yes\n"
                f"PasswordAuthentication no\nSetEnv PYTHONPATH={path} XDG_CACHE_HOME={self.folder}\n"
            )
            others = "".join(f"{self.cluster.address(other)} node{other}\n" for other in nodes if other != node)
            (self.folder / f"hosts{node}").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{node}\n{others}")
            start = f"mount --bind {self.folder}/hosts{node} /etc/hosts && exec {SSHD} -D -f {self.folder}/sshd{node}"
            self.cluster.start(node, ["sh", "-c", start], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.ssh = f"ssh -F {self.folder / 'config'}"
        end = time.monotonic() + 10
        for node in nodes:
            command = [*self.ssh.split(), f"node{node}", "true"]
            while subprocess.run(command, capture_output=True, check=False, env=os.environ).returncode:
                assert time.monotonic() < end, f"the sshd of node{node} does not answer"
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.cluster.__exit__()
        self._temporary.cleanup()
