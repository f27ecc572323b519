"""A real Slurm on this machine alone: munged, slurmctld and two slurmd, with everything they write in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from paceline.launch.local import free_port

PROGRAMS = "munged", "slurmctld", "slurmd", "srun", "sinfo", "salloc", "scontrol", "unshare"
WHERE = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def unavailable() -> str | None:
    if os.getuid():
        return "slurmd wants root"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=WHERE)]
    if missing:
        return f"there is no {', '.join(missing)} on this machine"
    mounts = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=10, check=False)
    return "a file of host names cannot be mounted here" if mounts.returncode else None


def own_address() -> str:
    """In the network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class Slurm:
    """Nodes n1, n2, ... that are all this machine, with as many cores as they say. ``environment`` is what srun needs;
    after ``inside`` a command knows the nodes by their names, as their tasks do."""

    def __init__(self, num_nodes: int = 2, cpus: int | None = None):
        self.cpus = cpus or os.cpu_count()
        self.nodes = [f"n{i}" for i in range(1, num_nodes + 1)]

    def __enter__(self) -> Slurm:
        self._temporary = tempfile.TemporaryDirectory(prefix="paceline-test-slurm-")
        self.folder = Path(self._temporary.name)
        self._running: list[subprocess.Popen[bytes]] = []
        (self.folder / "key").write_bytes(os.urandom(128))
        (self.folder / "key").chmod(0o600)
        self._configure()
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{own_address()} {' '.join(self.nodes)}\n")
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        self.inside = ["unshare", "--mount", "sh", "-c", mount, f"{self.folder}/hosts"]
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            at = {
                name: f"--{name}={self.folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")
            }
            self._start("munged", "--foreground", "--force", f"--key-file={self.folder}/key", *at.values())
            self._wait((self.folder / "munge.socket").exists)
            self._start("slurmctld", "-D")
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node)
            self._wait(lambda: self._states() == ["idle"] * len(self.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _configure(self) -> None:
        name, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(len(self.nodes) + 1)]
        nodes = "".join(
            f"NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus}\n"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        for folder in ("state", *self.nodes):
            (self.folder / folder).mkdir()
        (self.folder / "slurm.conf").write_text(
            # jobs meet at a port that their number says: that of another cluster here is another
            f"FirstJobId={ports[0]}\nClusterName=test\nSlurmctldHost={name}(127.0.0.1)\nSlurmctldPort={ports[0]}\nSlurmUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={self.folder}/munge.socket\nCredType=cred/munge\n"
            f"StateSaveLocation={self.folder}/state\nSlurmdSpoolDir={self.folder}/%n\n"
            f"SlurmctldPidFile={self.folder}/ctld.pid\nSlurmdPidFile={self.folder}/%n.pid\n"
            f"SlurmctldLogFile={self.folder}/ctld.log\nSlurmdLogFile={self.folder}/%n.log\n"
            f"ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\nMpiDefault=none\n"
            f"SelectType=select/linear\nReturnToService=2\nSlurmdParameters=config_overrides\nJobAcctGatherType=jobacct_gather/none\n"
            f"AccountingStorageType=accounting_storage/none\n{nodes}PartitionName=all Nodes=ALL Default=YES State=UP\n"
        )

    def _start(self, name: str, *words: str) -> None:
        path = shutil.which(name, path=WHERE)
        assert path
        with open(self.folder / f"{name}.said", "ab") as said:
            self._running.append(
                subprocess.Popen(
                    [*self.inside, path, *words],
                    env={**os.environ, **self.environment},
                    **{"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said},
                    start_new_session=True,
                )
            )

    def _states(self) -> list[str]:
        command = ["sinfo", "--noheader", "--Node", "--format=%t"]
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=20, check=False
        )
        return done.stdout.split()

    def _wait(self, ready) -> None:
        end = time.monotonic() + 30
        while not ready():
            said = {
                path.name: path.read_text()[-2000:]
                for path in [*self.folder.glob("*.said"), *self.folder.glob("*.log")]
            }
            assert all(process.poll() is None for process in self._running), said
            assert time.monotonic() < end, said
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in reversed(self._running):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end_steps()
        self._temporary.cleanup()

    def _end_steps(self) -> None:
        """A step that reports its end to a slurmd which has ended tries so for ever."""
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                ours = process.info["name"] == "slurmstepd" and process.open_files()
                if any(file.path.startswith(f"{self.folder}/") for file in ours or ()):
                    for each in [*process.children(recursive=True), process]:
                        each.kill()
