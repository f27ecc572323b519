"""Rank 1 stands still: is it one of all when it goes on?

certain.py FOLDER SECONDS WHAT, which is what the other does meanwhile: "go on" or "wait"
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from paceline.elastic.membership import connect
from paceline.errors import LinkError
from paceline.transport import boottime_s

folder, seconds, what = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])
members = connect("torch", rank, 2, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
link = members.link
pid = int(link.all_gather(torch.tensor([os.getpid()])).wait()[1])
since = boottime_s()
if rank:
    time.sleep(1.0)  # a beat has been heard
    if seconds:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        begin = time.monotonic()
        members.assert_still_member(since)
        said = f"one of all {time.monotonic() - begin:.3f}"
    except LinkError as error:
        said = str(error)
    (folder / "said").write_text(said)
elif seconds:
    time.sleep(1.0 + seconds / 2)
    if what == "go on":
        members.bare.detector.abandon()
    time.sleep(seconds / 2)
    os.kill(pid, signal.SIGCONT)
end = time.monotonic() + 20.0
while not (folder / "said").exists() and time.monotonic() < end:
    time.sleep(0.05)
os._exit(0)
