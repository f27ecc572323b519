"""`paceline.launch`: a function in several processes, from a notebook or an interactive session.

    python -m paceline.launch.function FOLDER

is one of them. The function and its arguments travel by cloudpickle, which also takes functions that are defined in a
cell, through a folder that only this user can read; so do the results.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.launch import local
from paceline.registry import PROCESSES

GRACE_S = 1.5  # after one has failed: the others may sleep, and the caller waits for them
RAISED, EXITED = ".raised", ".exited"  # files of processes that ended so


def launch(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[Any]:
    """What ``function(*arguments)`` returns in each of so many processes on this machine, by their ranks.

    `paceline.join` inside of it joins them; torch.distributed finds them by the environment. Results that are None cost
    nothing; tensors are copied. Raises ValueError for what cannot be sent and where a launcher has started this process
    already, RuntimeError where a process fails: it says whether an error of its own stands above, and the others get
    GRACE_S to end.
    """
    refuse(function, {})
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
        code = local.start([sys.executable, "-m", __name__, folder], f"{PROCESSES}:{processes}", grace_s=GRACE_S)
        if code:
            raise RuntimeError(f"launch: {_failure(code, Path(folder))}")
        if silent := [rank for rank in range(processes) if not (Path(folder) / f"{rank}").exists()]:
            raise RuntimeError(f"launch: process {silent[0]} ended by an exit of its own before the function returned")
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes())[0] for rank in range(processes)]


def refuse(function: object, named: Mapping[str, object]) -> None:
    """Raises TypeError for what is no function, and for arguments that are passed by their names."""
    name = getattr(function, "__name__", "function")
    if not callable(function):
        hint = "; a script is started by: paceline run train.py" if isinstance(function, str) else ""
        raise TypeError(
            f"launch takes a function and its arguments, got {type(function).__name__} {function!r:.60} in place of "
            f"the function; write launch(train, 1), not launch(train(1)){hint}"
        )
    if named:
        given = ", ".join(f"{key}={value!r:.40}" for key, value in named.items())
        raise TypeError(
            f"launch passes on arguments by their places alone, got {given}; write launch(functools.partial({name}, "
            f"{given}), processes=2)"
        )


def _failure(code: int, folder: Path) -> str:
    """Why the launch failed, with this exit code."""
    if any(folder.glob(f"*{RAISED}")):
        return f"a process failed (exit code {code}); its error stands above"
    if exits := sorted(folder.glob(f"*{EXITED}")):
        text = exits[0].read_text()
        return f"process {exits[0].stem} called sys.exit({text}) before the function returned (exit code {code})"
    if code > 128:
        name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else f"signal {code - 128}"
        hint = ", as where memory runs out" if name == "SIGKILL" else ""
        return f"a process was ended by {name}{hint} (exit code {code}), which leaves no error"
    return f"a process ended with exit code {code} and without an error of Python's, as by os._exit"


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
    own = Path(folder) / os.environ["RANK"]
    try:
        result = _packed(function(*arguments), ())
    except SystemExit as ended:
        own.with_suffix(EXITED).write_text("" if ended.code is None else f"{ended.code!r:.200}")
        raise
    except BaseException:
        own.with_suffix(RAISED).touch()
        raise
    part = own.with_suffix(".part")
    part.write_bytes(result)
    part.rename(part.with_suffix(""))


if __name__ == "__main__":
    main(*sys.argv[1:])
