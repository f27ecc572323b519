"""Kills a run again and again at random moments, and goes on each time: killed_nights.py FOLDER SEED KILLS EPOCHS.

One process that has imported torch forks every victim, since importing takes longer than the rest.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import night
import torch

from paceline.checkpoint import checkpoint


def num_steps(folder):
    try:
        return (folder / "steps.txt").read_text().count("\n")
    except FileNotFoundError:
        return 0


def main(folder, seed, kills, epochs):
    torch.set_num_threads(1)
    dice, killed, kept, in_the_middle = random.Random(seed), 0, [0], 0
    while True:
        before = num_steps(folder)
        pid = os.fork()
        if not pid:
            try:
                night.train(folder, engine="sequential", epochs=epochs, every=2)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if killed < kills:
            due = before + dice.randrange(7)
            while num_steps(folder) < due and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.001)
            time.sleep(dice.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        killed += 1
        in_the_middle += any(path.suffix for path in (folder / "run").glob("checkpoint-*"))
        found = checkpoint.read_newest(folder / "run")
        assert found is None or not found.damaged, found.damaged
        kept.append(found.step if found else 0)
        assert kept[-1] >= kept[-2], f"a checkpoint was lost: {kept}"
    print(json.dumps({"killed": killed, "in the middle": in_the_middle, "kept": kept}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
