"""Every process of mpirun is a node, though all are on this machine: under_mpirun.py SCRIPT ARGUMENT..."""

import os
import runpy
import sys

rank = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ.update(
    RANK=rank,
    WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"],
    LOCAL_RANK="0",
    LOCAL_WORLD_SIZE="1",
    MASTER_PORT="1",  # where nobody can serve: another link than mpi would not come up
    PACELINE_HOST=f"node{rank}",
    PACELINE_ENGINE="sequential",
)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
