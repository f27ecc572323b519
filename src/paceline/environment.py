"""Reads the environment variables that launchers set: rank, world size, rendezvous endpoint, timeouts, log level."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.registry import says

FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the ephemeral ports
MAX_PORT = 65535
# rank, size, local rank, local size
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
# former names of variables, which are read where the present ones are not set
FORMER_NAMES = {
    "PACELINE_JOIN_TICKET": "PACELINE_JOIN",
    "PACELINE_RENDEZVOUS_TIMEOUT_S": "PACELINE_JOIN_S",
    "PACELINE_TICKET_FILE": "PACELINE_TICKET",
    "PACELINE_MATMUL": "PACELINE_PRODUCTS",
}
HYDRA = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"  # of MPICH, Intel MPI and MVAPICH


def variable(name: str, env: Mapping[str, str] | None = None) -> str:
    """The value of the variable, or of its former name; empty where neither is set."""
    env = os.environ if env is None else env
    return env.get(name) or env.get(FORMER_NAMES.get(name, name), "")


@dataclass(frozen=True)
class LaunchEnvironment:
    """The rank of this process in the run: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK.

    The variables of mpirun and srun are translated into these first. ``local_sizes``: the processes of each node, where
    they differ (PACELINE_LOCAL_SIZES); else every node has ``local_size``. ``min_nodes``: the fewest nodes that resume
    after failures (PACELINE_NODES); 0: a failure ends the run. ``join_ticket``: the join token of the run that this
    node joins (PACELINE_JOIN_TICKET); until it is admitted, it has no peers. ``host``: empty where only mpirun knows
    the host of rank 0.
    """

    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    local_sizes: tuple[int, ...] = ()
    min_nodes: int = 0
    join_ticket: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.local_sizes or (self.local_size,) * self.num_nodes

    @property
    def world_size(self) -> int:
        return sum(self.sizes)

    @property
    def rank(self) -> int:
        return sum(self.sizes[: self.node]) + self.local_rank

    @property
    def identity(self) -> str:
        host = os.environ.get("PACELINE_HOST", socket.gethostname())
        part = f", local rank {self.local_rank}" if self.local_size > 1 else ""
        return f"rank {self.node} of {self.num_nodes} on {host}{part}"

    @classmethod
    def of_environment(cls) -> LaunchEnvironment:
        set_from_launcher()
        env = os.environ
        size, local_size = _number(env, "WORLD_SIZE", 1), _number(env, "LOCAL_WORLD_SIZE", 1)
        if join_ticket := variable("PACELINE_JOIN_TICKET", env):
            local_rank = _number(env, "LOCAL_RANK", 0)
            if local_rank >= local_size:
                raise ValueError(f"LOCAL_RANK={local_rank} must be below LOCAL_WORLD_SIZE={local_size}")
            return cls(local_rank, local_size, min_nodes=1, join_ticket=join_ticket)
        rank, per_node = _number(env, "RANK", 0), max(1, local_size)
        node, local_rank = _number(env, "GROUP_RANK", rank // per_node), _number(env, "LOCAL_RANK", rank % per_node)
        sizes = _sizes(env)
        values = f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}"
        values = f"{values}, GROUP_RANK={node}"
        if sizes:
            fits = sum(sizes) == size and node < len(sizes) and sizes[node] == local_size and local_rank < local_size
            if not fits or sum(sizes[:node]) + local_rank != rank:
                raise ValueError(
                    f"{values} do not fit PACELINE_LOCAL_SIZES={env['PACELINE_LOCAL_SIZES']}, the processes of "
                    f"each node; unset it, or set all of them as the launcher of this run does"
                )
        elif size % per_node or not (
            local_size and rank < size and local_rank < local_size and node < size // local_size
        ):
            raise ValueError(
                f"{values} do not fit together: every node needs the same number of processes, RANK must be below "
                f"WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE, and GROUP_RANK below the number of nodes"
            )
        if size > local_size and not env.get("MASTER_PORT"):
            raise ValueError(
                "WORLD_SIZE asks for several nodes, but MASTER_ADDR and MASTER_PORT do not give the rendezvous endpoint"
            )
        if (port := _number(env, "MASTER_PORT", 0)) > MAX_PORT:
            raise ValueError(f"MASTER_PORT={port} is no port; give one from 1 to {MAX_PORT}")
        num_nodes, host = len(sizes) or size // local_size, env.get("MASTER_ADDR", "127.0.0.1")
        return cls(local_rank, local_size, node, num_nodes, host, port, sizes, _min_nodes(env, num_nodes))


def _min_nodes(env: Mapping[str, str], num_nodes: int) -> int:
    text = env.get("PACELINE_NODES", "")
    if not text or num_nodes == 1:
        return 0
    low, _, high = text.partition(":")
    if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= num_nodes <= int(high or num_nodes)):
        raise ValueError(
            f"PACELINE_NODES={text!r} is the fewest and the most nodes, as 2:4 is, and {num_nodes} are started; give a "
            f"range that holds {num_nodes}, or unset it"
        )
    return int(low)


def _sizes(env: Mapping[str, str]) -> tuple[int, ...]:
    """The number of processes of each node; empty where all are equal."""
    words = [word for word in env.get("PACELINE_LOCAL_SIZES", "").split(",") if word]
    if not all(word.isdigit() and int(word) for word in words):
        raise ValueError(
            f"PACELINE_LOCAL_SIZES={env['PACELINE_LOCAL_SIZES']!r} is no list of each node's processes, as 4,2 is; "
            f"unset it: launchers set it"
        )
    sizes = tuple(map(int, words))
    return sizes if len(set(sizes)) > 1 else ()


def set_from_launcher() -> None:
    """Sets RANK and the related variables from those of mpirun or srun, for all later readers of the environment."""
    os.environ.update(translate(os.environ))


def translate(env: Mapping[str, str]) -> dict[str, str]:
    """RANK and the related variables, if mpirun or srun started this process as one of several; else an empty dict.

    MASTER_ADDR and MASTER_PORT stay as they are set. By default the rendezvous is on the first host of Slurm's list, at
    port 20000 + (101 job + step) mod 12000. Under mpirun the port is 20000 + crc32(PMIX_NAMESPACE) mod 12000, and
    MASTER_ADDR is empty where there are several nodes, as MPI itself knows the addresses. Raises ValueError.
    """
    if "RANK" in env:  # a batch script may set WORLD_SIZE for all of its tasks, and RANK for none
        return {}
    if "OMPI_COMM_WORLD_RANK" in env:
        return _by_mpirun(env, OPEN_MPI, "--map-by ppr:{}:node")
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:  # inside a job, mpirun starts its own processes by srun
        return _by_mpirun(env, HYDRA, "-ppn {}")
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:  # a batch script itself is not a step
        return _by_srun(env)
    if "PMI_RANK" in env and (size := _number(env, "PMI_SIZE", 1)) > 1:
        raise ValueError(
            f"a launcher made this process rank {env['PMI_RANK']} of {size} (PMI_RANK, PMI_SIZE) and does not give its "
            f"local rank (MPI_LOCALRANKID); use mpirun of MPICH, Intel MPI or Open MPI, or srun, or set RANK, "
            f"WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each process"
        )
    return {}


def _by_mpirun(env: Mapping[str, str], names: Sequence[str], option: str) -> dict[str, str]:
    """``option``: the launcher's option that sets the number of ranks per node."""
    rank, size, local_rank, local_size = (
        _number(env, name, default) for name, default in zip(names, (0, 1, 0, 1), strict=True)
    )
    if size == 1:
        return {}
    if not local_size or rank % local_size != local_rank:
        raise ValueError(
            f"mpirun made rank {rank} number {local_rank} of the {local_size} on its node; ranks must fill one node "
            f"after the other, with the same number on each: use {option.format(max(1, local_size))}"
        )
    finds_rank_0 = says("link", env.get("PACELINE_LINK", ""), "finds_others")
    if names is HYDRA and size > local_size and not env.get("MASTER_ADDR") and not finds_rank_0:
        raise ValueError(
            f"mpirun started {size} processes on several nodes and does not say where rank 0 runs; add -genv "
            f"MASTER_ADDR HOST to mpirun, the name by which the others know the first host"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    host = "127.0.0.1" if size == local_size else ""
    return _canonical(env, rank // local_size, local_rank, local_size, size, host, port)


def _by_srun(env: Mapping[str, str]) -> dict[str, str]:
    size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if size == 1:
        return {}
    names = "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"
    layout = next((env[name] for name in names if env.get(name)), str(size))
    sizes = _tasks_per_node(layout)
    node, local_rank = _number(env, "SLURM_NODEID", 0), _number(env, "SLURM_LOCALID", 0)
    if not sizes:
        raise ValueError(
            f"srun assigned {size} tasks as {layout} per node, which is no list such as 2(x3),1; give srun "
            f"--ntasks-per-node"
        )
    job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    port = FIRST_PORT + (101 * job + step) % NUM_PORTS
    if len(set(sizes)) == 1:
        return _canonical(env, node, local_rank, sizes[0], size, first_host(hosts), port)
    if node >= len(sizes):
        raise ValueError(f"srun assigned tasks as {layout} per node, but this is node {node} (SLURM_NODEID)")
    found = _canonical(env, node, local_rank, sizes[node], size, first_host(hosts), port)
    return {**found, "RANK": str(sum(sizes[:node]) + local_rank), "PACELINE_LOCAL_SIZES": ",".join(map(str, sizes))}


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" is 2, 2, 2, 1; an empty list for any other text."""
    sizes: list[int] = []
    for word in text.split(","):
        part = re.fullmatch(r"([1-9]\d*)(?:\(x(\d+)\))?", word)
        if not part:
            return []
        sizes += [int(part[1])] * int(part[2] or 1)
    return sizes


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: gpu07 of "gpu[07-09,12],cpu1"."""
    whole = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", whole[0] if whole else hosts)


def _canonical(
    env: Mapping[str, str], node: int, local_rank: int, local_size: int, size: int, host: str, port: int
) -> dict[str, str]:
    return {
        "RANK": str(node * local_size + local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": env.get("MASTER_ADDR") or host,
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    if not text.isdigit():
        raise ValueError(f"{name}={text!r} in the environment must be a whole number; unset it or fix the launcher")
    return int(text)


RENDEZVOUS_TIMEOUT_S = 60.0
WAIT_S = 600.0
MAX_S = 1e6  # a limit that all clocks and sockets accept


def rendezvous_timeout_s() -> float:
    """The timeout of the rendezvous: PACELINE_RENDEZVOUS_TIMEOUT_S, else RENDEZVOUS_TIMEOUT_S. Raises ValueError."""
    return _seconds("PACELINE_RENDEZVOUS_TIMEOUT_S", RENDEZVOUS_TIMEOUT_S)


def wait_s() -> float:
    """For how long survivors wait for missing nodes: PACELINE_WAIT, else WAIT_S. Raises ValueError."""
    return _seconds("PACELINE_WAIT", WAIT_S, zero=True, more=" (--wait sets it)")


def _seconds(name: str, default: float, zero: bool = False, more: str = "") -> float:
    text = variable(name) or str(default)
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < MAX_S or (zero and seconds == 0):
            return seconds
    accepted = f"{'from' if zero else 'above'} 0 and below {MAX_S:.0f}"
    raise ValueError(f"{name}={text!r} must be a number of seconds {accepted}; fix it, or unset it{more}")


LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log_level() -> int:
    """The lowest level that is logged: PACELINE_LOG, else info. Raises ValueError."""
    text = os.environ.get("PACELINE_LOG") or "info"
    if text.lower() not in LEVELS:
        raise ValueError(f"PACELINE_LOG={text!r} is no log level; give {', '.join(LEVELS)}, or unset it")
    return LEVELS[text.lower()]
