"""What loops written for torch do with a batch and a handle works, or is told what to write."""

from __future__ import annotations

import copy
import json
import math
import numbers
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from launching import launch
from paceline.exchange.flow import gather
from paceline.report import record
from paceline.report.page.page import write
from paceline.step.like_torch import INSTEAD, UnreadLoss

X, Y = torch.randn(10, 3, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 2


def joined(**options):
    torch.manual_seed(2)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, paceline.join(model, optimizer, F.cross_entropy, batch_size=4, engine="sequential", **options)


def test_the_loss_of_a_step_is_a_number_that_is_read_as_a_tensor_is(tmp_path):
    """Story: it could be saved, and torch.load, which accepts no class of ours, refused the file."""
    model, pace = joined()
    with pace:
        loss = pace.step((X[:4], Y[:4]))
        pace.backward(F.cross_entropy(model(X[:4]), Y[:4]), rows=4)
        assert pace.update().item() < loss
    assert isinstance(loss, float)
    assert loss.item() == loss.detach().cpu().item() == float(loss) == copy.deepcopy(loss)
    assert f"{loss:.3f} {loss}" == f"{float(loss):.3f} {float(loss)}"
    assert json.loads(json.dumps([loss])) == [loss]
    with pytest.raises(RuntimeError, match=r"leave loss\.backward\(\) and optimizer\.step\(\) out.*pace\.rows"):
        loss.backward()
    torch.save({"losses": [loss]}, tmp_path / "losses.pt")
    assert torch.load(tmp_path / "losses.pt", weights_only=True) == {"losses": [loss]}


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]
UNARY = [abs, operator.neg, operator.pos, bool, float, int, str, repr, round, math.floor, math.ceil, math.trunc, hash]


def test_a_loss_that_is_not_read_is_a_number():
    times = []
    loss, value = UnreadLoss(lambda: times.append(1) or 1.25), 1.25
    assert loss.detach() is loss
    assert not times
    assert loss.item() == value
    assert times == [1]
    for name in BINARY:
        operation = getattr(operator, name)
        assert operation(loss, 2.0) == operation(value, 2.0), name
        assert operation(2.0, loss) == operation(2.0, value), name
        assert operation(loss, loss) == operation(value, value), name
    assert [each(loss) for each in UNARY] == [each(value) for each in UNARY]
    assert f"{loss:.1f} {loss}" == "1.2 1.25"
    assert round(loss, 1) == 1.2
    assert divmod(loss, 1) == (1.0, 0.25)
    assert sum([loss, loss]) == 2.5
    assert max(loss, 2) == 2
    assert math.isfinite(loss)
    assert isinstance(loss, numbers.Real)
    assert copy.deepcopy(loss) == value
    assert loss.cpu() == value
    assert (torch.ones(2) * loss + loss).tolist() == (loss + torch.ones(2) * loss).tolist() == [2.5, 2.5]
    assert torch.zeros(1).add_(torch.ones(1), alpha=loss).item() == value
    assert times == [1]
    with pytest.raises(RuntimeError, match=r"leave loss\.backward\(\)"):
        loss.backward()


METRICS = {
    "one": lambda output, target: (output.argmax(1) == target).sum(),
    "weighted": lambda output, target: (2.0 * (output.argmax(1) == target).sum(), target.sum() + 1),
    "named": lambda output, target: {
        "hits": (output.argmax(1) == target).sum(),
        "ones": (target.sum(), len(target)),
        "classes": (torch.bincount(target, minlength=2), None),
    },
}


@pytest.mark.parametrize("engine", ["sequential", "replicas:2", "pipeline:1"])
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("loss", ["one", "named"])
def test_a_steps_own_metric_is_that_of_its_forward_pass(tmp_path, kind, loss, engine):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = (
        F.cross_entropy
        if loss == "one"
        else lambda output, y: {"a": F.cross_entropy(output, y), "b": 0 * output.mean()}
    )
    how = {"metric": METRICS[kind], "batch_size": 4, "engine": engine, "folder": tmp_path}
    with paceline.join(model, optimizer, losses, **how) as pace:
        assert pace.metric is None
        for start in (0, 4):
            x, y = X[start : start + 4], Y[start : start + 4]
            hits, ones = float((model(x).argmax(1) == y).sum()), float(y.sum())
            pace.step((x, y))
            want = {"one": hits / 4, "weighted": 2 * hits / (ones + (2 if engine == "replicas:2" else 1))}
            want["named"] = {"hits": hits / 4, "ones": ones / 4}
            found = pace.metric
            if kind == "named":
                assert torch.equal(found.pop("classes"), torch.bincount(y, minlength=2))
            assert found == pytest.approx(want[kind])
    steps = [event for event in record.read(tmp_path) if event["event"] == "step"]
    names = {"named": ("metric/hits", "metric/ones")}.get(kind, ("metric",))
    assert all(name in steps[-1] for name in names)


