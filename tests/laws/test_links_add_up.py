"""Collectives give the closed form of what the ranks put in, on any link, and count the bytes they declare."""

from __future__ import annotations

import contextlib
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
from paceline import transport
from paceline.elastic.membership import connect, detect
from paceline.errors import LinkError
from paceline.launch.local import free_port
from paceline.registry import find, module, names
from paceline.report.activity import Activity
from twin import Twin

pytestmark = pytest.mark.long

COUNTS = (0, 1, 7, 1000)  # empty, one, a prime, more than one packet of eight
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LIMIT_S = 15.0


def pattern(count):
    """1 .. 7 over and over: times ranks up to 5, and added up, even bfloat16 holds it exactly."""
    return torch.arange(count, dtype=torch.float64) % 7 + 1


def signs(count):
    return 1 - 2 * (torch.arange(count, dtype=torch.float64) % 2)


def same(got, want, *what):
    want = want.to(got.dtype)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.equal(got, want), (what, got, want)


def everyone(link):
    """1 + 2 + .. + N."""
    return link.size * (link.size + 1) // 2


# Laws: each runs on every rank of every link, on a lane of its own.


def sum_adds(link):
    for dtype in (*FLOATS, torch.int64):
        for count in COUNTS:
            mine = ((link.rank + 1) * pattern(count)).to(dtype)
            result = link.sum(mine).wait(LIMIT_S)
            same(result, everyone(link) * pattern(count), dtype, count)
            assert result is mine


def two_add_up_to_torchs_bits(link):
    """So it changes nothing where a sum of two is made of a gather."""
    dice = torch.Generator().manual_seed(7)
    for dtype in FLOATS:
        both = [torch.randn(1000, generator=dice, dtype=torch.float64).to(dtype) for _ in range(link.size)]
        result = link.sum(both[link.rank].clone()).wait(LIMIT_S)
        if link.size == 2:
            assert torch.equal(result, both[0] + both[1]), dtype


def sixteen_bits_are_rounded_once_where_that_is_promised(link):
    """256 + 1 + 1: in bfloat16 alone each 1 is lost."""
    mine = torch.full((9,), 256.0 if link.rank == 0 else 1.0).bfloat16()
    result = link.sum(mine).wait(LIMIT_S)
    assert link.accumulates_fp32 in (False, True)
    if link.accumulates_fp32 and link.size > 2:
        same(result, torch.full((9,), 255.0 + link.size), link.size)


def max_takes_the_largest(link):
    """Even places are largest on the last rank, odd ones on the first."""
    for dtype in (*FLOATS, torch.int64):
        for count in COUNTS:
            mine = ((link.rank + 1) * signs(count) * pattern(count)).to(dtype)
            link.max(mine).wait(LIMIT_S)
            largest = torch.where(signs(count) > 0, link.size, -1)
            same(mine, largest * pattern(count), dtype, count)


def all_gather_keeps_rank_order(link):
    for even in (False, True):
        for dtype in (torch.float64, torch.uint8):
            for count in COUNTS:
                mine = ((link.rank + 1) * pattern(3 * count)).view(count, 3).to(dtype)
                before = mine.clone()
                parts = link.all_gather(mine, even=even).wait(LIMIT_S)
                assert len(parts) == link.size
                for rank, part in enumerate(parts):
                    same(part, (rank + 1) * pattern(3 * count).view(count, 3), even, dtype, count)
                same(mine, before, "input")


def all_gather_of_ragged_rows(link):
    """Rank r has r rows, then N - 1 - r, then only one rank has any."""
    last = link.size - 1
    for rows_of in (lambda r: r, lambda r: 7 * (last - r), lambda r: 1000 * (r == last)):
        rows = rows_of(link.rank)
        mine = (link.rank + 1) * pattern(2 * rows).view(rows, 2)
        for rank, part in enumerate(link.all_gather(mine).wait(LIMIT_S)):
            same(part, (rank + 1) * pattern(2 * rows_of(rank)).view(-1, 2), rank)


def a_gather_is_the_same_over_a_quick_wire(link):
    """Several megabytes: in stretches, or whole."""
    for quick in (False, True, False):
        link.set_regime(quick)
        for rows_of in (lambda r: 40_000, lambda r: 40_000 * (r + 1), lambda r: 90_000 * (r == link.size - 1)):
            rows = rows_of(link.rank)
            mine = (link.rank + 1) * pattern(8 * rows).view(rows, 8)
            for rank, part in enumerate(link.all_gather(mine).wait(LIMIT_S)):
                same(part, (rank + 1) * pattern(8 * rows_of(rank)).view(-1, 8), rank, quick)


def all_gather_results_are_ones_own(link):
    parts = link.all_gather(torch.full((3,), link.rank + 1.0)).wait(LIMIT_S)
    for part in parts:
        part.add_(100 * (link.rank + 1))
    link.sum(torch.ones(1)).wait(LIMIT_S)  # everyone has changed theirs
    for rank, part in enumerate(parts):
        same(part, torch.full((3,), rank + 1.0 + 100 * (link.rank + 1)), rank)


def reduce_scatter_gives_each_its_slice(link):
    for dtype in (torch.float32, torch.float64):
        for count in COUNTS:
            rows = pattern(2 * link.size * count).view(link.size * count, 2)
            mine = ((link.rank + 1) * rows).to(dtype)
            before = mine.clone()
            part = link.reduce_scatter(mine).wait(LIMIT_S)
            same(part, everyone(link) * rows[link.rank * count : (link.rank + 1) * count], dtype, count)
            same(mine, before, "input")


def broadcast_from_every_root(link):
    for root in range(link.size):
        for count in COUNTS:
            mine = (link.rank + 1) * pattern(count)
            link.broadcast(mine, root).wait(LIMIT_S)
            same(mine, (root + 1) * pattern(count), root, count)


