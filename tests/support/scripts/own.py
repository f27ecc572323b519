"""Runs loops of a user's own shape: own.py FOLDER NAME..."""

import os
import sys
from pathlib import Path

import cases
import own_loops

for name in sys.argv[2:]:
    weights, said = own_loops.LOOPS[name]()
    if os.environ["RANK"] == "0":
        cases.write(Path(sys.argv[1]), name, {"weights": weights, **said})
