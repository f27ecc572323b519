"""One rank of two: joins, waits for FOLDER/go, asks for one more lane, and says how that went: lane.py FOLDER."""

import os
import sys
import time
from pathlib import Path

from paceline.elastic.membership import connect
from paceline.errors import LinkError

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
link = connect("gloo", rank, 2, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).link
(folder / f"up{rank}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
start = time.monotonic()
try:
    link.lane("late")
    said = "a lane"
except LinkError as error:
    said = str(error)
print(f"{time.monotonic() - start:.1f} {said}", flush=True)
sys.exit(said != "a lane")