def test_of_more_values_than_a_step_adds_up_evaluations_alone_have_any(capsys):
    _, pace = joined(metric=lambda output, target: {str(i): target.sum() for i in range(17)})
    with pace:
        pace.step((X[:4], Y[:4]))
        assert pace.metric is None
        assert len(pace.evaluate(TensorDataset(X, Y))) == 17
    assert "the metric has 17 values and the loss 0 parts" in capsys.readouterr().err


def test_of_values_by_other_names_on_other_replicas_there_are_none(capsys):
    """Story: sums were added up by their places, and those of one class to those of another."""

    def each_class(output, target):
        return {f"class {c}": ((output.argmax(1) == c).sum(), len(target)) for c in set(target.tolist())}

    _, pace = joined(metric=each_class)
    x, y = X[:4], torch.tensor([0, 0, 1, 1])
    with pace:
        pace.step((x, y))
        assert pace.metric.keys() == {"class 0", "class 1"}
        pace.step((x[:2], y[:2]))
        assert pace.metric.keys() == {"class 0"}
    torch.manual_seed(2)
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, F.cross_entropy, batch_size=4, engine="replicas:2", metric=each_class) as pace:
        pace.step((x, y))
        assert pace.metric is None
    assert "the metric returned other names on other processes, so pace.metric has none" in capsys.readouterr().err


def test_a_batch_is_unpacked_to_this_processs_samples():
    """A loop of one's own over unpacked batches gives the weights of plain PyTorch."""
    model, pace = joined()
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pace:
        for x, y in pace.batches(TensorDataset(X, Y), shuffle=False):
            pace.backward(F.cross_entropy(model(x), y))
            pace.update()
    for at in range(0, 10, 4):
        optimizer.zero_grad()
        F.cross_entropy(plain(X[at : at + 4]), Y[at : at + 4]).backward()
        optimizer.step()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-6)


def test_who_has_no_samples_is_told_what_to_write():
    _, pace = joined()
    with pace:
        batch = next(iter(pace.batches(TensorDataset(X, Y))))
        batch.unpack = lambda batch: None
        with pytest.raises(ValueError, match=r"no samples of the batch \(4 in all\).*rows = pace\.rows\(batch\)"):
            _x, _y = batch


@pytest.mark.parametrize("name", INSTEAD)
def test_names_of_other_libraries_are_told_what_to_write(name):
    _, pace = joined()
    with pace, pytest.raises(AttributeError, match="has no attribute") as raised:
        getattr(pace, name)
    assert INSTEAD[name] in str(raised.value)


def test_a_name_that_is_nearly_right_is_told():
    _, pace = joined()
    with pace:
        with pytest.raises(AttributeError, match="did you mean 'evaluate'"):
            pace.evaluat(None)
        with pytest.raises(AttributeError, match=r"has no attribute 'zzzzzz'$"):
            pace.zzzzzz  # noqa: B018
        assert not hasattr(pace, "zzzzzz")


def test_the_package_lists_what_it_has():
    assert dir(paceline) == sorted(paceline.__all__)
    assert all(hasattr(paceline, name) for name in dir(paceline))


def test_numbers_of_ones_own_are_in_the_record_and_on_the_page(tmp_path):
    _, pace = joined(folder=tmp_path / "run")
    with pace:
        for step in range(3):
            loss = pace.step((X[:4], Y[:4]))
            pace.log("twice <the> loss", torch.tensor(2 * loss))
            pace.log("step {}", step)
        pace.log("no number", math.nan)
        with pytest.raises(ValueError, match=r"log\('both', ...\) takes one number, got tensor"):
            pace.log("both", torch.ones(2))
    found = [each for each in record.read(tmp_path / "run") if each["event"] == "log"]
    assert [(each["step"], each["value"]) for each in found if each["name"] == "step {}"] == [(0, 0), (1, 1), (2, 2)]
    write([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "twice &lt;the&gt; loss" in page
    assert "twice <the>" not in page
    assert ">step {}<" in page


class Alone:
    """Of one process."""

    def all_gather(self, *messages):
        return list(messages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 2)])
def test_what_is_gathered_has_its_type_and_shape(dtype, shape):
    tensor = torch.arange(math.prod(shape) or 1)[: math.prod(shape)].view(shape).to(dtype)
    found = gather.gather(Alone(), tensor)
    assert found.dtype == dtype
    assert torch.equal(found, tensor.reshape(1) if shape == () else tensor)
    assert torch.equal(gather.all_reduce(Alone(), tensor, "max"), tensor)


