"""Goes on from every checkpoint of every kind of run: resumed.py FOLDER."""

import os
import sys
from pathlib import Path

import resuming

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
faults = {name: resuming.check(kind, folder / name) for name, kind in resuming.KINDS.items()}
faults["apart"] = resuming.apart(folder / "apart", rank)
if rank == 0:
    resuming.write(folder, faults)
