"""Nodes that kill themselves in the middle of training: outlived.py FOLDER NODE:STEP:WHERE..., by their first ranks.

WHERE: forward; backward, while pieces leave; vote, when all have arrived; evaluate; save, as the one that writes. In
place of one of these words:

    sync, half, adam, shares    how it trains: batch norm over everyone, codec, optimizer with a schedule, unlike shares
    clip                        likewise: by a norm that is reached in every step
    server                      likewise: each node updates a part of the weights
    periods, diloco             likewise: weights are averaged every four steps, or combined by an outer optimizer
    qsgd                        likewise: by sums of integers of 8 bits
    whole, thin                 likewise: by low-rank sums of full width, which are exact, or of rank 1
    memory                      no node has room for more than a third of the batch
    back                        who leads waits, between steps, for each that died to come back
    other, copy, take           who comes back has another model, dies while it is given a copy, dies while it is given
                                the rest; each the first time
    shut                        who comes back is reached by nobody, the first time
    meet2                       node 2 dies when another is to be taken in
    halt                        who leads stops when it is to give another the rest, and is killed HALT_S later
    spread1, settle1            node 1 dies while all join, when weights or words come to it
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import OPTIMIZERS, Normed, Plain, Twice, build, rows
from paceline.elastic import assignment, state_transfer
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.link.net import rendezvous

BATCH, COUNT, SEED = 24, 24 * 5 + 7, 3
EPOCHS = 4  # 24 steps: two that come back, one of them in vain, take up to 19 of them, as fast as copies are sent
NODE = int(os.environ.get("OUTLIVED_NODE", os.environ.get("GROUP_RANK", "0")))
LOCAL = int(os.environ.get("LOCAL_RANK", "0"))
NODES = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
LATE = "PACELINE_JOIN_TICKET" in os.environ
TIMEOUT_S = 60.0
HALT_S = 25
HOW = {"half": {"codec": "half"}, "shares": {"shares": (3.0, 2.0, 1.0)}, "sync": {"batch_norm": "sync"}}
HOW["clip"] = {"clip": 0.3}
HOW["memory"] = {"most_rows": BATCH // 3}
HOW["periods"] = {"exchange": "local_sgd:4"}
HOW["diloco"] = {"exchange": "diloco:4"}
HOW["qsgd"] = {"codec": "qsgd", "exchange": "allreduce:forms=dense"}
HOW["server"] = {"exchange": "server"}
HOW["whole"] = {"codec": "feedback/lowrank:rank=64,min_rate=0", "exchange": "allreduce:forms=dense"}  # exact
HOW["thin"] = {"codec": "feedback/lowrank:1", "exchange": "allreduce:forms=dense"}


class Samples:
    def __init__(self):
        self.x, self.y = rows(COUNT, 3)

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Shut(rendezvous.ReachabilityServer):
    """As behind a firewall: it reaches all, and none of them reaches it."""

    def __init__(self, *given):
        super().__init__(*given)
        self.close()


def once(folder, what):
    """Whether nobody has asked this before."""
    path = Path(folder) / what
    known = path.exists()
    path.touch()
    return not known


def hold(pace, turns):
    """If nodes are missing, the leader waits for the next request of one that comes back."""
    end = time.monotonic() + TIMEOUT_S
    while (
        pace.leader and pace.world.num_nodes < NODES and not pace.training.admission._ready and time.monotonic() < end
    ):
        catch_ups = pace.training.admission._catch_ups.values()
        all_ask = len(catch_ups) + pace.world.num_nodes == NODES
        if all_ask and all(each.caught_up or each.failed or each.has_buffer for each in catch_ups):
            return
        requests = {name: request["turn"] for name, request in pace.run.members.join_desk.waiting().items()}
        if requests.items() - turns.items():
            turns.update(requests)
            return
        time.sleep(0.01)


def watch(pace, folder):
    """Writes down the rows that this process computes of each step that is applied."""
    gradient, last = pace.engine.gradient, [[]]

    def seen(share, *given):
        last[0] = [] if share is None else share[0][:, 0].tolist()
        return gradient(share, *given)

    pace.engine.gradient = seen
    file = (Path(folder) / f"used-{NODE}-{LOCAL}-{os.getpid()}.jsonl").open("w", buffering=1)
    return lambda step: file.write(json.dumps([step, last[0]]) + "\n")


def main(folder, *words):
    fates = {}
    state_transfer.PART_BYTES = 1 << 18  # some parts, each of which takes a step
    for word in words:
        if ":" in word and not LATE:
            node, step, where = word.split(":")
            fates[int(node), int(step)] = where
    kind = Normed if "sync" in words else Plain
    if LATE and "other" in words and LOCAL == 0 and once(folder, "other"):
        kind = Twice
    model = build(kind)
    if kind is Twice:
        model.again = torch.nn.Linear(3, 3).double()
    steps = [0]

    def here(where):
        if fates.get((NODE, steps[0])) == where and LOCAL == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(output, target):
        here("forward")
        return F.cross_entropy(output, target)

    def metric(output, target):
        here("evaluate")
        return target.double().sum()

    if not LATE and LOCAL == 0 and (dies := {f"spread{NODE}", f"settle{NODE}"} & {*words}):
        module, name = (FaultTolerantControl, "broadcast") if f"spread{NODE}" in dies else (assignment, "settle")
        setattr(module, name, lambda *given: os.kill(os.getpid(), signal.SIGKILL))
    optimizer = OPTIMIZERS["adam" if "adam" in words else "momentum"](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if "adam" in words else None
    how = {name: value for word in words for name, value in HOW.get(word, {}).items()}
    with paceline.join(
        model, optimizer, loss, batch_size=BATCH, seed=SEED, folder=folder, scheduler=scheduler, **how
    ) as pace:
        vote = pace.control.commit

        def agree(*given):
            here("vote")
            return vote(*given)

        pace.control.commit = agree
        put = pace.training.saver._put

        def write(*given):
            here("save")
            return put(*given)

        pace.training.saver._put = write
        model.first.bias.register_hook(lambda grad: here("backward"))
        if pace.training.joiner and pace.training.joiner.link and "take" in words and once(folder, "take"):
            pace.training.joiner.link.take = lambda: os.kill(os.getpid(), signal.SIGKILL)
        if pace.training.joiner and pace.training.joiner.link and "copy" in words and once(folder, "copy"):
            pace.training.joiner._handle = lambda message: os.kill(os.getpid(), signal.SIGKILL)
        if pace.training.joiner and pace.training.joiner.link and "shut" in words and once(folder, "shut"):
            rendezvous.ReachabilityServer = Shut
        if f"meet{NODE}" in words and not LATE:
            pace.training.admission._admit_ready = lambda: os.kill(os.getpid(), signal.SIGKILL)
        if "halt" in words and NODE == 0 and not LATE:

            def halt(pace):
                later = f"sleep {HALT_S}; kill -KILL {os.getpid()}"
                # it ends with this process, whose number may be another's by then
                subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "sh", "-c", later])
                Path(folder, "halted").touch()
                os.kill(os.getpid(), signal.SIGSTOP)

            state_transfer.small_state = halt
        losses, times, turns, note = [], [], {}, watch(pace, folder)
        for batch in pace.batches(Samples(), epochs=EPOCHS):
            if "back" in words and (steps[0] or pace.world.num_nodes < NODES):
                hold(pace, turns)
            losses.append(pace.step(batch))
            times.append(pace.engine.accumulate)
            note(pace.num_steps - 1)
            steps[0] = pace.num_steps
        counted = pace.evaluate(Samples(), metric)
        pace.save()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        leader = pace.leader
    torch.save(state, Path(folder) / f"{NODE}-{LOCAL}.pt")
    said = {"losses": losses, "counted": counted, "leader": leader, "world": [pace.world.node, pace.world.num_nodes]}
    said["times"] = times
    (Path(folder) / f"{NODE}-{LOCAL}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
