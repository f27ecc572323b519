"""python -m paceline.ddp SCRIPT ..., or -m MODULE ...: under torchrun, srun or mpirun, as they start a script."""

from __future__ import annotations

import os
import runpy
import sys

from paceline import environment
from paceline.ddp import import_hook


def _take_ranks() -> None:
    """RANK and the others, where srun or mpirun has started this process."""
    try:
        found = environment.translate(os.environ)
    except ValueError as error:
        sys.exit(f"paceline: {error}")
    if found and not (found.get("MASTER_ADDR") or os.environ.get("MASTER_ADDR")):
        sys.exit(
            f"paceline: mpirun started {found['WORLD_SIZE']} processes on several nodes, and does not say where rank 0 "
            f"runs; give mpirun -x MASTER_ADDR=HOST (of MPICH: -genv MASTER_ADDR HOST), the first host's name"
        )
    os.environ.update(found)
    if found:
        os.environ.setdefault(import_hook.STARTED_BY, import_hook.RUN)


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help") or words == ["-m"]:
        sys.exit(__doc__)
    _take_ranks()
    os.environ.update(import_hook.environment(os.environ))
    import_hook.install()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(words[0]):
        sys.exit(f"paceline: no script at {words[0]!r}; give the path of a Python file, or -m and a module")
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
