"""What forward changes by the way, as buffers and encoders that follow by momentum, on any number of processes."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import launching
import paceline
import ranks
from device import DEVICE, of_cpus, waits_in_backward
from nodes import HIDDEN, IN, OPTIMIZERS, OUT, Rank, build, gap, reference, rows
from paceline.engine.compute.forward_state import copies
from paceline.engine.replicas import Engine as Replicas
from paceline.engine.reproducible import Engine as Virtual
from paceline.engine.sequential import Engine
from paceline.link.memory import world

HERE = Path(__file__).parents[1] / "support"
START = (
    "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[3:], sys.argv[1], int(sys.argv[2])))"
)


def in_place(target, online):
    target.mul_(0.9).add_(online, alpha=0.1)


def by_data(target, online):
    target.data = target.data * 0.9 + online.data * 0.1


def in_place_by_data(target, online):
    target.data.mul_(0.9).add_(online.data, alpha=0.1)


class Follower(nn.Module):
    """As BYOL and MoCo: a second encoder that is an average of the first over the steps."""

    def __init__(self, how=in_place):
        super().__init__()
        self.how, self.online, self.head = how, nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    self.how(target, online)
        return self.head(F.relu(self.online(x)) + self.target(x).detach())


class InBuffers(Follower):
    """The same, in buffers."""

    def __init__(self):
        super().__init__()
        del self.target
        self.register_buffer("weight", self.online.weight.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            self.how(self.weight, self.online.weight)
        return self.head(F.relu(self.online(x)) + F.linear(x, self.weight))


class Spectral(nn.Module):
    """A weight divided by its largest singular value, which buffers follow."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(IN, HIDDEN))
        self.head = nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        return self.head(F.relu(self.first(x)))


KINDS = {
    "in place": Follower,
    "by data": lambda: Follower(by_data),
    "in place by data": lambda: Follower(in_place_by_data),
    "in buffers": InBuffers,
    "spectral norm": Spectral,
}


class Codebook(nn.Module):
    """A buffer that is an average of what was seen."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.norm = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT), nn.BatchNorm1d(HIDDEN)
        self.register_buffer("codes", torch.zeros(IN))
        self.register_buffer("mask", torch.ones(HIDDEN))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return self.head(F.relu(self.norm(self.first(x - self.codes))) * self.mask)


class Keras(nn.Module):
    """Batch norm by other means, as Keras 3 computes it: moments by hand, kept in parameters that do not train."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.moving_mean = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
        self.moving_variance = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)

    def forward(self, x):
        x = self.first(x)
        mean, variance = x.mean(0), x.var(0, correction=0)
        with torch.no_grad():
            self.moving_mean.copy_(self.moving_mean * 0.9 + mean * 0.1)
            self.moving_variance.copy_(self.moving_variance * 0.9 + variance * 0.1)
        return self.head(F.relu((x - mean) / (variance + 1e-3).sqrt()))


def batches():
    return [rows(24, 0), rows(24, 1), rows(2, 2), rows(24, 3)]


def on_nodes(size, model, data, **options):
    """[(state, what a hint said)]"""

    def work(link):
        rank = Rank(link, model, **options)
        said = []
        rank.run.record.write = lambda kind, **facts: said.append(facts["text"]) if kind == "hint" else None
        rank.train(data)
        rank.exchange.close()
        rank.engine.close()
        return rank.state(), said

    return ranks.run(size, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [(3, 1), (1, 0, 2)])
def test_nodes_equal_one_process(kind, shares):
    """Also where a node has no samples in some step, so that its forward changes nothing there."""
    model = build(KINDS[kind])
    want, _ = reference(model, batches(), OPTIMIZERS["momentum"])
    for state, said in on_nodes(len(shares), model, batches(), shares=shares):
        assert gap(state, want) < 1e-10
        assert not said


ENGINES = {
    "replicas:2": lambda: Replicas(2),
    "replicas:3": lambda: Replicas(3),
    "reproducible:4": lambda: Virtual(4, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=of_cpus) if name.startswith("reproducible") else name for name in ENGINES]
)
def test_several_passes_in_one_process_equal_one(kind, engine):
    model = build(KINDS[kind])
    want, _ = reference(model, batches(), OPTIMIZERS["momentum"])
    exchange = "ordered" if engine.startswith("reproducible") else "allreduce"
    rank = Rank(world(1)[0], model, engine=ENGINES[engine](), exchange=exchange)
    rank.train(batches())
    rank.engine.close()
    assert gap(rank.state(), want) < 1e-10


@pytest.mark.parametrize("kind", ["in place", "by data", "in place by data"])
def test_an_encoder_follows_once_in_a_step_of_micro_batches(kind):
    model = build(KINDS[kind])
    want, _ = reference(model, batches(), OPTIMIZERS["momentum"])
    engine = Engine()
    engine.accumulate = 3
    rank = Rank(world(1)[0], model, engine=engine)
    rank.train(batches())
    assert gap(rank.state(), want) < 1e-10


