"""A link whose sums are made by one of the algorithms is a link, over gloo too, and training by it is the same."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback

import pytest
import torch
from test_collectives import ALGORITHMS, placed

import paceline
import ranks
from launching import environment
from paceline.errors import LinkError
from paceline.launch import local
from paceline.link.net.collective_override import CollectiveOverride, agree_on
from paceline.link.net.collective_run import Collective
from paceline.registry import find
from paceline.testing import laws
from paceline.testing.links import LIMIT_S, everyone, pattern, same

LAWS = {str(law): law for law in laws("link")}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_link_with_a_chosen_collective_holds_every_law_of_links(size):
    for name, law in LAWS.items():
        ranks.run(size, lambda link, name=name, law=law: law(CollectiveOverride(link.lane(name), Collective("ring"))))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_collective_can_be_chosen(name):
    def work(link):
        chosen = CollectiveOverride(link, Collective(name))
        for law in (LAWS["sum_adds"], LAWS["many_are_in_flight_on_two_lanes"]):
            law(chosen.lane(str(law)))

    ranks.run(3, work)


def test_a_killed_rank_is_named_by_the_sum_and_by_those_after_it():
    def work(link):
        if link.rank == 1:
            raise InterruptedError("killed")
        chosen = CollectiveOverride(link, Collective("ring"))
        handles = [chosen.sum(torch.ones(3), f"bucket {i}") for i in range(3)]
        for handle in handles:
            with pytest.raises(LinkError, match=r"rank 1 was killed \(a message of bucket 0\)") as raised:
                handle.wait(LIMIT_S)
            peers.append(raised.value.peer)

    peers = []
    with pytest.raises(InterruptedError):
        ranks.run(2, work)
    assert peers == [1] * 3


def test_a_chosen_sum_gives_up_at_its_deadline_and_is_still_under_way():
    def work(link):
        chosen = CollectiveOverride(link, Collective("ring"))
        if link.rank == 0:
            handle = chosen.sum(torch.ones(4), "bucket 7")
            with pytest.raises(LinkError, match="gave up on bucket 7 after 0 s"):
                handle.wait(0.1)
            assert not handle.done()
            link.send(torch.ones(1), 1).wait()
            same(handle.wait(LIMIT_S), torch.full((4,), 2.0))
        else:
            link.recv(torch.zeros(1), 0).wait(LIMIT_S)
            chosen.sum(torch.ones(4)).wait(LIMIT_S)

    ranks.run(2, work)


# Real processes.


def one_process(rank, size, port):
    """Prints {what: what went wrong}. After a broken link the rest cannot be tried."""
    faults = {}
    torch.set_num_threads(1)  # threads that spin for a core keep the other processes off it
    link = find("link", "gloo", int(rank), int(size), "127.0.0.1", int(port))

    def sums_are_equal(lane):
        for name in ALGORITHMS:
            for count in (0, 1, 7, 100_003):
                for dtype in (torch.float32, torch.bfloat16, torch.int64):
                    mine, before = ((lane.rank + 1) * pattern(count)).to(dtype), lane.sent_bytes
                    Collective(name).run(lane, mine, placed(lane.size), deadline_s=LIMIT_S)
                    same(mine, everyone(lane) * pattern(count), name, count, dtype)
                    sent = torch.tensor([lane.sent_bytes - before])
                    cost = Collective(name).cost(lane.size, mine.nbytes, mine.itemsize, placed(lane.size))
                    assert link.max(sent.clone()).wait(LIMIT_S).item() == cost.bytes, (name, count)
                    assert link.sum(sent).wait(LIMIT_S).item() == cost.total_bytes, (name, count)

    def bits_are_equal(lane):
        for name in ALGORITHMS:
            mine = torch.randn(10_007, generator=torch.Generator().manual_seed(lane.rank))
            gloo = link.sum(mine.clone()).wait(LIMIT_S)
            Collective(name).run(lane, mine)
            torch.testing.assert_close(mine, gloo)
            for other in link.all_gather(mine, even=True).wait(LIMIT_S):
                same(other, mine, name)

    laws = {"sums are equal": sums_are_equal, "bits are equal": bits_are_equal}
    laws |= {f"chosen: {name}": law for name, law in LAWS.items()}
    for name, law in laws.items():
        lane = link.lane(name)
        try:
            law(CollectiveOverride(lane, Collective("ring")) if "chosen" in name else lane)
        except Exception:
            faults[name] = traceback.format_exc()
            break
    link.close()
    print(json.dumps(faults))


@pytest.mark.dear
def test_over_gloo_between_processes():
    size = 3
    port = str(local.free_port())
    command = [sys.executable, __file__]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), port],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(started):
            out, errors = process.communicate(timeout=100)
            assert process.returncode == 0, f"rank {rank}: exit code {process.returncode}\n{errors}"
            assert not errors, f"rank {rank} complained:\n{errors}"
            for name, fault in json.loads(out).items():
                pytest.fail(f"{name}, rank {rank}:\n{fault}", pytrace=False)
    finally:
        for process in started:
            process.kill()
            process.wait()


TRAINING = """
import os, sys, torch, paceline
rank, out = int(os.environ["RANK"]), sys.argv[1]
for name in sys.argv[2:]:
    os.environ["PACELINE_COLLECTIVE"] = name
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=256) as pace:
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            pace.step((torch.randn(128, 64), torch.randint(3, (128,))))
        used = type(pace.link.link).__name__
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    torch.save((used, weights), f"{out}/{name}{rank}.pt")
"""


@pytest.mark.dear
def test_training_by_a_chosen_collective_equals_training_by_gloo(tmp_path):
    command = [sys.executable, "-c", TRAINING, str(tmp_path), "", "halving"]
    assert local.start(command, "sequential", num_nodes=2) == 0
    trained = {}
    for name, link in (("", "Link"), ("halving", "CollectiveOverride")):
        (used, first), (_, second) = (torch.load(tmp_path / f"{name}{rank}.pt") for rank in range(2))
        assert used == link
        assert torch.equal(first, second)
        trained[name] = first
    torch.testing.assert_close(trained[""], trained["halving"])


def test_a_collective_that_is_not_known_is_told_before_anyone_is_called(monkeypatch):
    monkeypatch.setenv("PACELINE_COLLECTIVE", "halvig")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"no collective named 'halvig'.*did you mean 'halving'"):
        paceline.join(model, torch.optim.SGD(model.parameters()), torch.nn.functional.cross_entropy, batch_size=2)


@pytest.mark.parametrize("told", [("ring", "halving"), ("", "ring", "ring"), ("ring", "")])
def test_ranks_that_choose_differently_are_told_before_anything_is_added_up(told):
    def one(link):
        with pytest.raises(ValueError, match=r"PACELINE_COLLECTIVE is .*set it alike on all") as error:
            agree_on(link, told[link.rank])
        return str(error.value)

    (said,) = set(ranks.run(len(told), one))
    for name in told:
        assert (repr(name) if name else "not set") in said


if __name__ == "__main__":
    one_process(*sys.argv[1:])
