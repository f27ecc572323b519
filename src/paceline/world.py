"""Who this process is among all: launchers say it in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Who this process is, as launchers say it: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK."""

    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of_environment(cls) -> World:
        def number(name: str, default: int) -> int:
            text = os.environ.get(name, str(default))
            if not text.isdigit():
                raise ValueError(
                    f"{name}={text!r} in the environment must be a whole number; unset it or mend the launcher"
                )
            return int(text)

        size, local_size = number("WORLD_SIZE", 1), number("LOCAL_WORLD_SIZE", 1)
        rank, per_node = number("RANK", 0), max(1, local_size)
        node, local_rank = number("GROUP_RANK", rank // per_node), number("LOCAL_RANK", rank % per_node)
        given = (
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}, GROUP_RANK={node}"
        )
        if size % per_node or not (
            local_size and rank < size and local_rank < local_size and node < size // local_size
        ):
            raise ValueError(
                f"{given} do not fit together: every node needs the same number of processes, RANK must be below "
                f"WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE, and GROUP_RANK below the number of nodes"
            )
        if size > local_size and not os.environ.get("MASTER_PORT"):
            raise ValueError(
                "WORLD_SIZE asks for several nodes, but MASTER_ADDR and MASTER_PORT do not say where to meet"
            )
        return cls(
            local_rank,
            local_size,
            node,
            size // local_size,
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            number("MASTER_PORT", 0),
        )
