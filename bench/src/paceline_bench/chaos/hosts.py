"""Nodes that are reached over ssh: namespaces on a bridge with an sshd each. The launcher stands on the bridge."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline_bench import SOURCES
from paceline_bench.cluster import namespaces
from paceline_bench.cluster.namespaces import Cluster

LAUNCHER = "10.77.0.200"
ANSWER_S = 10.0
TURN = Path("/run/paceline-machines.lock")
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def unavailable() -> str:
    """Why none can be made here, or an empty string."""
    missing = [name for name in ("ssh", "ssh-keygen") if not shutil.which(name)] + ([] if SSHD else ["sshd"])
    if missing:
        return f"there is no {' and no '.join(missing)} on this machine"
    return namespaces.unavailable()


def do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """One network of machines at a time: the route from here to their addresses is the same for all."""
    with open(TURN, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # whoever was forked meanwhile has it open, too


class Machines:
    """``ssh`` is a client's command line that knows them as node0, node1, ...; their own names lead home, as on Debian.

    ``path``: where Python looks for modules there, besides this package.
    """

    def __init__(self, num_nodes: int, rate: str | None = None, path: Sequence[Path] = ()):
        self.cluster, self.path = Cluster(num_nodes, rate), path

    def __enter__(self) -> Machines:
        with contextlib.ExitStack() as made:
            made.enter_context(turn())
            self.folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="paceline-machines-")))
            made.enter_context(self.cluster)
            self._begin()
            self._made = made.pop_all()
        return self

    def _begin(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd insists on it
        do("ip", "addr", "add", f"{LAUNCHER}/24", "dev", f"{self.cluster.mark}b")
        for name in ("host", "user"):
            do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        nodes = range(self.cluster.num_nodes)
        self._write_client(nodes)
        for node in nodes:
            self._write_node(node, nodes)
            self._serve(node)
        self.ssh = f"ssh -F {self.folder / 'config'}"
        end = time.monotonic() + ANSWER_S
        for node in nodes:
            command = [*self.ssh.split(), f"node{node}", "true"]
            while (tried := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
                if time.monotonic() > end:
                    raise ValueError(f"the sshd of node{node} does not answer: {tried.stderr.strip()}")
                time.sleep(0.05)

    def _serve(self, node: int) -> None:
        start = f"mount --bind {self.folder}/hosts{node} /etc/hosts && exec {SSHD} -D -f {self.folder}/sshd{node}"
        self.cluster.start(node, ["sh", "-c", start], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def _write_client(self, nodes: Sequence[int]) -> None:
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        (self.folder / "known").write_text("".join(f"{self.cluster.address(node)} {key}\n" for node in nodes))
        places = "".join(f"Host node{node}\n  HostName {self.cluster.address(node)}\n" for node in nodes)
        (self.folder / "config").write_text(
            f"{places}Host *\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/user\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  UserKnownHostsFile {self.folder}/known\n  GlobalKnownHostsFile /dev/null\n"
        )

    def _write_node(self, node: int, nodes: Sequence[int]) -> None:
        own = self.cluster.address(node)
        path = os.pathsep.join(filter(None, (*SOURCES, *map(str, self.path), os.environ.get("PYTHONPATH"))))
        (self.folder / "authorized").write_text((self.folder / "user.pub").read_text())
        (self.folder / f"sshd{node}").write_text(
            f"Port 22\nListenAddress {own}\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPermitRootLogin yes\n"
            f"PasswordAuthentication no\nSetEnv PYTHONPATH={path} XDG_CACHE_HOME={self.folder}\n"
        )
        others = "".join(f"{self.cluster.address(other)} node{other}\n" for other in nodes if other != node)
        (self.folder / f"hosts{node}").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{node}\n{others}")

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def hosts(self, count: int) -> str:
        """The first so many, as ``-H`` takes them."""
        return ",".join(f"node{node}" for node in range(count))
