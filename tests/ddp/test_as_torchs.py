"""Our DistributedDataParallel against torch's: the same weights, and factors wherever they are the whole gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cluster import Cluster
from machines import needs_cluster
from paceline.ddp import handshake
from paceline.ddp.sums import bucket_sums, lane
from paceline.ddp.sums.factors import Factors
from paceline.launch.local import free_port

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
pytestmark = pytest.mark.long

EXACT = 1e-12  # of sums in another order
SENT_WHOLE = {  # no factors: they are not the whole gradient, or another's hook sums
    *("penalty", "module alone", "allreduce hook", "fp16 hook", "built-in fp16 hook", "PowerSGD hook"),
    *("autocast", "compiled", "compiled whole", "traced"),
}
CASES = (
    *("plain", "clipped", "dropout", "penalty", "tied", "again", "accumulated", "two forwards", "module alone"),
    *("joined", "joined, mean of those left", "unused here", "unused everywhere", "static graph", "views"),
    *(
        "small buckets",
        "checkpointed",
        "own group",
        "buffers of each",
        "allreduce hook",
        "fp16 hook",
        "built-in fp16 hook",
    ),
    *("PowerSGD hook", "ZeRO", "float32", "autocast", "scaled", "traced", "compiled", "compiled whole"),
)

PACKED = ("plain", "accumulated", "joined", "joined, mean of those left", "unused here", "small buckets", "float32")


def ranks(folder, *words, size=2, limit_s=240):
    """As a launcher starts them; (exit code, stdout and stderr) of each."""
    port = str(free_port())
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    given |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=limit_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    for code, text in ranks(folder, SCRIPTS / "under_ddp.py", folder):
        assert code == 0, text
    return json.loads((folder / "said.json").read_text())


def test_every_case_is_looked_at(said):
    assert tuple(said) == CASES


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_torchs_class(said, case):
    one = said[case]
    assert one["gap"] <= (1e-6 if case == "float32" else EXACT)
    assert one["bit-equal"], "replicas differ"
    assert one["same dice"], "it drew from the script's random numbers"
    assert one["keys"]
    assert one["copies"] == 0.0


@pytest.mark.parametrize("case", CASES)
def test_factors_travel_wherever_they_are_the_whole_gradient(said, case):
    assert bool(said[case]["factored"]) == (case not in SENT_WHOLE)


@pytest.mark.parametrize("case", CASES)
def test_sums_of_one_machine_are_in_shared_memory_unless_a_hook_or_a_compiler_makes_them(said, case):
    assert bool(said[case]["shared"]) == (case != "compiled" and "hook" not in case)
    assert said[case]["gathers"] or not said[case]["factored"]


@pytest.mark.parametrize("case", sorted(SENT_WHOLE))
def test_what_torch_sums_has_torchs_bits(said, case):
    assert said[case]["gap"] == 0.0


@pytest.mark.parametrize("case", CASES)
def test_buckets_are_small_unless_the_script_or_its_hook_decides(said, case):
    ours, theirs = said[case]["buckets"]
    own = case in ("small buckets", "traced", "compiled") or "hook" in case
    unbuilt = case.startswith("unused")  # torch does not build them again where it looks for unused parameters
    first = case in ("float32", "autocast")  # torch's first one is of 1 MiB, and holds all
    assert ours == theirs if own or unbuilt or first else ours > theirs


@pytest.mark.parametrize("late_s", [0.0, 0.9])
def test_where_a_rank_comes_too_late_no_rank_takes_its_message(late_s, monkeypatch):
    monkeypatch.setattr(handshake, "WAIT", timedelta(seconds=0.5))
    store = dist.HashStore()

    def told(rank):
        time.sleep(late_s * rank)
        return len(handshake.exchange(store, 1, rank, 2, handshake.message([], [], cpu=True, shares=True, sums=True)))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(told, range(2))) == ([0, 0] if late_s else [2, 2])


@needs_cluster
@pytest.mark.parametrize("slow", [True, pytest.param(False, marks=pytest.mark.dear)])
def test_on_a_slow_network_buckets_are_small_and_the_bits_are_torchs(slow, tmp_path):
    command = [sys.executable, SCRIPTS / "distant_ddp.py", tmp_path, "0" if slow else "60"]
    with Cluster(2) as cluster:
        nodes = [cluster.start(node, command) for node in range(2)]
        assert [node.wait(60) for node in nodes] == [0, 0]
    told = json.loads((tmp_path / "said.json").read_text())
    for case, one in told.items():
        ours, theirs = one["buckets"]
        assert one["gap"] == 0, case
        assert not one["shared"]
        usual = not slow or case in ("own size", "hook") or case == "unused"  # torch does not build them again there
        assert ours == theirs if usual else ours > theirs, case
        assert bool(one["packed"]) == (slow and case not in ("hook", "joined, mean of those left")), case


@pytest.mark.dear
@needs_cluster
def test_of_machines_with_several_ranks_each_sums_in_its_memory_first(tmp_path):
    """Two and one: what passes between machines is the sum of one. The order of additions is another than torch's."""
    command = [sys.executable, SCRIPTS / "distant_ddp.py", tmp_path, "60"]
    with Cluster(2) as cluster:
        places = [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
        started = [
            cluster.start(
                node,
                command,
                {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)},
            )
            for rank, (node, local, size) in enumerate(places)
        ]
        assert [each.wait(100) for each in started] == [0, 0, 0]
    for case, one in json.loads((tmp_path / "said.json").read_text()).items():
        assert one["gap"] < 1e-4, case  # of float32, after steps that round otherwise
        assert bool(one["shared"]) == (case != "hook"), case


