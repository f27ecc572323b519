"""One node of a race: every contender has its model, and they take turns.

    python -m paceline_bench.cluster.node FOLDER

where FOLDER holds race.json. All contenders are made, and warmed up, while the links are fast. In a phase each turn of
one contender is followed by one of the next (A B C A B C ...), begun together by a barrier; its time is that of the
slowest node, its bytes are counted by the network card.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline
from paceline_bench.cluster.driver import Desk
from paceline_bench.cluster.namespaces import sent_bytes
from paceline_bench.cluster.peers import peer
from paceline_bench.cluster.race import Entry, Phase, Race
from paceline_bench.cluster.work import Step, Work

dist: Any = torch.distributed  # its stubs leave out what we use

FAST_STEPS = 3  # before links have a rate: DDP sorts its buckets anew after one, PowerSGD begins after two
TIMEOUT_S = 1200.0
FOREVER = 10**9


class Player:
    """A contender that is ready to take turns."""

    def __init__(self, entry: Entry, race: Race, rank: int):
        self.entry = entry
        work = Work(race.model, race.batch, rank, race.nodes, entry.row)
        if entry.way != "paceline":
            self.step: Step = peer(entry.way)(work)
            self.pace = None
        else:
            self.pace, self.step = ours(entry, race, work)

    def tune(self) -> str:
        """A peer that has something to try out at this rate does so, and says what it found."""
        return str(getattr(self.step, "tune", str)())

    def turn(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        if self.pace and steps > 1:
            self.pace.job.model.state_dict()  # waits for what is still on its way

    def close(self) -> None:
        if self.pace:
            self.pace.close()


def ours(entry: Entry, race: Race, work: Work) -> tuple[Any, Step]:
    model = work.network()
    before = dict(os.environ)
    os.environ.update(entry.environment)
    try:
        pace = paceline.join(
            model,
            work.sgd(model),
            cross_entropy,
            batch_size=race.batch * race.nodes,
            engine=entry.row,
            **entry.options,
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    if not entry.dealt:
        return pace, lambda: pace.step((work.x, work.y))
    rows = [Work(race.model, race.batch, node, race.nodes) for node in range(race.nodes)]
    everything = TensorDataset(torch.cat([one.x for one in rows]), torch.cat([one.y for one in rows]))
    batches = pace.batches(everything, epochs=FOREVER)
    return pace, lambda: pace.step(next(batches))


def run(race: Race, desk: Desk) -> dict[str, Any]:
    rank = dist.get_rank()
    players = [Player(entry, race, rank) for entry in race.entries]
    for player in players:
        dist.barrier()
        player.turn(FAST_STEPS)
    notes = []
    if race.held:
        notes.append(desk.ask(held=race.held).get("how", ""))
    laps, left_s = [], race.limit_s
    for number, phase in enumerate(race.phases):
        start = time.perf_counter()
        dist.barrier()
        desk.ask(rate=phase.rate, show=f"{race.model} on {race.nodes} nodes, links of {phase.rate or 'no limit'}")
        dist.barrier()
        notes += [said for player in players if (said := player.tune())]
        laps.append(run_phase(players, phase, left_s / (len(race.phases) - number), desk))
        left_s -= time.perf_counter() - start
    desk.ask(rate=None)
    dist.barrier()
    for player in players:
        player.close()
    return {"laps": laps, "notes": [note for note in notes if note]}


def run_phase(players: list[Player], phase: Phase, limit_s: float, desk: Desk) -> dict[str, Any]:
    start = time.perf_counter()
    laps: dict[str, Any] = {player.entry.name: {"turns": [], "seconds": [], "sent": []} for player in players}
    worst = torch.zeros(2, dtype=torch.float64)  # (a step's seconds, those since the start), of the slowest node
    for turn in range(-phase.warm_up, phase.turns):
        desk.stay()
        for player in players:
            name, block = player.entry.name, player.entry.block
            slow = player.entry.most < phase.turns
            # a slow one has been warmed up while the links were fast
            if slow if turn < 0 else not player.entry.plays(turn, phase.turns):
                continue
            dist.barrier()
            before, begin = sent_bytes(), time.perf_counter()
            player.turn(block)
            took_s = time.perf_counter() - begin
            sent = (sent_bytes() - before) / block
            worst = torch.tensor([took_s / block, time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if turn >= 0:
                laps[name]["turns"].append(turn)
                laps[name]["seconds"].append(float(worst[0]))
                laps[name]["sent"].append(sent)
        if turn >= 0 and float(worst[1]) > limit_s and all(lap["turns"] for lap in laps.values()):
            break
    return laps


def main(folder: str) -> None:
    race = Race.read(Path(folder) / "race.json")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    desk = Desk(Path(folder), dist.get_rank())
    if any(entry.row.startswith("emulated") for entry in race.entries):
        os.chdir(folder)  # where the timelines are
    desk.tell(run(race, desk))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
