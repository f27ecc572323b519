"""A loop of one's own (several losses, two models, clipping by hand) is the plain loop that it stands for."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import own_loops
import paceline
from launching import launch
from nodes import gap


@pytest.fixture(scope="module", params=[("processes:2", 1), ("sequential", 2)], ids=["processes:2", "two nodes"])
def ran(request, tmp_path_factory):
    engine, num_nodes = request.param
    folder = tmp_path_factory.mktemp("ran")
    launch("own.py", folder, *own_loops.LOOPS, engine=engine, num_nodes=num_nodes)
    return folder


def same(name, weights, said, tolerance=1e-10):
    want, facts = own_loops.PLAIN[name]()
    assert said["losses"] == pytest.approx(facts["losses"], rel=1e-11)
    assert gap(weights, want) < tolerance
    if "norms" in facts:
        assert said["norms"] == pytest.approx(facts["norms"], rel=1e-11)


@pytest.mark.parametrize("name", own_loops.PLAIN)
@pytest.mark.parametrize("engine", ["sequential", "threads:2"])
def test_one_process(name, engine):
    same(name, *own_loops.LOOPS[name](engine))


@pytest.mark.dear("processes:2-several")
@pytest.mark.parametrize("name", own_loops.PLAIN)
def test_several_processes(ran, name):
    said = json.loads((ran / f"{name}.json").read_text())
    same(name, load_file(ran / f"{name}.safetensors"), said)


def test_a_layer_expected_as_factors_is_agreed_on_again_as_it_is(ran):
    said = json.loads((ran / "several.json").read_text())
    assert said["redone"] == [0]
    assert said["ends"] == [1, 0]


def test_without_a_clip_the_gradient_is_whole():
    weights, said = own_loops.several("sequential", clip=False)
    want, facts = own_loops.several_plain(clip=False)
    assert said["losses"] == pytest.approx(facts["losses"], rel=1e-12)
    assert gap(weights, want) < 1e-12
    assert all(norm > 0 for norm in said["norms"])


def judged(said, num_processes):
    """Every sample once; everyone the same means."""
    for count in (0, 1, 2, 7, 600):
        everyone = [eval(words, {"nan": float("nan")}) for words in said[str(count)]]
        assert len(everyone) == num_processes
        seen = sorted(i for _, part in everyone for i in part)
        assert seen == list(range(count))
        even = [i for i in range(count) if i % 2 == 0]
        for means, _ in everyone:
            if count:
                assert means["target"] == pytest.approx(sum(range(count)) / count, rel=1e-14)
                assert means["even"] == pytest.approx(sum(even) / len(even), rel=1e-14)
            else:
                assert means == {}
    assert said["plain"] == 3.0
    assert said["training"] == [True, False, True]
    assert said["once"].count("1") >= 1
    assert said["leader"] == ["True"] + ["False"] * (num_processes - 1)


def test_evaluation_counts_every_sample_once(ran):
    said = json.loads((ran / "evaluated.json").read_text())
    judged(said, 2)
    nodes = said["did"] == ["42", "42"]
    assert said["did"] == (["42", "42"] if nodes else ["42", "None"])
    assert said["once"] == (["1", "1"] if nodes else ["1", "0"])
    assert said["failed"][0].startswith("ZeroDivisionError")
    assert "ZeroDivisionError" in said["failed"][1]


def test_evaluation_on_one_process():
    _, said = own_loops.evaluated("sequential")
    judged(said, 1)


def joined(batch_size=8, **options):
    model = nn.Linear(4, 3)
    return model, paceline.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, batch_size=batch_size, **options
    )


def test_losses_over_different_rows_are_refused():
    model, pace = joined()
    x = torch.ones(8, 4)
    pace.backward(model(x).mean(), rows=8)
    with pytest.raises(ValueError, match="losses over 8 and over 3 in one step; all must count the same rows"):
        pace.backward(model(x).mean(), rows=3)
    pace.close()


def test_a_mean_over_unknown_rows_is_refused():
    model, pace = joined()
    with pytest.raises(ValueError, match=r"how many rows .*take them from pace.rows\(batch\), give rows=, or"):
        pace.backward(model(torch.ones(8, 4)).mean())
    pace.close()


@pytest.mark.parametrize("loss", [lambda out: out, lambda out: 1.0, lambda out: (out, 8)])
def test_what_is_no_number_is_refused(loss):
    model, pace = joined()
    with pytest.raises(ValueError, match=r"backward\(\) takes one number"):
        pace.backward(loss(model(torch.ones(8, 4))), rows=8)
    pace.close()


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_clip_must_be_a_norm(norm):
    _, pace = joined()
    with pytest.raises(ValueError, match=r"clip\(\) takes a norm > 0"):
        pace.clip(norm)
    pace.close()


def test_a_metric_of_another_shape_says_what_is_accepted():
    _, pace = joined()
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 3))
    with pytest.raises(ValueError, match=r"the metric returned a tensor of shape \(8, 3\), float32; return a sum"):
        pace.evaluate(data, lambda output, target: output - target)
    with pytest.raises(ValueError, match="needs a metric"):
        pace.evaluate(data)
    pace.close()


def test_a_loop_of_ones_own_has_no_norm_over_all():
    """Story: with rows of its own it was not refused, and each process normalised by its own rows."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=4, batch_norm="sync", engine="sequential") as pace:
        loss = F.cross_entropy(model(torch.randn(4, 4)), torch.zeros(4, dtype=torch.long))
        for call in (lambda: pace.backward(loss, rows=4), pace.update, lambda: pace.rows((torch.zeros(4, 4),))):
            with pytest.raises(ValueError, match=r"batch_norm='sync' works inside pace\.step alone"):
                call()
