"""mpirun over the nodes of a cluster, without sshd: what stands in for ssh enters a node's namespace."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline_bench.cluster.namespaces import Cluster

# what killed ranks share would stay behind in /dev/shm
_segments = tempfile.TemporaryDirectory(prefix="mpirun-")
WAYS = {
    "shared memory": ("--mca", "btl", "self,sm", "--mca", "btl_sm_backing_directory", _segments.name),
    "sockets": ("--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"),
    "cables": ("--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "e0"),
}
PLACES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"


def found() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def unavailable() -> str:
    """Why nothing can be run under mpirun here, or an empty string."""
    if not importlib.util.find_spec("mpi4py"):
        return "needs mpi4py: pip install 'paceline[mpi]'"
    return "" if found() else "needs the command 'mpirun': pip install 'paceline[mpi]'"


def command(size: int, *words: Any, way: str = "shared memory", options: Sequence[str] = ()) -> list[str]:
    """This Python with ``words``, as ``size`` processes."""
    here = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1")
    return [str(found()), *here, *WAYS[way], *options, "-n", str(size), sys.executable, *map(str, words)]


def over(cluster: Cluster, folder: Path, per_node: int, *words: Any, options: Sequence[str] = ()) -> list[str]:
    """Likewise, ``per_node`` on each node of a cluster, for its first; what stands in for ssh lies in ``folder``."""
    agent, nodes = folder / "agent", range(cluster.num_nodes)
    where = " ".join(
        f"{cluster.address(n)}) space={cluster.name(n)} node=node{n} core={cluster.core(n)};;" for n in nodes
    )
    enter = 'exec ip netns exec "$space" unshare --uts taskset -c $core sh -c "hostname $node; $*"'
    agent.write_text(f"#!/bin/sh\naddress=$1\nshift\ncase $address in {where} esac\n{enter}\n")
    agent.chmod(0o700)
    hosts = ",".join(f"{cluster.address(n)}:{per_node}" for n in nodes)
    there = ("--prtemca", "plm_ssh_agent", str(agent), "--host", hosts, "--map-by", f"ppr:{per_node}:node", *options)
    strange = [word for name in PLACES for word in ("-u", name)]
    return ["env", *strange, *command(len(nodes) * per_node, *words, way="cables", options=there)]


def end(cluster: Cluster) -> None:
    """Kills all that runs on the cluster's nodes: mpirun's own processes do not hear of its end behind a cut cable."""
    for node in range(cluster.num_nodes):
        words = ["ip", "netns", "pids", cluster.name(node)]
        for pid in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
