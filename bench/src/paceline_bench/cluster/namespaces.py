"""Several machines on one: network namespaces on a bridge, each with one core and a cable, shaped and late as asked.

Needs root, `ip` and `tc`. Everything it makes carries its process id; what a killed one left is swept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_bench.cluster.delay import Cables

PR_SET_PDEATHSIG = 1
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
HOSTS = Path("/etc/netns")  # `ip netns exec` lays the files of a namespace's folder here over those of /etc
MAX_LATE_MS, MAX_LATE_BITS = 1000.0, 200e6  # what a process can hold up, frame by frame, at the rate of the link

_libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str:
    """Why no cluster can be made here, or an empty string."""
    if os.getuid():
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare", "taskset"):
        if not shutil.which(tool):
            return f"needs the command {tool!r}"
    try:
        mine = f"pl{os.getpid()}"  # others may try at the same moment
        subprocess.run(["ip", "link", "add", mine, "type", "bridge"], check=True, capture_output=True)
        subprocess.run(["ip", "link", "del", mine], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"no bridge can be made here: {error.stderr.decode().strip()}"
    return ""


def _do(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def check_rate(rate: str | None) -> str | None:
    """A rate in tc's words, or None for "none". Raises ValueError."""
    if rate in (None, "", "none"):
        return None
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmg]bit", rate):
        raise ValueError(f"rate {rate!r} is none of a link's; write 10gbit, 1gbit, 100mbit, or none for no limit")
    return rate


def bits_per_s(rate: str) -> float:
    """In tc's words."""
    return float(rate[:-4]) * UNITS[rate[-4:]]


def check_delay(delay_ms: float, rate: str | None) -> float:
    """Of a link, one way, where it has this rate. Raises ValueError."""
    if not 0 <= delay_ms <= MAX_LATE_MS:
        raise ValueError(
            f"a delay of {delay_ms:g} ms is none of a link's; give 0 to {MAX_LATE_MS:g} ms one way, such as 5"
        )
    if delay_ms and (rate is None or bits_per_s(rate) > MAX_LATE_BITS):
        raise ValueError(
            f"a delay is made by a process that holds every frame, sure up to {MAX_LATE_BITS / 1e6:g} Mbit/s, "
            f"and the link's rate is {rate or 'not limited'}; give --rate {MAX_LATE_BITS / 1e6:g}mbit or less with it"
        )
    return delay_ms


