"""Collectives give the closed form of what the ranks put in, on any link, and count the bytes they declare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from functools import partial

import pytest
import torch

import mpirun
import ranks
from launching import environment
from needs import want
from paceline.elastic.membership import connect, detect
from paceline.errors import LinkError
from paceline.launch.local import free_port
from paceline.registry import find, module, names
from paceline.report.activity import Activity
from paceline.testing import laws
from paceline.testing.links import LIMIT_S, same
from twin import Twin

pytestmark = pytest.mark.long

LAWS = {str(law): law for law in laws("link")}


def in_threads(link, size):
    """{law: what went wrong}, with ranks as threads of this process."""
    faults = {}
    for name, law in LAWS.items():
        try:
            ranks.run(size, lambda link, name=name, law=law: law(link.lane(name)), module("link", link).world(size))
        except Exception:
            faults[name] = traceback.format_exc()
    return faults


def in_processes(link, size):
    """{law: what went wrong}: this file, started once per rank, prints it."""
    command = [__file__, link, str(size), str(free_port())]
    started = [
        subprocess.Popen(
            [sys.executable, *command, str(rank)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    faults = {}
    try:
        for rank, process in enumerate(started):
            out, errors = process.communicate(timeout=100)
            assert process.returncode == 0, f"rank {rank}: exit code {process.returncode}\n{errors}"
            assert not errors, f"rank {rank} complained:\n{errors}"
            for name, fault in json.loads(out).items():
                faults.setdefault(name, f"rank {rank}:\n{fault}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return faults


def over_loopback(link, size):
    """The same, with ranks as threads that have a network between them."""
    os.environ["PACELINE_SECRET"] = "of this test"
    port, faults = free_port(), [dict.fromkeys(LAWS, "it did not end")] * size

    def one(rank):
        try:
            faults[rank] = try_all(connect(link, rank, size, "127.0.0.1", port).bare)
        except Exception:
            faults[rank] = dict.fromkeys(LAWS, traceback.format_exc())

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return {name: f"rank {rank}:\n{fault}" for rank in range(size) for name, fault in faults[rank].items()}


def under_mpirun(link, size):
    """The same, started by mpirun, which says what all of them print."""
    want(mpi=mpirun.unavailable())
    command = mpirun.command(size, __file__, link, size, 0)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == size
    return {name: fault for faults in said for name, fault in faults.items()}


def one_rank(link, size, port, rank):
    """What each process does."""
    make = Twin if link == "nccl" else partial(find, "link", link)  # where there is no GPU
    activity = Activity()
    print(json.dumps(try_all(make(int(rank), int(size), "127.0.0.1", int(port), 0, detect(activity), activity))))


def try_all(whole):
    """{law: what went wrong} on this rank. After a broken link the laws that are left cannot be tried, and say so."""
    faults = {}
    for name, law in LAWS.items():
        try:
            law(whole.lane(name))
        except AssertionError:
            faults[name] = traceback.format_exc()
        except Exception:
            faults |= dict.fromkeys(list(LAWS)[list(LAWS).index(name) :], traceback.format_exc())
            break
    whole.close()
    return faults


# How a link's ranks are made, and how many; any other link is made like a network's.
WORLDS = {
    "memory": (in_threads, (1, 2, 3, 4, 5)),
    "mpi": (under_mpirun, (1, 2, 3, 4, 5)),
    "tls": (over_loopback, (1, 2, 3, 4, 5)),
    "nccl": (in_processes, (3,)),
}
NETWORK = (in_processes, (1, 2, 3, 4, 5))


@pytest.fixture(scope="module")
def faults():
    known = {}

    def of(link, size):
        if (link, size) not in known:
            known[link, size] = WORLDS.get(link, NETWORK)[0](link, size)
        return known[link, size]

    return of


@pytest.mark.dear("nccl", *(f"{kind}-{n}" for kind in ("mpi", "tls", "gloo") for n in (1, 3, 4, 5)))
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("link", "size"), [(link, size) for link in names("link") for size in WORLDS.get(link, NETWORK)[1]]
)
def test_law(faults, link, size, law):
    if fault := faults(link, size).get(law):
        pytest.fail(fault, pytrace=False)


@pytest.mark.parametrize("operation", ["sum", "all_gather", "recv"])
@pytest.mark.parametrize("when_s", [0.0, 0.2])
def test_a_killed_rank_is_named_to_those_who_wait_for_it(operation, when_s):
    def work(link):
        if link.rank == 1:
            time.sleep(when_s)
            raise InterruptedError("killed")
        start = time.monotonic()
        mine = torch.ones(3)
        handle = link.recv(mine, 1) if operation == "recv" else getattr(link, operation)(mine)
        with pytest.raises(LinkError, match="rank 1") as raised:
            handle.wait()
        waits.append((raised.value.peer, time.monotonic() - start))

    waits = []
    with pytest.raises(InterruptedError):
        ranks.run(3, work)
    assert [peer for peer, _ in waits] == [1, 1]
    assert all(waited_s < when_s + 1.0 for _, waited_s in waits)


def test_those_who_do_not_need_the_killed_rank_go_on():
    def work(link):
        link.hub.kill(1)
        if link.rank == 0:
            link.send(torch.full((2,), 7.0), 2).wait()
        if link.rank == 2:
            same(link.recv(torch.zeros(2), 0).wait(LIMIT_S), torch.full((2,), 7.0))
        return link.rank

    assert ranks.run(3, work) == [0, 1, 2]


def test_the_error_of_the_rank_that_failed_is_the_one_reported():
    """What a rank does wrong must not hide behind the others' broken links."""
    known = threading.Event()

    def work(link):
        if link.rank == 0:
            try:
                link.sum(torch.ones(1)).wait()
            finally:
                known.set()
        else:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ranks.run(2, work)
    assert known.wait(5), "the other rank was left waiting"


if __name__ == "__main__":
    one_rank(*sys.argv[1:4], *(sys.argv[4:] or [os.environ["OMPI_COMM_WORLD_RANK"]]))


def test_an_operation_that_ends_in_the_moment_its_wait_expires_has_ended_well():
    """Story: a wait expired, the operation ended, and its success was told as the loss of a peer."""
    from paceline.link.gloo import _Handle

    class Work:
        waits = 0

        def wait(self, timeout):
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return True

    work = Work()
    assert _Handle(ranks.memory.world(1)[0], work, "sum", lambda: "the sum").wait() == "the sum"
    assert work.waits == 2