@pytest.fixture(scope="module")
def said_packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    for code, text in ranks(folder, SCRIPTS / "under_ddp.py", folder, "packed"):
        assert code == 0, text
    return json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("case", PACKED)
def test_what_is_packed_on_a_slow_network_has_the_same_bits(said, said_packed, case):
    packed, plain = said_packed[case], said[case]
    assert packed["gap"] == plain["gap"]
    assert packed["bit-equal"]
    assert packed["packed"], "nothing was packed"
    assert not plain["packed"]


@pytest.mark.dear
def test_three_ranks_train_to_the_weights_of_torchs_class(tmp_path):
    for code, text in ranks(tmp_path, SCRIPTS / "under_ddp.py", tmp_path, "packed", size=3):
        assert code == 0, text
    said = json.loads((tmp_path / "said.json").read_text())
    assert tuple(said) == PACKED
    for case, one in said.items():
        assert one["gap"] <= (1e-6 if case == "float32" else EXACT), case
        assert one["bit-equal"], case
        assert one["factored"], case
        assert one["packed"], case


# the check


def taken(layer, *inputs):
    """(the layer's weight as `Factors` knows it, its gradient) after these passes."""
    factors = Factors(nn.Sequential(layer), 2)
    with factors.looking():
        loss = sum((layer(each) ** 2).sum() for each in inputs)
    loss.backward()
    (weight,) = factors.weights.values()
    return weight, layer.weight.grad


