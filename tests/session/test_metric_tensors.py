"""`pace.metric` has the tensors of a step's metric, such as a confusion matrix, of all processes.

Story: those of each step were dropped, and `pace.metric` was None where the metric had nothing else.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import ranks
from launching import launch
from nodes import OPTIMIZERS, OUT, Rank, Whole, build, rows
from paceline.data.load_balance import Limits
from paceline.elastic import assignment
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.exchange import allreduce
from paceline.exchange.flow import metric_tensors
from paceline.exchange.flow.control import Control
from paceline.exchange.flow.metric_tensors import MetricTensors
from paceline.link import memory

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3


def confusion(output, target):
    num = output.shape[1]
    return torch.bincount(target * num + output.argmax(1), minlength=num * num).view(num, num)


METRICS = {
    "alone": lambda output, target: (confusion(output, target), None),
    "named": lambda output, target: {
        "hits": (output.argmax(1) == target).sum(),
        "matrix": (confusion(output, target), None),
        "total": (output.double().sum(0), None),
    },
}


@pytest.mark.parametrize("engine", ["sequential", "replicas:2", "pipeline:2,micros=2,cut=1", "reproducible:4"])
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_they_are_those_of_the_steps_forward_pass(engine, kind, accumulate):
    if accumulate > 1 and engine.startswith("pipeline"):
        pytest.skip("it has micro-batches of its own")
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    how = {"engine": engine, "accumulate": accumulate, "metric": METRICS[kind]}
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=6, **how) as pace:
        for start in (0, 6):
            x, y = X[start : start + 6], Y[start : start + 6]
            with torch.no_grad():
                output = model(x)
            pace.step((x, y))
            found = pace.metric if kind == "named" else {"matrix": pace.metric}
            assert torch.equal(found["matrix"], confusion(output, y))
            if kind == "named":
                assert found.keys() == {"hits", "matrix", "total"}
                assert found["hits"] == pytest.approx(float((output.argmax(1) == y).double().mean()))
                torch.testing.assert_close(found["total"], output.double().sum(0), rtol=1e-5, atol=1e-5)


def test_a_metrics_own_tensor_may_change_after_the_step():
    """It is copied: some metrics add into one tensor."""
    model, state = nn.Linear(3, 3), torch.zeros(3, 3, dtype=torch.int64)
    how = {"engine": "sequential", "metric": lambda output, target: (state.add_(confusion(output, target)), None)}
    with paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batch_size=6, **how) as pace:
        pace.step((X[:6], Y[:6]))
        state += 100
        assert pace.metric.sum() == 6


def test_shapes_that_differ_are_refused():
    model = nn.Linear(3, 3)
    how = {"engine": "sequential", "accumulate": 2, "metric": lambda output, target: (target, None)}
    with paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batch_size=5, **how) as pace:
        with pytest.raises(ValueError, match=r"\(tensor, None\) of shape \(3,\) after one of \(2,\).*return one shape"):
            pace.step((X[:5], Y[:5]))
        pace.engine.metric = None
        pace.step((X[:5], Y[:5]))
        assert pace.metric is None


def ranked(link, metric, **options):
    rank = Rank(link, build(), OPTIMIZERS["sgd"], **options)
    rank.engine.metric = metric
    rank.run.observers.insert(1, MetricTensors(rank.engine, rank.run.control, rank.run.activity))
    return rank, rank.run.observers[1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_several_nodes_they_are_added_up_also_where_one_has_no_samples(size):
    data = [rows(24, 0), rows(2, 1), rows(24, 2)]

    def work(link):
        rank, tensors = ranked(link, METRICS["named"])
        found = []
        for batch in data:
            rank.step(Whole(batch))
            found.append(tensors.sums["matrix"])
        rank.engine.metric = None
        rank.step(Whole(data[0]))
        assert tensors.sums == {}
        return found

    for found in ranks.run(size, work):
        for matrix, (_, y) in zip(found, data, strict=True):
            assert torch.equal(matrix.sum(1), torch.bincount(y, minlength=OUT).cpu())


def test_a_metric_without_tensors_costs_no_message(monkeypatch):
    monkeypatch.setattr(metric_tensors.MetricTensors, "_gather", lambda self: pytest.fail("a message"))

    def work(link):
        rank, _ = ranked(link, lambda output, target: (output.argmax(1) == target).sum())
        rank.step(Whole(rows(24, 0)))

    ranks.run(2, work)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_where_a_node_dies_after_the_vote_the_others_have_none_of_that_step_and_go_on(victim):
    def work(link):
        exchange, members = allreduce.Exchange(), memory.Members(link)
        control = FaultTolerantControl(Control(members), [exchange.rebuild])
        rank, tensors = ranked(link, METRICS["alone"], exchange=exchange, members=members, control=control)
        limits = [Limits((1,) * 3, (24,) * 3)]

        def regrouped(change):
            rank.run.assignment, _, limits[0] = assignment.regroup(rank.run.assignment, None, 24, limits[0], change)

        control.rows = lambda: rank.run.assignment.rows_per_node(24)[rank.run.assignment.node]
        control.on_view_change = regrouped
        own, found = tensors._gather, []

        def dies():
            if len(found) == 1 and link.rank == victim:
                link.hub.kill(link.rank)
                raise Killed
            own()

        tensors._gather = dies
        try:
            for seed in range(3):
                rank.step(Whole(rows(24, seed)))
                found.append(tensors.sums)
                if seed == 1:
                    assert rank.engine.hint == metric_tensors.LEFT_OUT
            return [int(each[""].sum()) if each else None for each in found]
        except Killed:
            return None
        finally:
            exchange.close()

    results = ranks.run(3, work)
    assert results.pop(victim) is None
    assert results == [[24, None, 24]] * 2


@pytest.mark.parametrize(("num_nodes", "exchange"), [(1, "allreduce"), (2, "allreduce"), (2, "local_sgd:2")])
def test_of_several_processes_of_a_node_they_are_added_up(tmp_path, num_nodes, exchange):
    """Of nodes that average later, each has its own processes' sums."""
    launch("metric_tensors.py", exchange, tmp_path, engine="processes:2", num_nodes=num_nodes)
    for rank in range(2 * num_nodes):
        found = json.loads((tmp_path / str(rank)).read_text())
        whole = exchange == "allreduce"
        assert [sum(each) for each in found[:4]] == [6 if whole else 3] * 4
        assert found[0] == [2, 2, 2] if whole else max(found[0]) <= 2
        assert sum(found[4]) == (1 if whole or rank < 2 else 0)
