"""A sparse buffer (COO), such as a graph's adjacency, is copied, restored, sent and kept as dense ones are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import ranks
from device import of_cpus
from launching import launch, small
from nodes import gap
from paceline.checkpoint import export, tensor_file
from paceline.elastic import state_transfer
from paceline.exchange.flow.control import Control
from paceline.link import memory
from paceline.step import buffer_broadcast

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def adjacency(seed=0, values=9):
    dice = torch.Generator().manual_seed(seed)
    places = torch.randint(0, 6, (2, values), generator=dice)
    return torch.sparse_coo_tensor(places, torch.rand(values, generator=dice), (6, 6), check_invariants=True)


class Graph(nn.Module):
    """Its adjacency fades with every forward pass."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("edges", adjacency(seed).coalesce())
        self.register_buffer("aside", adjacency(seed + 1), persistent=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.edges.mul_(0.9)
            self.count += 1
        return self.layer(torch.sparse.mm(self.edges, x.T).T + torch.sparse.mm(self.aside, x.T).T)


def join(model, **words):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.join(model, optimizer, F.cross_entropy, **{"batch_size": 8, "engine": "sequential", **words})


def dense(state):
    return {name: value.to_dense().clone() for name, value in state.items()}


@of_cpus
@pytest.mark.parametrize("engine", ["sequential", "threads:2", "replicas:2", "reproducible:2"])
def test_every_engine_trains_with_one(engine):
    model, plain = Graph(), Graph()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with join(model, engine=engine) as pace:
        for _ in range(3):
            pace.step(BATCH)
            optimizer.zero_grad()
            F.cross_entropy(plain(BATCH[0]), BATCH[1]).backward()
            optimizer.step()
    assert gap(dense(model.state_dict()), dense(plain.state_dict())) < 1e-6
    assert model.edges.is_coalesced() == plain.edges.is_coalesced()


@pytest.mark.parametrize("size", [2, 3])
def test_everyone_has_rank_0s(size):
    def work(link):
        model = Graph(10 * link.rank)
        if link.rank == 1:
            model.edges = adjacency(5, 0)  # none at all
        engine = type("Engine", (), {"local_place": (0, 1)})
        kept = model.edges
        buffer_broadcast.broadcast_sparse(model, engine, Control(memory.Members(link)))
        assert model.edges is kept
        return model

    first, *others = ranks.run(size, work, memory.world(size))
    want = Graph(0)
    for model in (first, *others):
        assert torch.equal(model.edges.to_dense(), want.edges.to_dense())
        assert torch.equal(model.aside.to_dense(), want.aside.to_dense())
        assert (model.edges.is_coalesced(), model.aside.is_coalesced()) == (True, False)


def test_a_step_that_never_was_leaves_it_as_it_was():
    model = Graph()
    with join(model) as pace:
        pace.step(BATCH)
        before = dense(model.state_dict())
        kept = pace.engine.snapshot()
        model(BATCH[0])
        assert not torch.equal(model.edges.to_dense(), before["edges"])
        pace.engine.rollback(kept)
        assert gap(dense(model.state_dict()), before) == 0.0


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_and_an_export_have_it(tmp_path, wait):
    one, other = Graph(), Graph()
    other.edges = adjacency(5, 4)
    with join(one, folder=tmp_path / "run") as pace:
        pace.step(BATCH)
        pace.save(wait=wait)
        now = dense(one.state_dict())
        pace.step(BATCH)
        pace.export(tmp_path / "it.safetensors")
    with join(other, folder=tmp_path / "run") as pace:
        assert pace.restore()
        assert gap(dense(other.state_dict()), now) == 0.0
        assert other.edges.is_coalesced() == one.edges.is_coalesced()
        pace.step(BATCH)
    assert gap(dense(other.state_dict()), dense(one.state_dict())) == 0.0
    weights, _ = export.load(tmp_path / "it.safetensors")
    plain = Graph(3)
    plain.load_state_dict(weights)
    assert gap(dense(plain.state_dict()), dense(one.state_dict())) == 0.0


def test_a_damaged_one_is_refused():
    parts = dict(tensor_file.split_sparse({"edges": adjacency()}))
    parts["edges.coo_indices"] = parts["edges.coo_indices"] + 6
    with pytest.raises(ValueError, match="'edges' is no sparse tensor"):
        tensor_file.join_sparse(parts)


def test_a_late_node_is_told_of_it():
    leader, guest = Graph(), Graph(7)
    with join(leader) as pace:
        pace.step(BATCH)
        message = bytearray(
            b"".join(
                state_transfer.Message(
                    {**state_transfer.full_state(pace.run), **state_transfer.small_state(pace.run)}
                ).parts()
            )
        )
        said, want = state_transfer.read(message), dense(leader.state_dict())
        assert state_transfer.parts(pace.run) == [[]]
    with join(guest) as pace:
        state_transfer.load(pace.run, said)
        state_transfer.adopt(pace.run, said, 0)
        assert gap(dense(guest.state_dict()), want) == 0.0
        assert torch.equal(guest.aside.to_dense(), leader.aside.to_dense())


@pytest.mark.dear
def test_processes_on_two_nodes(tmp_path):
    body = (
        "import test_sparse_buffers as sparse",
        "edges = sparse.Graph(pace.world.rank)",
        "optimizer = torch.optim.SGD(edges.parameters(), 0.1)",
        "x, y = sparse.BATCH",
        "with paceline.join(edges, optimizer, torch.nn.functional.cross_entropy, batch_size=8) as other:",
        "    own = slice(2 * pace.world.rank, 2 * pace.world.rank + 2)",
        "    for _ in range(3):",
        "        other.step((x[own], y[own]))",
        f"    other.export({str(tmp_path / 'it.safetensors')!r})",
        f"torch.save(sparse.dense(edges.state_dict()), f'{tmp_path}/{{pace.world.rank}}.pt')",
    )
    launch(str(small(tmp_path, *body)), engine="processes:2", num_nodes=2)
    plain = Graph(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    want = dense(plain.state_dict())
    for rank in range(4):
        assert gap(torch.load(tmp_path / f"{rank}.pt", weights_only=True), want) < 1e-6
    assert gap(dense(export.load(tmp_path / "it.safetensors")[0]), want) < 1e-6


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: adjacency().to_sparse_csr(), r"buffer 'edges' is torch\.sparse_csr: make it dense"),
        (lambda: nn.Parameter(adjacency()), r"parameter 'edges' is torch\.sparse_coo: make it dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"buffer 'edges' is quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"buffer 'edges' is nested"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's own, of such tensors
def test_other_layouts_are_refused_by_name(build, said):
    model = nn.Module()
    model.layer, it = nn.Linear(2, 2), build()
    (model.register_parameter if isinstance(it, nn.Parameter) else model.register_buffer)("edges", it)
    with pytest.raises(ValueError, match=f"^join: .*{said}"):
        join(model)
