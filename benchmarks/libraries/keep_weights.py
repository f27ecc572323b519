"""Runs a script as it is but in float64, and at its end writes the weights of the last model that it wrapped: a script
may save none.

torchrun ... keep_weights.py OUT SCRIPT [ARGUMENTS ...]       OUT.pt: of rank 0, with the name of the class
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import distributed

_wrapped: list[Any] = []


def keep(kind: type) -> None:
    made = kind.__init__  # type: ignore[misc]

    def init(self: Any, module: torch.nn.Module, *words: Any, **named: Any) -> None:
        made(self, module.double(), *words, **named)
        _wrapped.append(self)

    kind.__init__ = init  # type: ignore[misc]


def write(out: str) -> None:
    if _wrapped and os.environ.get("RANK") == "0":
        last = _wrapped[-1]
        torch.save({"class": type(last).__module__, "weights": last.module.state_dict()}, f"{out}.pt")


if __name__ == "__main__":
    out, script, *_ = sys.argv[1:]
    keep(distributed.DistributedDataParallel)
    atexit.register(write, str(Path(out).absolute()))
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