def layer(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(200, 300).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_make_the_gradient(dtype):
    weight, gradient = taken(layer(dtype), torch.randn(3, 200, dtype=dtype), torch.randn(4, 200, dtype=dtype))
    left, right = weight.whole(gradient)
    assert (len(left), len(right)) == (7, 7)
    assert float((left.T @ right - gradient).norm() / gradient.norm()) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("part", [1.0, 1e-2, 1e-4])
def test_any_part_that_came_from_elsewhere_is_noticed(part):
    for seed in range(20):
        weight, gradient = taken(layer(), torch.randn(3, 200))
        row = seed % gradient.shape[0]
        gradient[row, seed] += part * gradient.norm()
        assert weight.whole(gradient) is None


def test_what_is_small_is_found_row_by_row_in_the_first_steps_and_stays_found():
    """A row that has no gradient of its own, as of a dead unit, and 1e-9 of a penalty's."""
    own = layer()
    factors = Factors(nn.Sequential(own), 2)
    (weight,) = factors.weights.values()
    for penalty in (0.0, 1e-9, 0.0):
        own.zero_grad()
        with factors.looking():
            out = own(torch.randn(3, 200))
        ((out[:, 1:] ** 2).sum() + penalty * (own.weight**2).sum()).backward()
        assert bool(weight.whole(own.weight.grad)) == (not penalty and not weight.impure)
    assert weight.impure


def test_a_weight_with_a_hook_is_sent_whole():
    own = layer()
    own.weight.register_hook(lambda gradient: gradient * 1)
    weight, gradient = taken(own, torch.randn(3, 200))
    assert weight.whole(gradient) is None
    assert weight.impure


def test_a_weight_of_more_rows_than_pay_is_sent_whole_for_good_after_some_steps_in_a_row():
    own = layer()
    factors = Factors(nn.Sequential(own), 2)
    (weight,) = factors.weights.values()
    few, many = (torch.randn(num, 200) for num in (3, factors.most(weight) + 1))
    for given, hopeless in [(many, False), (many, False), (few, False), (many, False), (many, False), (many, True)]:
        own.zero_grad()
        with factors.looking():
            out = own(given)
        (out**2).sum().backward()
        assert (weight.whole(own.weight.grad) is None) == (given is many)
        assert weight.hopeless == hopeless


def test_rows_are_copies():
    given = torch.randn(3, 200)
    weight, gradient = taken(layer(), given)
    _, right = weight.whole(gradient)
    given.zero_()
    assert right.abs().min() > 0


class Alone:
    """Sums of one rank, whose headers are answered with what the others are to have said."""

    def __init__(self, others):
        self.sums, self.others = object.__new__(bucket_sums.BucketSums), others
        self.sums.factors = Factors(nn.Sequential(layer()), 2)
        self.sums._dropped, self.sums._products, self.sums.report_unlike = [], 0, lambda: None
        self.sums.lane = SimpleNamespace(rate=1000, slow=lambda rate: rate, gathered=self.gathered)
        (self.weight,) = self.sums.factors.of.values()

    def gathered(self, own):
        rows, *rest = self.others
        return [own, own + torch.tensor([rows, 0, *rest])]

    def agreed(self, rows, trial):
        part = bucket_sums.Part(self.weight, self.weight.parameter, rows)
        return self.sums._agreed([part], trial), self.sums._dropped


def tried(plain_us, factored_us, plain=3):
    """A bucket whose forms have been timed, before all ranks weigh them."""
    return bucket_sums.Trial({False: plain, True: 3}, {False: plain_us, True: factored_us}, plain=True)


ROWS = torch.zeros(3, 300), torch.zeros(3, 200)


@pytest.mark.parametrize(
    ("others", "trial", "rows", "dropped"),
    [
        ((0, 0, 0, 0), tried(900, 500), 3, False),
        ((2, 0, 0, 0), tried(900, 500), 5, False),
        ((-4, 0, 0, 0), tried(900, 500), bucket_sums.NOT_NOW, False),
        ((-5, 0, 0, 0), tried(900, 500), bucket_sums.NOT_NOW, True),
        ((0, 0, 400, 0), tried(900, 500), 3, True),
        ((0, 0, 0, 7), tried(900, 500), 3, True),
        ((0, 0, 0, 0), tried(500, 900), 3, True),
        ((0, 0, 0, 0), bucket_sums.Trial(failed=bucket_sums.MAX_FAILED), 3, True),
        ((10_000, 0, 0, 0), tried(900, 500), bucket_sums.NOT_NOW, False),
    ],
    ids=["faster", "more rows there", "not whole there", "never whole there", "slower there", "other bits", "slower",
         "never tried", "too many rows there"],
)  # fmt: skip
def test_all_ranks_decide_by_what_all_have_said(others, trial, rows, dropped, monkeypatch):
    monkeypatch.setattr(bucket_sums.Trial, "next", lambda self: True)
    got, gone = Alone(others).agreed(ROWS, trial)
    assert got == [rows]
    assert bool(gone) == dropped


@pytest.mark.parametrize("shares", [False, True])
def test_the_time_of_a_sum_in_shared_memory_is_measured_and_not_estimated_by_that_of_a_gather(shares):
    alone = Alone((0, 0, 0, 0))
    sums, weight = alone.sums, alone.weight
    sums.trials, sums._agreed, sums._multiply = {}, lambda parts, trial: [3], lambda chosen, divisor, size: 2.0
    sums.lane.shares = lambda buffer: shares
    sums._sum(torch.zeros(4), [bucket_sums.Part(weight, weight.parameter, ROWS)], [], 2, 0.0)
    assert sums.trials[weight.name].estimate_us == (0 if shares else 2_000_000)


def weighed(trial):
    return trial.weigh(trial.times, trial.times)


def test_factors_are_tried_first_and_the_whole_gradient_unless_it_would_clearly_take_longer():
    for estimate_us, tries_plain in ((0, True), (2_900_000, True), (3_100_000, False)):
        trial = bucket_sums.Trial()
        for seconds in (9.0, 1.5, 1.0):
            assert trial.next()
            assert not weighed(trial)
            trial.note(True, seconds)
            trial.estimate_us = estimate_us
        assert not weighed(trial)
        assert trial.next() == (not tries_plain)
        assert trial.decided == (not tries_plain)


@pytest.mark.parametrize(("plain_s", "dropped"), [(0.9, True), (1.1, False)])
def test_what_is_slower_for_the_slowest_is_dropped(plain_s, dropped):
    trial = bucket_sums.Trial({False: 0, True: 3}, {True: 1_000_000}, plain=True)
    for seconds in (2.5, plain_s, 2.0):
        assert not weighed(trial)
        assert not trial.next()
        trial.note(False, seconds)
    assert weighed(trial) == dropped
    assert trial.next()
    assert not weighed(trial), "it is weighed once"


def test_a_single_whole_gradient_that_clearly_takes_longer_is_the_last():
    trial = bucket_sums.Trial({False: 0, True: 3}, {True: 1_000_000}, plain=True)
    assert not weighed(trial)
    trial.note(False, 20.0)
    assert not weighed(trial)
    assert trial.decided
    assert trial.next()


def alone(seconds=0.05):
    """A lane to another rank that has the same, and takes so long to send it."""
    made = object.__new__(lane.Lane)
    made.rank, made.size, made.distant, made.packed, made._rates = 0, 2, True, False, []

    def allgather(outputs, inputs):
        time.sleep(seconds)
        for each in outputs[0]:
            each.copy_(inputs[0])
        return SimpleNamespace(wait=lambda: None)

    made._gloo = SimpleNamespace(allgather=allgather)
    return made


def test_packing_begins_on_a_slow_network_and_ends_on_one_twice_as_fast():
    one = alone()
    one.gathered(torch.zeros(250_000))
    assert one.rate * lane.PER_BYTE == pytest.approx(5e-8, rel=0.5)
    per_byte = lane.SLOW_S / lane.PER_BYTE
    for rate, packed in ((0, False), (0.9, False), (1.1, True), (0, True), (0.6, True), (0.4, False), (0.9, False)):
        one.packed = one.slow(round(rate * per_byte))
        assert one.packed == packed
    one.distant = False
    assert one.rate == 0, "the time of a busy machine is not that of a network"


def test_the_time_of_a_whole_gradient_is_told_by_the_rate_of_the_factors():
    sums = object.__new__(bucket_sums.BucketSums)
    sums.size, sums._products, sums.lane = 2, 0, alone()
    weight = taken(layer(), torch.randn(3, 200))[0]

    for count, told in ((3, False), (bucket_sums.ENOUGH_BYTES // 2000 + 1, True)):
        rows = torch.randn(count, 300), torch.randn(count, 200)
        part = bucket_sums.Part(weight, torch.zeros(300, 200), rows)
        seconds = sums._multiply([(part, count)], 2, 10 * count * 2000)
        assert (0.5 <= seconds < 2.0) if told else seconds == 0.0
        assert torch.allclose(part.gradient, rows[0].T @ rows[1], rtol=1e-3, atol=1e-3)


def test_a_step_does_not_see_the_rows_of_the_one_before():
    own = layer()
    factors = Factors(nn.Sequential(own), 2)
    (weight,) = factors.weights.values()
    for rows in (3, 5):
        own.zero_grad()
        with factors.looking():
            loss = own(torch.randn(rows, 200)).sum()
        loss.backward()
        assert len(weight.whole(own.weight.grad)[0]) == rows


def test_rows_that_are_more_bytes_than_the_gradient_are_not_kept():
    most = Factors(nn.Sequential(layer()), 2).most(taken(layer(), torch.randn(1, 200))[0])
    weight, gradient = taken(layer(), torch.randn(most + 1, 200))
    assert weight.rows == []
    assert weight.whole(gradient) is None


def test_nothing_stays_on_the_scripts_modules():
    own = layer()
    taken(own, torch.randn(3, 200))
    assert not own._forward_hooks
    assert not own._backward_hooks
