"""Kills writers of checkpoints: killed.py RUN [SEED KILLS]. At each of their moments, or SEED given, at random ones.

One process that has imported torch forks every victim, since importing takes longer than the rest.
Prints one JSON object: how many were killed, and how many in the middle of a write.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from paceline.checkpoint.async_writer import StagingBuffers, Writer
from paceline.checkpoint.checkpoint import Draft, newest, read_newest

MOMENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def fork(work):
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)


class Training:
    """Everything in its checkpoints says which turn wrote it."""

    def __init__(self, run, keep):
        self.run, self.keep = run, keep
        self.weights = {f"layer {i}": torch.zeros(256 * i) for i in range(4)}
        self.moments = [torch.zeros(100)]
        self.writer, self.copies = Writer(lambda: None), StagingBuffers()

    def become(self, turn):
        for values in (*self.weights.values(), *self.moments):
            values.fill_(turn)

    def put(self, turn, step, beside=False):
        """``beside``: what is written goes on changing, as in training."""
        self.become(turn)
        draft = Draft(step, self.weights, {"turn": turn, "moments": self.moments})
        if not beside:
            draft.write(self.run, self.keep)
            return
        draft.freeze(self.copies)
        self.writer.begin("", 0, lambda: draft.write(self.run, self.keep))
        self.become(-1)
        self.writer.finish()


def put(run, turn, step, keep):
    Training(run, keep).put(turn, step)


def turn_of(run):
    """The turn of the newest, all of which must be whole."""
    found = read_newest(run)
    assert found is not None
    assert found.damaged == (), found.damaged
    turn = found.state["turn"]
    assert all((values == turn).all() for values in (*found.weights.values(), *found.state["moments"]))
    return turn


def in_the_middle(run):
    return any(path.suffix for path in run.iterdir())


def at_random(run, seed, num_kills):
    rng, turn, hits = random.Random(seed), 0, 0
    put(run, 0, 0, 2)
    for _ in range(num_kills):
        first, keep, beside = turn + 1, rng.choice((1, 2)), rng.random() < 0.5
        output, enter = os.pipe()

        def work(first=first, keep=keep, beside=beside, output=output, enter=enter):
            os.close(output)
            training = Training(run, keep)
            for turn in itertools.count(first):
                training.put(turn, turn // 2, beside)  # each step twice: the second replaces the first
                os.write(enter, b"%d\n" % turn)

        pid, start = fork(work), time.monotonic()
        os.close(enter)
        with os.fdopen(output, "rb", buffering=0) as reports:
            told = [int(reports.readline()) for _ in range(rng.randrange(3))]
            each_s = (time.monotonic() - start) / len(told) if told else 0.01
            time.sleep(rng.uniform(0, each_s))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            told += [int(line) for line in reports.readlines()]
        hits += in_the_middle(run)
        turn = turn_of(run)
        last = told[-1] if told else first - 1
        assert turn in (last, last + 1), f"turn {last} was reported, {turn} is found"
    return num_kills, hits


def at_each_moment(run):
    """A writer dies before its first, second, ... change to the file system: of a new step, and of one replaced."""
    kills, hits = 0, 0
    before = run.with_name("before")
    for turn in (1, 2):
        put(before, turn, turn, 2)
    for step in (3, 2):
        for moment in itertools.count():
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(before, run)

            def work(step=step, moment=moment):
                ahead = [moment]

                def die(event, arguments):
                    if event in MOMENTS and (event != "open" or str(run) in str(arguments[0])):
                        ahead[0] -= 1
                        if ahead[0] < 0:
                            os.kill(os.getpid(), signal.SIGKILL)

                sys.addaudithook(die)
                put(run, 3, step, 1)

            _, status = os.waitpid(fork(work), 0)
            assert turn_of(run) in (2, 3)
            if not os.WIFSIGNALED(status):
                break
            kills, hits = kills + 1, hits + in_the_middle(run)
            put(run, 4, 4, 1)
            assert [path.name for path in run.iterdir()] == ["checkpoint-00000004"]
            assert turn_of(run) == 4
        assert turn_of(run) == 3
        assert [path.name for path in run.iterdir()] == [newest(run).name]
    return kills, hits


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    kills, hits = at_random(folder, *map(int, sys.argv[2:])) if len(sys.argv) > 2 else at_each_moment(folder)
    print(json.dumps({"kills": kills, "in the middle": hits}))
