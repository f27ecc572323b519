"""`paceline.launch`: a function in several processes, from a notebook or an interactive session.

    python -m paceline.launch.function FOLDER

is one of them. The function and its arguments travel by cloudpickle, which also takes functions that are defined in a
cell, through a folder that only this user can read; so do the results.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.launch import local
from paceline.registry import PROCESSES


def launch(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[Any]:
    """What ``function(*arguments)`` returns in each of so many processes on this machine, by their ranks.

    `paceline.join` inside of it joins them; torch.distributed finds them by the environment. Results that are None cost
    nothing; tensors are copied. Raises ValueError for what cannot be sent and where a launcher has started this process
    already, RuntimeError where a process fails: its own error stands above.
    """
    if not (isinstance(processes, int) and processes >= 1):
        raise ValueError(f"launch: processes is a whole number from 1, got {processes!r}")
    if "RANK" in os.environ:
        raise ValueError(
            f"launch starts processes, and a launcher has started this one as one of several (RANK="
            f"{os.environ['RANK']}); call the function itself"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "launch passes Ctrl-C on to its processes, and so runs in the main thread alone; call it there"
        )
    packed = _packed(function, arguments)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        (Path(folder) / "paths.json").write_text(json.dumps(sys.path))
        (Path(folder) / "call").write_bytes(packed)
        code = local.start([sys.executable, "-m", __name__, folder], f"{PROCESSES}:{processes}", 1, {})
        if code:
            raise RuntimeError(f"launch: a process failed (exit code {code}); its error stands above")
        if silent := [rank for rank in range(processes) if not (Path(folder) / f"{rank}").exists()]:
            raise RuntimeError(f"launch: process {silent[0]} ended by an exit of its own before the function returned")
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes())[0] for rank in range(processes)]


def _packed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        if getattr(function, "__module__", "") == "__main__":
            raise ValueError(
                "launch sends a function that is defined here to other processes, which needs cloudpickle: pip install "
                "cloudpickle; or put the function into a file of its own, and import it"
            ) from None
        cloudpickle = pickle
    try:
        packed: bytes = cloudpickle.dumps((function, arguments))
    except Exception as error:  # whatever an object's own method raises
        raise ValueError(
            f"launch cannot send {getattr(function, '__name__', function)!r}, its arguments or its result to another "
            f"process ({error}); make models, datasets and files inside of the function"
        ) from error
    return packed


def main(folder: str) -> None:
    sys.path[:] = json.loads((Path(folder) / "paths.json").read_text())
    function, arguments = pickle.loads((Path(folder) / "call").read_bytes())
    result = _packed(function(*arguments), ())
    part = Path(folder) / f"{os.environ['RANK']}.part"
    part.write_bytes(result)
    part.rename(part.with_suffix(""))


if __name__ == "__main__":
    main(*sys.argv[1:])