def test_replicas_hear_of_an_encoder_that_begins_to_follow_later():
    class Late(Follower):
        def forward(self, x):
            self.num_seen = getattr(self, "num_seen", 0) + 1
            return super().forward(x) if self.num_seen > 3 else self.head(F.relu(self.online(x)))

    rank = Rank(world(1)[0], build(Late), engine=Replicas(2))
    with pytest.raises(ValueError, match=r"in step 3 forward began to change parameter 'target.weight'.*processes:k"):
        rank.train([rows(24, seed) for seed in range(5)])
    rank.engine.close()


def test_what_does_not_train_and_stays_is_shared_by_replicas_again():
    model = build(Follower)
    model.how = lambda target, online: None
    engine = Replicas(2)
    rank = Rank(world(1)[0], model, engine=engine)
    rank.train(batches()[:3])
    assert engine.twins[0].model.target.weight.data_ptr() == rank.model.target.weight.data_ptr()
    engine.close()


def codes(data, first):
    """Of a process that has so many of the first samples of each batch."""
    average = torch.zeros(IN, dtype=torch.float64, device=DEVICE)
    for x, _ in data:
        average = average * 0.5 + x[:first].mean(0) * 0.5
    return average


@pytest.mark.parametrize("size", [2, 3])
def test_broadcast_gives_everyone_the_first_ones_buffers(size):
    data, model = [rows(24, seed) for seed in range(3)], build(Codebook)
    states = on_nodes(size, model, data, buffers="broadcast")
    assert torch.allclose(states[0][0]["codes"], codes(data, 24 // size), rtol=1e-12)
    for state, said in states:
        assert not said
        assert all(torch.equal(state[name], states[0][0][name]) for name in state)


def test_broadcast_of_replicas_on_nodes():
    data, model = [rows(24, seed) for seed in range(3)], build(Codebook)

    def work(link):
        rank = Rank(link, model, engine=Replicas(2), buffers="broadcast")
        rank.train(data)
        rank.exchange.close()
        rank.engine.close()
        return rank.state()

    states = ranks.run(2, work)
    assert torch.allclose(states[0]["codes"], codes(data, 6), rtol=1e-12)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_broadcast_takes_what_begins_to_change_later_and_the_first_that_has_samples():
    class Late(Codebook):
        def forward(self, x):
            self.num_seen = getattr(self, "num_seen", 0) + 1
            if self.num_seen > 3:
                self.mask.mul_(1 + x.mean().detach())
            return super().forward(x)

    data = [rows(24, seed) for seed in range(5)]
    states = on_nodes(3, build(Late), data, buffers="broadcast", shares=(0, 1, 1))
    assert torch.allclose(states[0][0]["codes"], codes(data, 12), rtol=1e-12)
    assert not torch.equal(states[0][0]["mask"], torch.ones(HIDDEN, dtype=torch.float64, device=DEVICE))
    assert all(torch.equal(state[name], states[0][0][name]) for state, _ in states for name in state)


def test_only_what_changed_is_sent():
    data, model = [rows(24, seed) for seed in range(4)], build(Codebook)
    model.register_buffer("table", torch.ones(100_000))

    def work(link):
        rank = Rank(link, model, buffers="broadcast")
        rank.train(data[:3])
        before = rank.run.link.sent_bytes
        rank.train(data[3:])
        after = rank.run.link.sent_bytes
        rank.exchange.close()
        return after - before, rank.model

    for sent, its in ranks.run(2, work):
        gradients = sum(p.nbytes for p in its.parameters())
        assert sent < 2 * gradients + 50_000 < its.table.nbytes


def test_own_buffers_are_reported_once():
    data, model = [rows(24, seed) for seed in range(4)], build(Codebook)
    (first, said), (second, others) = on_nodes(2, model, data)
    assert not torch.equal(first["codes"], second["codes"])
    assert not others
    assert len(said) == 1
    assert re.search(
        r"forward changes 'codes' based on the samples.*buffers='broadcast'.*DistributedDataParallel", said[0]
    )


@of_cpus
def test_own_buffers_of_replicas_and_micro_batches_are_reported_once():
    for engine, accumulate, words in (
        (Replicas(2), 1, "each process or replica"),
        (Virtual(3, 1), 1, "each process or replica"),
        (Engine(), 2, "in each micro-batch"),
    ):
        engine.accumulate, exchange = accumulate, "ordered" if engine.num_virtual_shards else "allreduce"
        rank, said = Rank(world(1)[0], build(Codebook), exchange=exchange, engine=engine), []
        rank.run.record.write = lambda kind, said=said, **facts: said.append(facts.get("text"))
        rank.train([rows(24, seed) for seed in range(3)])
        engine.close()
        assert [words in text and "'codes'" in text for text in filter(None, said)] == [True]


@pytest.mark.parametrize("shares", [(1, 1), (0, 1)])
def test_statistics_kept_by_other_means_are_refused_by_name(shares):
    def work(link):
        rank = Rank(link, build(Keras), batch_norm="sync", shares=shares)
        with pytest.raises(ValueError, match=r"batch_norm='sync': forward keeps 'moving_mean', 'moving_variance'"):
            rank.train(batches())
        rank.exchange.close()
        rank.engine.close()

    ranks.run(2, work)


def test_tracked_statistics_of_instances_are_refused_by_name():
    class Instances(Codebook):
        def __init__(self):
            super().__init__()
            self.norm = nn.InstanceNorm1d(HIDDEN, track_running_stats=True)

        def forward(self, x):
            return self.head(self.norm(self.first(x)[:, :, None].expand(-1, -1, 2)).mean(2))

    def work(link):
        rank = Rank(link, build(Instances), batch_norm="sync")
        with pytest.raises(ValueError, match=r"forward keeps 'norm.running_mean', 'norm.running_var'"):
            rank.train(batches())
        rank.exchange.close()
        rank.engine.close()

    ranks.run(2, work)


@waits_in_backward
def test_a_codebook_beside_synchronised_batch_norm_is_not_refused():
    data = [rows(24, seed) for seed in range(3)]
    states = on_nodes(2, build(Codebook), data, batch_norm="sync", buffers="broadcast")
    assert all(torch.equal(states[0][0][name], states[1][0][name]) for name in states[0][0])


def test_evaluation_leaves_what_forward_changes():
    """Each process evaluates other samples, and other numbers of them."""

    class Always(Follower):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += len(x)
            out = super().forward(x)
            with torch.no_grad():
                self.target.weight.mul_(0.5)
            return out

    model = build(Always)
    model.seen.zero_()
    with paceline.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batch_size=24, engine="threads:1"
    ) as pace:
        for number in range(4):
            pace.step(rows(24, number))
            before = copy.deepcopy(model.state_dict())
            pace.evaluate(torch.utils.data.TensorDataset(*rows(50, 9)), lambda out, y: out.sum())
            assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert model.seen == 4 * 24


def test_a_wrong_word_and_an_exchange_that_meets_seldom_are_refused():
    model = build(Codebook)
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy
    with pytest.raises(ValueError, match="buffers is 'own' or 'broadcast', got 'mean'"):
        paceline.join(*given, batch_size=4, buffers="mean")
    with pytest.raises(ValueError, match="buffers='broadcast' runs after each step"):
        paceline.join(*given, batch_size=4, buffers="broadcast", exchange="local_sgd:4", engine="threads:1")


SCRIPT = """
import os, sys, torch, paceline
from torch.nn import functional as F
from nodes import build, rows
from test_what_forward_changes import Codebook
model = build(Codebook)
pace = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batch_size=24,
                     buffers=sys.argv[1])
data = torch.utils.data.TensorDataset(*rows(72, 0))
for batch in pace.batches(data):
    pace.step(batch)
torch.save(model.state_dict(), os.path.join(sys.argv[2], f"{pace.world.rank}.pt"))
pace.close()
"""


@pytest.mark.dear
@pytest.mark.parametrize("buffers", ["own", "broadcast"])
def test_processes_on_two_nodes(buffers, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", START, "processes:2", "2", sys.executable, str(script), buffers, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": launching.python_path()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(4)]
    alike = [torch.equal(state["codes"], states[0]["codes"]) for state in states[1:]]
    assert alike == [buffers == "broadcast"] * 3
    assert done.stderr.count("forward changes 'codes'") == (buffers == "own")


class Named(torch.Tensor):
    """A subclass, whose copy is one too."""


BUFFERS = {
    "values": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).T,
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "one value of many": lambda: torch.ones(1).expand(5),
    "a count": lambda: torch.tensor(7),
    "none": lambda: torch.empty(0, 3),
    "flags": lambda: torch.tensor([True, False]),
    "bytes": lambda: torch.arange(4, dtype=torch.uint8),
    "short": lambda: torch.arange(4).to(torch.uint16),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "half": lambda: torch.randn(3).bfloat16(),
    "eighth": lambda: torch.randn(3).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.ones(3).as_subclass(Named),
    "with a gradient": lambda: torch.ones(3, requires_grad=True),
}


def test_copies_are_clones():
    """Of all together, as of each: its type, its values, memory of its own."""
    made = [make() for make in BUFFERS.values() for _ in range(2)]
    for name, each, copied in zip([n for n in BUFFERS for _ in range(2)], made, copies(made), strict=True):
        want = each.clone().detach()
        assert (type(copied), copied.dtype, copied.layout, copied.shape) == (type(want), *_kind(want)), name
        assert torch.equal(*(t.to_dense().float() if t.dtype not in (torch.complex64,) else t for t in (copied, want)))
        assert not copied.numel() or copied.layout != torch.strided or copied.data_ptr() != each.data_ptr()


def _kind(tensor):
    return tensor.dtype, tensor.layout, tensor.shape