@pytest.mark.parametrize(("engine", "num_nodes"), [("sequential", 2), ("processes:2", 1)])
def test_every_process_has_what_all_have(tmp_path, engine, num_nodes):
    """Process r has r + 1 rows of r: the sum, the largest and the least are known."""
    launch("gathered.py", tmp_path, engine=engine, num_nodes=num_nodes)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(found["rows"], torch.tensor([[0, 0], [1, 1], [1, 1]]))
        assert found["rank"].tolist() == [0, 1]
        assert [found[name].tolist() for name in ("sum", "max", "min")] == [[1, 3], [1, 2], [0, 1]]
        assert found["sums"].tolist() == [3, 4]  # of seven samples, divided among both
        assert "int64 (2, 2), float32 (2, 2); give the same type" in found["types"]
        assert "shapes (1,), (2,); give the same in every process" in found["shapes"]


def test_an_operation_that_is_none_is_told():
    with pytest.raises(ValueError, match=r"all_reduce\(\) can compute sum, max, min, got 'mean'"):
        gather.all_reduce(Alone(), torch.ones(1), "mean")


def confusion(output, target):
    """Of two classes, beside a mean."""
    matrix = torch.zeros(2, 2, dtype=torch.int64)
    for right, found in zip(target.tolist(), output.argmax(1).tolist(), strict=True):
        matrix[right, found] += 1
    return {"matrix": (matrix, None), "right": (output.argmax(1) == target).sum()}


@pytest.mark.parametrize("rows", [1, 3, 4, 10])
def test_a_confusion_matrix_is_added_up(rows):
    model, pace = joined()
    with pace:
        found = pace.evaluate(TensorDataset(X, Y), confusion, rows=rows)
        alone = pace.evaluate(TensorDataset(X, Y), lambda output, y: confusion(output, y)["matrix"], rows=rows)
    whole = confusion(model(X), Y)
    assert torch.equal(found["matrix"], whole["matrix"][0])
    assert torch.equal(alone, whole["matrix"][0])
    assert found["right"] == float(whole["right"]) / 10


def test_sums_of_unlike_shapes_are_refused():
    _, pace = joined()
    with pace, pytest.raises(ValueError, match=r"\(tensor, None\) of shape \(2,\) after one of \(4,\); .* one shape"):
        pace.evaluate(TensorDataset(X, Y), lambda output, y: (y, None), rows=4)


class Average:
    """Averaged weights of one's own."""

    def __init__(self, value=0.0):
        self.value = torch.tensor(value) if isinstance(value, float) else value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"].clone()


def trained_with_what_is_kept(folder, stops, restores=False, late=False):
    """Three epochs, or until one that is saved."""
    model, pace = joined(folder=folder)
    optimizer = pace.job.optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    average = Average()
    with pace:
        if not late:
            pace.keep(schedule=schedule, average=average, plateau=plateau)
        assert not restores or pace.restore()
        if late:
            pace.keep(schedule=schedule, average=average, plateau=plateau)
        for batch in pace.batches(TensorDataset(X, Y), epochs=3):
            average.value += pace.step(batch)
            if batch.ends_epoch:
                schedule.step()
                plateau.step(1.0)
                if pace.epoch == stops:
                    pace.save()
                    break
        return schedule.state_dict(), plateau.state_dict(), average.value, model.weight.detach().clone()


@pytest.mark.parametrize("late", [False, True])
def test_schedulers_of_epochs_and_ones_own_objects_are_saved_and_restored(tmp_path, late):
    whole = trained_with_what_is_kept(tmp_path / "whole", 3)
    trained_with_what_is_kept(tmp_path / "parts", 2)
    resumed = trained_with_what_is_kept(tmp_path / "parts", 3, restores=True, late=late)
    assert resumed[:2] == whole[:2]
    assert torch.equal(resumed[2], whole[2])
    assert torch.equal(resumed[3], whole[3])


def test_what_cannot_be_kept_is_an_error(tmp_path, capsys):
    _, pace = joined(folder=tmp_path)
    with pace:
        with pytest.raises(ValueError, match=r"keep\(it=\.\.\.\) takes an object with state_dict\(\) .* got a float"):
            pace.keep(it=1.0)
        with pytest.raises(ValueError, match="got the class Average"):
            pace.keep(it=Average)
        with pytest.raises(ValueError, match=r"the state of keep\(bad=\.\.\.\)\['value'\] is a builtins\.set"):
            pace.keep(bad=Average({1}))
        pace.keep(it=(first := Average()))
        pace.keep(it=first)
        with pytest.raises(ValueError, match="was called before with another object"):
            pace.keep(it=Average())
        pace.save()
        pace.keep(more=Average(7.0))
        assert pace.restore()
        assert "has no state of more, which stay as they are" in capsys.readouterr().err
        first.load_state_dict = lambda state: state["other"]
        with pytest.raises(ValueError, match=r"the state that was saved of keep\(it=\.\.\.\) does not fit a Average"):
            pace.restore()