def send_reaches_the_peer_and_tag(link):
    """Everyone to everyone, two messages each, received in the other order than sent."""
    others = [rank for rank in range(link.size) if rank != link.rank]
    for count in COUNTS:
        out = {(peer, tag): (link.rank + 1) * 10.0**tag * pattern(count) for peer in others for tag in (1, 2)}
        sent = [link.send(tensor, peer, tag) for (peer, tag), tensor in out.items()]
        got = {key: torch.zeros(count, dtype=torch.float64) for key in reversed(list(out))}
        received = [link.recv(tensor, peer, tag) for (peer, tag), tensor in got.items()]
        for handle in (*received, *sent):
            handle.wait(LIMIT_S)
        for (peer, tag), tensor in got.items():
            same(tensor, (peer + 1) * 10.0**tag * pattern(count), peer, tag, count)


def many_are_in_flight_on_two_lanes(link):
    """Each lane has an order of its own: odd ranks start the second lane first, and all wait backwards."""
    lanes = [link.lane("first"), link.lane("second")]
    flying = []
    for i, lane in reversed(list(enumerate(lanes))) if link.rank % 2 else enumerate(lanes):
        for k in range(6):
            mine = (link.rank + 1) * (10 * i + k + 1) * pattern(1000 * (k % 2) + 7)
            first = mine[:3].clone()  # while a sum is under way its tensor is the link's
            flying.append((i, k, lane.sum(mine)))
            flying.append((i, k, lane.all_gather(first, even=True)))
    for i, k, handle in reversed(flying):
        result = handle.wait(LIMIT_S)
        if isinstance(result, list):
            for rank, part in enumerate(result):
                same(part, (rank + 1) * (10 * i + k + 1) * pattern(3), i, k)
        else:
            same(result, everyone(link) * (10 * i + k + 1) * pattern(1000 * (k % 2) + 7), i, k)
        assert handle.done()


def counted_bytes_are_the_declared_ones(link):
    mine = (link.rank + 1) * pattern(60 * 8)  # divisible by 1 .. 6 ranks
    operations = {
        "sum": lambda: link.sum(mine.clone()),
        "max": lambda: link.max(mine.clone()),
        "all-gather": lambda: link.all_gather(mine, even=True),
        "reduce-scatter": lambda: link.reduce_scatter(mine),
        "broadcast": lambda: link.broadcast(mine.clone()),
    }
    for operation, start in operations.items():
        before = link.sent_bytes
        start().wait(LIMIT_S)
        assert link.sent_bytes - before == link.cost(operation, mine.nbytes).bytes, operation
        assert (link.sent_bytes > before) == (link.size > 1), operation
    if link.size > 1:
        before = link.sent_bytes
        received = link.recv(torch.zeros_like(mine), (link.rank - 1) % link.size)
        link.send(mine, (link.rank + 1) % link.size).wait(LIMIT_S)
        received.wait(LIMIT_S)
        assert link.sent_bytes - before == mine.nbytes
        assert link.cost("send", mine.nbytes).bytes == mine.nbytes


def what_was_started_ends_though_nobody_waits(link):
    mine = (link.rank + 1) * pattern(1 << 19)
    flying = [link.sum(mine), link.all_gather(mine[:7].clone(), even=True)]
    end = time.monotonic() + LIMIT_S
    while not all(handle.done() for handle in flying):
        assert time.monotonic() < end
        time.sleep(0.01)
    same(flying[0].wait(0.5), everyone(link) * pattern(1 << 19))


def a_late_peer_is_not_a_lost_one(link):
    late = link.size - 1
    if link.rank == late:
        time.sleep(0.8)
    if link.size > 1 and link.rank == 0:
        same(link.recv(torch.zeros(1), late).wait(LIMIT_S), torch.ones(1), "received late")
    if link.size > 1 and link.rank == late:
        link.send(torch.ones(1), 0).wait(LIMIT_S)
    same(link.sum(torch.ones(1)).wait(LIMIT_S), torch.full((1,), float(link.size)), "added late")


def a_wait_ends_at_its_deadline(link):
    if link.size > 1 and link.rank == 0:
        late = link.recv(torch.zeros(1), 1)
        start = time.monotonic()
        with contextlib.suppress(LinkError):
            late.wait(0.3)
            raise AssertionError("received what nobody had sent")
        assert 0.2 < time.monotonic() - start < 3.0
    link.sum(torch.ones(1)).wait(LIMIT_S)
    if link.size > 1 and link.rank == 1:
        link.send(torch.ones(1), 0).wait(LIMIT_S)
    if link.size > 1 and link.rank == 0:
        same(late.wait(LIMIT_S), torch.ones(1), "and the operation is still under way")
    link.sum(torch.ones(1)).wait(LIMIT_S)


LAWS = {
    law.__name__: law
    for law in (
        sum_adds,
        two_add_up_to_torchs_bits,
        sixteen_bits_are_rounded_once_where_that_is_promised,
        max_takes_the_largest,
        all_gather_keeps_rank_order,
        all_gather_of_ragged_rows,
        a_gather_is_the_same_over_a_quick_wire,
        all_gather_results_are_ones_own,
        reduce_scatter_gives_each_its_slice,
        broadcast_from_every_root,
        send_reaches_the_peer_and_tag,
        many_are_in_flight_on_two_lanes,
        counted_bytes_are_the_declared_ones,
        what_was_started_ends_though_nobody_waits,
        a_late_peer_is_not_a_lost_one,
        a_wait_ends_at_its_deadline,
    )
}


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
    assert _Handle(transport.Link(), work, "sum", lambda: "the sum").wait() == "the sum"
    assert work.waits == 2