class Cluster:
    """``rate``: of every cable, both directions, in tc's words ("1gbit"), or None for an unlimited one.

    ``delay_ms``: from any node to any other, one way, half of it in each of the two cables between them.
    """

    def __init__(self, num_nodes: int, rate: str | None = None, delay_ms: float = 0.0):
        self.num_nodes, self.rate, self.delay_ms = num_nodes, rate, delay_ms
        self.mark = f"pl{os.getpid()}"
        self.processes: list[subprocess.Popen[Any]] = []
        self._cables = Cables(delay_ms / 2e3)

    def name(self, node: int) -> str:
        return f"{self.mark}-{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def __enter__(self) -> Cluster:
        _sweep()
        try:
            self._make()
        except BaseException as error:
            self._cables.close()
            _remove(self.mark)
            if isinstance(error, subprocess.CalledProcessError):
                said = error.stderr.strip() or error
                raise ValueError(f"the cluster could not be made: {' '.join(error.cmd)}: {said}") from error
            if isinstance(error, OSError):
                raise ValueError(f"the cluster could not be made: {error}") from error
            raise
        return self

    def _make(self) -> None:
        bridge = f"{self.mark}b"
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "link", "set", bridge, "up")
        hosts = [f"{self.address(node)} node{node}\n" for node in range(self.num_nodes)]
        for node in range(self.num_nodes):
            name = self.name(node)
            _do("ip", "netns", "add", name)
            (HOSTS / name).mkdir(parents=True)
            (HOSTS / name / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
            self._lay(name, f"{self.mark}v{node}", f"{self.mark}w{node}")
            _do("ip", "link", "set", f"{self.mark}v{node}", "master", bridge, "up")
            _do("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "e0")
            _do("ip", "-n", name, "link", "set", "e0", "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            self._steer(node)
        if self.delay_ms:
            self._cables.start()
        rate, self.rate = self.rate, None
        self.shape(rate)

    def _lay(self, name: str, near: str, far: str) -> None:
        """A cable with one end ``near`` and the other in the namespace, as e0, where ``far`` is free as its name."""
        if not self.delay_ms:
            _do("ip", "link", "add", near, "type", "veth", "peer", "name", "e0", "netns", name)
            return
        self._cables.lay(near, far)
        _do("ip", "link", "set", far, "netns", name, "name", "e0")

    def _steer(self, node: int) -> None:
        """A node's own core takes in what reaches it, as on a machine of its own; else whichever core has sent it."""
        mask = f"{1 << self.core(node):x}"
        words = ",".join(mask[max(0, end - 8) : end] for end in range(len(mask), 0, -8)[::-1])
        inside = ["ip", "netns", "exec", self.name(node), "sh", "-c", 'echo "$0" > "$1"', words]
        subprocess.run([*inside, "/sys/class/net/e0/queues/rx-0/rps_cpus"], check=False, capture_output=True)
        with contextlib.suppress(OSError):
            Path(f"/sys/class/net/{self.mark}v{node}/queues/rx-0/rps_cpus").write_text(words)

    def core(self, node: int) -> int:
        cores = sorted(os.sched_getaffinity(0))
        return cores[node % len(cores)]

    def shape(self, rate: str | None) -> None:
        """Another rate for every cable from now on, also while bytes are on their way."""
        for node in range(self.num_nodes):
            for inside, device in ((self.name(node), "e0"), (None, f"{self.mark}v{node}")):
                tc = [*(("ip", "netns", "exec", inside) if inside else ()), "tc", "qdisc"]
                if rate:
                    words = ("root", "tbf", "rate", rate, "burst", str(burst(rate)), "latency", "50ms")
                    _do(*tc, "change" if self.rate else "add", "dev", device, *words)
                elif self.rate:
                    _do(*tc, "del", "dev", device, "root")
        self.rate = rate

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self._cables.close()
        _remove(self.mark)

    def start(
        self,
        node: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        port: int = 29500,
        **more: Any,
    ) -> subprocess.Popen[Any]:
        """A process on a node, under its own host name, pinned to one core, with a launcher's environment.

        It ends with the thread that has started it.
        """
        said = {
            "RANK": str(node),
            "WORLD_SIZE": str(self.num_nodes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(node),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "e0",
            "OMP_NUM_THREADS": "1",
        }
        words = ["ip", "netns", "exec", self.name(node), "unshare", "--uts", "sh", "-c"]
        words += ['hostname "$0"; exec "$@"', f"node{node}", "taskset", "-c", str(self.core(node)), *command]
        own = {**os.environ, **said, **(environment or {})}
        process = subprocess.Popen(words, env=own, preexec_fn=_end_with(os.getpid()), **more)  # noqa: PLW1509 - see there
        self.processes.append(process)
        return process

    def sent_bytes(self, node: int) -> int:
        """Counted by the node's own network card."""
        table = _do("ip", "netns", "exec", self.name(node), "cat", "/proc/net/dev")
        return sent_bytes(table)

    def pull_cable(self, node: int) -> None:
        _do("ip", "link", "set", f"{self.mark}v{node}", "down")


def _end_with(maker: int) -> Callable[[], None]:
    """What a process does before it becomes another program: one system call, safe beside threads."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != maker:
            os._exit(128 + signal.SIGKILL)

    return prepare


def burst(rate: str) -> int:
    """Bytes that may leave at once: a megabyte is 8 ms of 1 Gbit/s, but 80 ms of 100 Mbit/s."""
    return 1 << 20 if rate.endswith("gbit") else 1 << 18


def sent_bytes(table: str | None = None, interface: str = "e0") -> int:
    """Of one interface, from /proc/net/dev (this process's own by default)."""
    table = Path("/proc/self/net/dev").read_text() if table is None else table
    match = re.search(rf"^\s*{interface}:(.*)$", table, re.MULTILINE)
    assert match, f"no interface {interface}"
    return int(match[1].split()[8])


def _remove(mark: str) -> None:
    for name in re.findall(rf"^({mark}-\d+)", _do("ip", "netns", "list"), re.MULTILINE):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    for folder in HOSTS.glob(f"{mark}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for link in re.findall(rf"\b({mark}(?:b|[vw]\d+))\b", _do("ip", "-o", "link")):
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def _sweep() -> None:
    """Clusters whose maker is gone."""
    marks = set(re.findall(r"^(pl(\d+))-\d+", _do("ip", "netns", "list"), re.MULTILINE))
    marks |= set(re.findall(r"\b(pl(\d+))(?:b|[vw]\d+)\b", _do("ip", "-o", "link")))
    marks |= set(re.findall(r"\b(pl(\d+))-\d+", " ".join(folder.name for folder in HOSTS.glob("pl*"))))
    for mark, pid in marks:
        if not Path(f"/proc/{pid}").exists():
            _remove(mark)
