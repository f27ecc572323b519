"""Synchronous batch norm gives the weights and running statistics of one process on the global batch."""

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import launching
import ranks
from device import DEVICE, waits_in_backward
from nodes import Rank, build, gap, reference, rows
from paceline.engine.compute.sync_batch_norm import SyncBatchNorm
from paceline.engine.node.in_step_reduce import InStepReduce
from paceline.engine.node.local_group import LocalGroup, LocalGroupError
from paceline.engine.replicas import Engine as Replicas
from paceline.errors import LinkError
from paceline.link.memory import world

HERE = Path(__file__).parents[1] / "support"
from norms import Normed, batches, optimizer  # noqa: E402

START = (
    "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[3:], sys.argv[1], int(sys.argv[2])))"
)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 7), (6, 5, 4, 3), (3, 5, 4, 3, 2)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_alone_it_is_batch_norm(shape, affine, layout):
    """Output, gradients of input and parameters, running statistics; far from zero mean."""
    if layout is torch.channels_last and len(shape) != 4:
        shape = (6, 5, 3, 4)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    torch.manual_seed(1)
    plain = kind(5, affine=affine).double()
    if affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    ours = copy.deepcopy(plain)
    SyncBatchNorm(ours).convert(lambda vector: vector)
    x = (torch.randn(shape, dtype=torch.float64) * 2 + 50).contiguous(
        memory_format=layout if len(shape) == 4 else torch.contiguous_format
    )
    dy = torch.randn(shape, dtype=torch.float64)
    results = []
    for layer in (plain, ours):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(dy)
        results.append([y.detach(), given.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_normalised_as_those_of_one_process(dtype):
    torch.manual_seed(1)
    plain = nn.BatchNorm1d(5).to(dtype)
    ours, x = copy.deepcopy(plain), torch.randn(8, 5).to(dtype)
    SyncBatchNorm(ours).convert(lambda vector: vector)
    for layer in (plain, ours):
        layer(x).square().sum().backward()
    with torch.no_grad():
        assert torch.allclose(plain(x).float(), ours(x).float(), atol=0.02)  # two units in the last place near 2
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(one.grad.float(), other.grad.float(), rtol=0.02, atol=0.05)


@pytest.fixture(scope="module")
def whole():
    """Plain PyTorch on the global batches: (weights and statistics, losses)."""
    return reference(build(Normed), batches(), optimizer)


@waits_in_backward
@pytest.mark.parametrize("size", [1, 2, 3])
def test_replicas_equal_one_process(size, whole):
    rank = Rank(world(1)[0], build(Normed), optimizer, engine=Replicas(size), batch_norm="sync")
    losses = rank.train(batches())
    rank.engine.close()
    assert losses == pytest.approx(whole[1], rel=1e-10)
    assert gap(rank.state(), whole[0]) < 1e-10
    assert int(rank.state()["norm.num_batches_tracked"]) == len(batches())


@waits_in_backward
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 0, 2), (0, 0, 1)])
@pytest.mark.parametrize("engine", [None, Replicas])
def test_nodes_equal_one_process(shares, engine, whole):
    """Unequal shares, and nodes that have no rows in any step or in the last one."""
    model = build(Normed)

    def work(link):
        mine = engine and engine(2)
        rank = Rank(link, model, optimizer, shares=shares, engine=mine, batch_norm="sync")
        losses = rank.train(batches())
        rank.exchange.close()
        rank.engine.close()
        return losses, rank.state()

    for losses, state in ranks.run(len(shares), work):
        assert losses == pytest.approx(whole[1], rel=1e-10)
        assert gap(state, whole[0]) < 1e-10


@waits_in_backward
def test_24_rows_here_and_8_there_are_32_in_one_process():
    data, model = [rows(32, seed) for seed in range(4)], build(Normed)
    want, want_losses = reference(model, data, optimizer)

    def work(link):
        rank = Rank(link, model, optimizer, shares=(24, 8), batch_norm="sync", batch=32)
        assert rank.run.assignment.rows_per_node(32) == (24, 8)
        losses = rank.train(data)
        rank.exchange.close()
        rank.engine.close()
        return losses, rank.state()

    for losses, state in ranks.run(2, work):
        assert losses == pytest.approx(want_losses, rel=1e-10)
        assert gap(state, want) < 1e-10


