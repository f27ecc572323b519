"""A case as a script, for other commands: ``paceline verify --steps 6 benchmarks/zoo/one.py NAME [MODULE]``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paceline
from zoo import operators  # noqa: F401 - before anybody imports torchvision
from zoo.case import FAMILIES, corpus
from zoo.ranks import prepare

if __name__ == "__main__":
    name, modules = sys.argv[1], sys.argv[2:] or FAMILIES
    prepare()
    next(case for case in corpus(modules) if case.name == name).train(paceline.join)
