"""Goes on from every checkpoint of some kinds of run: resumed.py FOLDER KIND..."""

import os
import sys
from pathlib import Path

import resuming

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
kinds = resuming.KINDS | resuming.METHODS
faults = {name: resuming.check(kinds[name], folder / name) for name in sys.argv[2:]}
faults["apart"] = resuming.apart(folder / "apart", rank)
if rank == 0:
    resuming.write(folder, faults)
