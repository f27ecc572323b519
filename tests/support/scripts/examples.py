"""Runs examples one after the other, as `paceline run` would run each: examples.py PATH..."""

import runpy
import sys
from pathlib import Path

paths = sys.argv[1:]
for path in map(Path, paths):
    print(f"== {path.stem}", flush=True)
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")