@pytest.mark.dear
@pytest.mark.parametrize(("engine", "num_nodes"), [("processes:3", 1), ("processes:2", 2)])
def test_processes_equal_one_process(engine, num_nodes, tmp_path, whole):
    command = [sys.executable, "-W", "error", str(HERE / "scripts" / "norms.py"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", START, engine, str(num_nodes), *command],
        env={**os.environ, "PYTHONPATH": launching.python_path()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for path in tmp_path.glob("*.pt"):
        rank = path.stem
        assert json.loads(path.with_suffix(".json").read_text()) == pytest.approx(whole[1], rel=1e-10)
        state = torch.load(path, weights_only=True)
        assert gap(state, whole[0]) < 1e-10, f"rank {rank}, whose rows are none in the last step but for two processes"


def test_what_was_converted_is_restored():
    model = build(Normed)
    names = list(model.state_dict())
    layers = SyncBatchNorm(model)
    layers.convert(lambda vector: vector)
    assert list(model.state_dict()) == names
    assert copy.deepcopy(model).norm.forward.__self__ is not model.norm
    layers.restore()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_outside_of_a_step_and_in_evaluation_nothing_is_added():
    model, everyone = build(Normed), InStepReduce()

    def never(vector):
        raise AssertionError("a sum outside of a step")

    SyncBatchNorm(model).convert(never, everyone.inside)
    model(rows(5, 0)[0])
    with everyone.step(True):
        model.norm.eval()
        model.norm(torch.randn(2, 8, 3, 3, dtype=torch.float64).to(DEVICE))


def test_too_few_values_over_everyone_are_refused():
    layer = nn.BatchNorm1d(3)
    SyncBatchNorm(layer).convert(lambda vector: vector)
    with pytest.raises(ValueError, match="more than 1 value per channel over all processes, got 1"):
        layer(torch.ones(1, 3))


def test_processes_in_different_layers_are_told():
    """Rank 1 takes the layers in another order."""

    def work(link):
        pair = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        everyone = InStepReduce(None, link)
        SyncBatchNorm(pair).convert(everyone.total, everyone.inside)
        with (
            everyone.step(True),
            pytest.raises(LocalGroupError, match=r"different batch-norm layers.*batch_norm='local'"),
        ):
            pair[link.rank](torch.randn(4, 3))

    ranks.run(2, work)


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_in_one_process_reaches_those_who_wait_for_its_rows(fails):
    name, heard = f"test-{os.getpid()}-norm-{fails}", {}

    def one(rank):
        local_group = LocalGroup(rank, 2, name)
        everyone = InStepReduce(local_group)
        try:
            with everyone.step(True):
                if rank == fails:
                    raise KeyError("a row that cannot be computed")
                everyone.total(torch.ones(3, dtype=torch.float64))
        except (LinkError, KeyError) as error:
            heard[rank] = error
        finally:
            local_group.close()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert isinstance(heard[fails], KeyError)
    assert "failed in the step: 'a row that cannot be computed'" in str(heard[1 - fails])


@waits_in_backward
def test_an_error_in_one_replica_ends_those_who_wait_for_its_rows():
    class Failing(Normed):
        def forward(self, x):
            if (x[:, 0] == 77.0).any():
                raise KeyError("a row that cannot be computed")
            return super().forward(x)

    rank = Rank(world(1)[0], build(Failing), optimizer, engine=Replicas(2), batch_norm="sync")
    x, y = rows(8, 1)
    bad = x.clone()
    bad[7, 0] = 77.0
    with pytest.raises(KeyError, match="cannot be computed"):
        rank.train([(bad, y)])
    rank.train([(x, y)])
    want, _ = reference(build(Failing), [(x, y)], optimizer)
    assert gap(rank.state(), want) < 1e-10
    rank.engine.close()


def test_a_process_whose_layer_sees_no_rows_adds_nothing():
    """A branch that no row of this process takes, but the layer is called: 6 rows of zeros and ones elsewhere."""
    layer, sums = nn.BatchNorm2d(3).double(), []

    def total(vector):
        sums.append(vector)
        elsewhere = [1.0, float(vector[1]), *([0.1, 6.0] if len(vector) == 10 else []), *[3.0] * 6]
        return vector + torch.tensor(elsewhere, dtype=torch.float64)

    SyncBatchNorm(layer).convert(total)
    x = torch.zeros(0, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert [vector[2:].tolist() for vector in sums] == [[0.1, *[0.0] * 7], [0.0] * 6]
    assert torch.allclose(layer.running_mean, torch.full((3,), 0.05, dtype=torch.float64))
    assert layer.weight.grad.tolist() == [0.0] * 3


def test_float32_and_bfloat16_rows():
    """Statistics in float32 at least, far from zero mean."""
    x = torch.randn(64, 3) + 100
    plain, ours = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    SyncBatchNorm(ours).convert(lambda vector: vector)
    assert torch.allclose(plain(x), ours(x), atol=2e-4)
    low = x.sub(100).bfloat16().requires_grad_()
    out = ours(low)
    out.float().square().sum().backward()
    assert out.dtype == low.grad.dtype == torch.bfloat16
    assert F.mse_loss(out.float(), plain(low.detach().float())) < 1e-4
