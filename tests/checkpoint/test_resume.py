"""A resumed run equals the uninterrupted run bit for bit; another job's checkpoint is rejected with the reason."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import resuming
from launching import launch

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", resuming.KINDS)
def test_from_every_step_of_one_process(name, tmp_path):
    assert resuming.check(resuming.KINDS[name], tmp_path, "sequential") == []


@pytest.mark.dear("micro")
@pytest.mark.parametrize("name", ["micro-batches", "fp16"])
def test_from_every_step_of_two_threads(name, tmp_path):
    assert resuming.check(resuming.KINDS[name], tmp_path, "threads:2") == []


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    launch("resumed.py", folder, *resuming.KINDS, engine="processes:2")
    return json.loads((folder / "faults.json").read_text())


@pytest.mark.dear
@pytest.mark.parametrize("name", resuming.KINDS)
def test_from_every_step_of_two_processes(two_processes, name):
    assert two_processes[name] == []


CUT = "pipeline:2,micros=2,cut=6"


def test_from_every_step_of_a_pipeline(tmp_path):
    assert resuming.check(resuming.KINDS["momentum"], tmp_path, CUT) == []


@pytest.mark.dear
@pytest.mark.parametrize(
    ("engine", "num_nodes", "kinds"),
    [("sequential", 2, [*resuming.METHODS]), (f"processes:2/{CUT}", 1, ["momentum"])],
    ids=["nodes", "hybrid"],
)
def test_from_every_step_of_every_method(tmp_path, engine, num_nodes, kinds):
    launch("resumed.py", tmp_path, *kinds, engine=engine, num_nodes=num_nodes)
    faults = json.loads((tmp_path / "faults.json").read_text())
    assert {name: faults[name] for name in kinds} == {name: [] for name in kinds}


@pytest.mark.dear
def test_only_what_rank_0_sees_is_gone_on_from_by_all(two_processes):
    error, went_on = two_processes["apart"]
    assert "found different checkpoints" in error
    assert "of steps [None, 0]" in error
    assert went_on


def test_the_runs_are_not_all_alike(tmp_path):
    """Checks that the invariant is not trivial: seeds matter, and steps were skipped for too large a loss scale."""
    for name in ("dropout", "randomness in the dataset"):
        kind = resuming.KINDS[name]
        assert kind.run(tmp_path, "sequential")[0] != kind.run(tmp_path, "sequential", seed=2)[0]
    _, state = resuming.KINDS["fp16"].run(tmp_path, "sequential")
    assert 1 < state[-1][0] < 2.0**23


def joined(folder=None, model=None, optimizer=torch.optim.SGD, **options):
    model = model or nn.Linear(4, 3)
    options = {"batch_size": 8, "seed": 0, **options}
    return paceline.join(
        model, optimizer(model.parameters(), lr=0.1), F.cross_entropy, folder=folder, engine="sequential", **options
    )


def test_an_empty_folder_has_nothing_to_go_on_from(tmp_path):
    with joined(tmp_path / "new") as pace:
        assert pace.restore() is False
        assert pace.restore(tmp_path / "other") is False
        assert (pace.epoch, pace.next_step, pace.num_steps) == (0, 0, 0)


@pytest.fixture
def kept(tmp_path):
    with joined(tmp_path) as pace:
        for step in range(3):
            pace.step((torch.full((8, 4), float(step)), torch.arange(8) % 3))
            pace.save()
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"was made with seed 0 \(here 1\); give the same"),
        ({"batch_size": 16}, r"was made with batch_size 8 \(here 16\)"),
        ({"optimizer": torch.optim.Adam}, r"was made with optimizer SGD \(here Adam\)"),
        ({"seed": 2, "batch_size": 4}, r"seed 0 \(here 2\), batch_size 8 \(here 4\)"),
        ({"model": nn.Linear(4, 5)}, r"is of another model: .*weight.*\[3, 4\].*\[5, 4\].*build the model"),
        ({"model": nn.Linear(4, 3, bias=False)}, "is of another model: .*bias"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_name(kept, changed, message):
    with joined(kept, **changed) as pace:
        before = [tensor.clone() for tensor in pace.job.model.state_dict().values()]
        with pytest.raises(ValueError, match=message):
            pace.restore()
        if "model" not in changed:
            assert all(torch.equal(a, b) for a, b in zip(before, pace.job.model.state_dict().values(), strict=True))


def test_other_groups_are_refused(kept):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    pace = paceline.join(model, optimizer, F.cross_entropy, batch_size=8)
    with pytest.raises(ValueError, match=r"is of another optimizer: .*parameter group"):
        pace.restore(kept)
    pace.close()


def test_a_damaged_newest_is_passed_over_and_said_to_be(kept, capsys):
    newest = kept / "checkpoint-00000003" / "weights.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    with joined(kept) as pace:
        assert pace.restore()
        assert pace.num_steps == 2
    output = capsys.readouterr().err
    assert "paceline: skipped" in output
    assert "checkpoint-00000003" in output
    assert output.endswith("checkpoint-00000002\n")


def test_the_one_gone_on_from_stays_until_two_newer_ones_are_whole(kept):
    """The newest checkpoint has a flipped bit, which file sizes do not show, but restoring detects."""
    newest = kept / "checkpoint-00000003" / "weights.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)

    def there():
        return sorted(int(path.name[-2:]) for path in kept.glob("checkpoint-*"))

    with joined(kept) as pace:
        assert pace.restore()
        assert pace.num_steps == 2
        batch = torch.ones(8, 4), torch.arange(8) % 3
        pace.step(batch), pace.step(batch)
        for expected in ([2, 3, 4], [4, 5], [5, 6]):
            pace.save(wait=False)
            pace.step(batch)
            assert pace.restore(kept / f"checkpoint-{expected[-1]:08d}")
            assert there() == expected
            pace.step(batch)


def test_one_checkpoint_of_several_can_be_chosen(kept):
    with joined(kept) as pace:
        assert pace.restore(kept / "checkpoint-00000002")
        assert pace.num_steps == 2
        with pytest.raises(ValueError, match="there is no checkpoint"):
            pace.restore(kept / "checkpoint-00000009")


def test_weights_alone_go_into_a_plain_model(kept):
    from safetensors.torch import load_file

    nn.Linear(4, 3).load_state_dict(load_file(kept / "checkpoint-00000003" / "weights.safetensors"))


def test_the_choice_between_dense_and_factors_is_kept(tmp_path):
    """Sequences have more rows than the initial estimate: a resumed run must not estimate again."""

    def train(stop, folder=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x, y = torch.randn(32, 64, 128), (torch.arange(32 * 64) % 3).view(32, 64)

        def loss(output, target):
            return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

        data = torch.utils.data.TensorDataset(x, y)
        with paceline.join(model, optimizer, loss, batch_size=8, engine="sequential") as pace:
            if folder:
                pace.restore(folder)
            for batch in pace.batches(data, epochs=2):
                pace.step(batch)
                if pace.num_steps == stop:
                    pace.save(tmp_path)
                    break
        return model.state_dict()

    whole = train(8)
    train(1)
    resumed = train(8, tmp_path / "checkpoint-00000001")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.dear
def test_nodes_that_compute_in_unlike_rows_go_on_together(tmp_path):
    """Stories: the leader alone went on with the forms that had been found, and the others' messages did not fit; a
    buffer of complex numbers was a lost peer."""
    launch("apart.py", tmp_path, engine="", num_nodes=2)
    one, other = (torch.load(tmp_path / f"{node}.pt", weights_only=True) for node in range(2))
    assert one["forms"] == other["forms"]
    assert set(one["forms"]) == {"dense"}, "nothing was found, so nothing is tested"
    for name in ("half", "resumed", "whole"):
        for key, value in one[name].items():
            assert torch.allclose(value, other[name][key], rtol=1e-9, atol=1e-12), (name, key)
            assert torch.allclose(one["resumed"][key], one["whole"][key], rtol=1e-9, atol=1e-12)
    assert not torch.equal(one["half"]["first.weight"], one["whole"]["first.weight"])
    assert one["buffers"]["turns"][0] == one["buffers"]["wide"][0, 0] == 1j
    assert all(torch.equal(value, other["buffers"][key]) for key, value in one["buffers"].items())


@pytest.mark.parametrize(("first", "then"), [("local_sgd:2", "allreduce"), ("allreduce", "local_sgd:2")])
def test_a_run_may_go_on_with_another_exchange(tmp_path, first, then):
    """Story: what the one had noted was asked for by the names of the other."""
    batch = torch.ones(8, 4), torch.arange(8) % 3
    with joined(tmp_path, exchange=first) as pace:
        pace.step(batch)
        pace.save()
    with joined(tmp_path, exchange=then) as pace:
        assert pace.restore()
        assert pace.num_steps == 1
        pace.step(batch)
