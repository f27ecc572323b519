"""What counts in a step is its samples, whatever the shape of a batch, the loss, or who reads them."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

import launching
import paceline
import ranks
from device import DEVICE, of_cpus
from nodes import IN, OPTIMIZERS, OUT, Rank, build, gap, reference, rows
from paceline.data import images
from paceline.data.batches import batches
from paceline.data.sampler import Assignment
from paceline.elastic.consistency import compare_data, data_facts
from paceline.engine.compute.batch import samples

WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64, device=DEVICE)


def _ignoring(seed):
    x, y = rows(24, seed)
    y[: 5 + seed] = -100  # more of one rank's rows than of another's
    return x, y


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss", "make"),
    [
        (F.cross_entropy, _ignoring),
        (nn.CrossEntropyLoss(weight=WEIGHTS), lambda seed: rows(24, seed)),
        (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.1), lambda seed: rows(24, seed)),
        (lambda output, target: nn.NLLLoss(weight=WEIGHTS)(output.log_softmax(1), target), lambda seed: rows(24, seed)),
    ],
    ids=["ignored", "weighted", "weighted, ignored and smoothed", "a function of its own"],
)
def test_means_over_other_than_rows_are_those_of_one_process(loss, make, size):
    """Story: with weights of classes, two processes trained another model than one."""
    data = [make(seed) for seed in range(3)]
    model = build()
    want, want_losses = reference(model, data, OPTIMIZERS["sgd"], loss=loss)

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=loss)
        return rank.train(data), rank.state()

    for losses, state in ranks.run(size, work):
        assert gap(state, want) < 1e-12
        assert losses == pytest.approx(want_losses, rel=1e-12)


class Pixels(nn.Module):
    """Says a class of each of four places of a sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(IN, 4 * OUT)

    def forward(self, x):
        return self.layer(x).view(len(x), OUT, 4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_places_of_a_sample_that_do_not_count_are_not_counted(size):
    """Story: a process with an ignored place counted places, one without any counted rows."""
    data = []
    for seed in range(3):
        x, wanted = rows(24, seed)[0], torch.randint(0, OUT, (24, 4), generator=torch.Generator().manual_seed(seed))
        wanted[0, : seed + 1] = 255
        data.append((x, wanted))
    model, loss = build(Pixels), nn.CrossEntropyLoss(ignore_index=255)
    want, want_losses = reference(model, data, OPTIMIZERS["sgd"], loss=loss)

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=loss)
        return rank.train(data), rank.state()

    for losses, state in ranks.run(size, work):
        assert losses == pytest.approx(want_losses, rel=1e-11)
        assert gap(state, want) < 1e-11


def _some(items):
    """A collate_fn that leaves out what cannot be read."""
    return torch.utils.data.default_collate([item for item in items if item[1] % 5])


class Broken(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.randn(10, generator=torch.Generator().manual_seed(index)), torch.tensor(index)


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}])
def test_samples_that_a_collate_fn_leaves_out_do_not_count(how):
    """Ten are read, eight come, and each has ten features."""
    model, loader = nn.Linear(10, 2), DataLoader(Broken(), 10, collate_fn=_some)

    def metric(output, target):
        return (target >= 0).sum()

    def loss(output, target):
        return F.cross_entropy(output, target % 2)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with paceline.join(model, optimizer, loss, batch_size=10, engine="sequential", metric=metric, **how) as pace:
        counted = [pace.agreement.vote.weight for batch in pace.batches(loader) if pace.step(batch) < 1e9]
        assert counted == [8.0] * 4
        assert pace.evaluate(loader) == 1.0


@pytest.mark.parametrize(
    ("batch", "dealt", "many"),
    [
        ((torch.ones(5, 8, 3), torch.ones(8)), 8, 8),  # time first
        ((torch.ones(5, 8), torch.ones(5, 8)), 8, 8),
        ((torch.ones(57, 3), torch.ones(2, 99), torch.ones(8)), 8, 8),  # a graph
        (([torch.ones(3, 9, 9)] * 8, [{"boxes": torch.ones(2, 4)}] * 8), 8, 8),
        ((torch.ones(8, 10), torch.ones(8)), 10, 8),  # two were left out
        ((torch.ones(8, 10), torch.ones(8)), None, 8),
        ({"x": torch.ones(8, 10), "y": torch.ones(8)}, 8, 8),
    ],
)
def test_how_many_samples_a_batch_has(batch, dealt, many):
    assert samples(batch, dealt) == many


def test_a_loss_that_is_a_sum_is_refused():
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="a step is a mean over the global batch"):
        paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(reduction="sum"), batch_size=8)


class Sentences(Dataset):
    """Collated with time first."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        dice = torch.Generator().manual_seed(index)
        return torch.randn(5, 4, generator=dice), torch.tensor(index % 2)


def _time_first(items):
    return torch.stack([x for x, _ in items], 1), torch.stack([y for _, y in items])


class OverTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNN(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0][-1])


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"engine": "replicas:2"}])
def test_rows_that_do_not_come_first_count_and_are_not_cut_elsewhere(how):
    """Story: sequences were cut in time, and means divided by steps of time."""
    torch.manual_seed(5)
    model = OverTime()
    plain, loader = copy.deepcopy(model), DataLoader(Sentences(), 8, collate_fn=_time_first)
    words = {"batch_size": 8, "engine": "sequential", "metric": lambda o, t: (o.argmax(1) == t).sum(), **how}
    with paceline.join(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, **words) as pace:
        if how:
            with pytest.raises(ValueError, match=r"a batch of 8 samples has 5 rows in its first tensor"):
                pace.step(next(iter(pace.batches(loader))))
            return
        losses = [pace.step(batch) for batch in pace.batches(loader)]
        right = pace.evaluate(loader)
    optimizer, wanted = torch.optim.SGD(plain.parameters(), 0.1), []
    for x, y in loader:
        value = F.cross_entropy(plain(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        wanted.append(float(value.detach()))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert right == pytest.approx(sum((plain(x).argmax(1) == y).sum().item() for x, y in loader) / 24)


def _joined(model):
    return paceline.join(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batch_size=8, engine="sequential"
    )


def test_a_loop_of_ones_own_that_forgets_a_part_is_told():
    model, data = nn.Linear(IN, OUT), rows(24, 1, torch.float32)
    with _joined(model) as pace:
        first, second, _ = pace.batches(torch.utils.data.TensorDataset(*data))
        x, y = pace.rows(first)
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(ValueError, match=r"update\(\) was called before backward\(\)"):
            pace.update()
        x, y = pace.rows(first)
        pace.backward(F.cross_entropy(model(x), y))
        with pytest.raises(ValueError, match=r"rows\(\) was called before update\(\)"):
            pace.rows(second)
        assert pace.update() > 0


def _still(parameter):
    parameter.grad.zero_()


def test_replicas_have_the_hooks_of_the_models_parameters():
    """Story: a mask of gradients held for one of two replicas."""

    def trained(engine):
        torch.manual_seed(2)
        model, data = nn.Linear(IN, OUT), rows(8, 1, torch.float32)
        mask = (torch.arange(IN) % 2).float()  # on the CPU, as the model: the rows come from elsewhere, if any do
        model.weight.register_hook(lambda grad: grad * mask)
        model.bias.register_post_accumulate_grad_hook(_still)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with paceline.join(model, optimizer, F.cross_entropy, batch_size=8, engine=engine) as pace:
            pace.step(data)
        return model

    one, other = trained("sequential"), trained("replicas:2")
    assert torch.allclose(one.weight, other.weight, rtol=1e-5)
    assert torch.equal(one.bias, other.bias)


class Dice(Dataset):
    """Each sample by chance."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randn(3), index


@pytest.mark.parametrize("dataset", [Dice(), Subset(Dice(), range(16)), Subset(Subset(Dice(), range(16)), range(16))])
def test_a_part_of_a_dataset_draws_for_each_sample_whoever_reads_it(dataset):
    def drawn(seats):
        found = {}
        for assignment in seats:
            for batch in batches(dataset, 8, 1, 0, assignment, workers=1):
                x, index = batch.share(assignment)
                found |= dict(zip(index.tolist(), x.tolist(), strict=True))
        return found

    assert drawn([Assignment()]) == drawn([Assignment(0, 2), Assignment(1, 2)])


class Answers:
    """An exchange with another process's words."""

    def __init__(self, other=None):
        self.other, self.asked = other, []

    def all_gather(self, words):
        self.asked.append(words)
        return [words, words if self.other is None else self.other]


def test_parts_that_each_process_has_drawn_for_itself_are_told():
    whole = Dice()
    for dataset in (
        Subset(whole, [3, 1, 2]),
        DataLoader(Subset(whole, [3, 1, 2])),
        DataLoader(whole, sampler=SubsetRandomSampler([3, 1, 2])),
    ):
        same = Answers()
        compare_data(same, data_facts(dataset))
        with pytest.raises(ValueError, match=r"generator=torch\.Generator\(\)"):
            compare_data(Answers(b'{"parts": "another"}'), data_facts(dataset))
        assert len(same.asked) == 1
    for dataset in (whole, DataLoader(whole)):
        compare_data(Answers(b'{"parts": "another"}'), data_facts(dataset))


def test_datasets_of_unlike_machines_are_told(tmp_path):
    """Story: one machine had `Dog` and another `dog`, which come in another order; every label meant something else."""
    for count in (3, 4):
        for name in ("cat", "dog"):
            (tmp_path / f"{count}" / name).mkdir(parents=True)
            for i in range(count):
                (tmp_path / f"{count}" / name / f"{i}.jpg").touch()
    for name in ("cat", "Dog"):
        (tmp_path / "upper" / name).mkdir(parents=True)
    for path in (tmp_path / "3").rglob("*.jpg"):
        (tmp_path / "upper" / path.parent.name.replace("dog", "Dog") / path.name).touch()
    here, more, upper = (images.load(tmp_path / name)[0] for name in ("3", "4", "upper"))
    copied = images.load(shutil.copytree(tmp_path / "3", tmp_path / "elsewhere" / "copy"))[0]
    other = images.load(shutil.copytree(tmp_path / "3", tmp_path / "other"), seed=5)[0]
    asked = Answers()
    compare_data(asked, data_facts(here))
    compare_data(Answers(*asked.asked), data_facts(copied))
    for found, told in (
        (more, r"different numbers of samples \(4, 6\).*--send"),
        (upper, "different classes and labels"),
        (other, r"different images \(ImageFolder\)"),
        (range(3), r"different numbers of samples \(3, 4\)"),
    ):
        with pytest.raises(ValueError, match=told):
            compare_data(Answers(*asked.asked), data_facts(found))
    compare_data(Answers(b'{"numbers of samples": 3}'), data_facts(iter([])))


@pytest.mark.dear
def test_processes_that_split_by_chance_are_told(tmp_path):
    split = "train, rest = torch.utils.data.random_split(torch.utils.data.TensorDataset(torch.randn(80, 4)), [60, 20])"
    script = launching.small(tmp_path, "for batch in pace.batches(train): pace.step(batch)", before=split)
    done = launching.launch(str(script), engine="processes:2", code=1)
    assert "the processes were given different parts of the dataset" in done.stderr


def test_two_joins_at_once_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_FOLDER", str(tmp_path / "run"))
    data = rows(8, 1, torch.float32)
    with _joined(nn.Linear(IN, OUT)) as one, _joined(nn.Linear(IN, OUT)) as two:
        for pace in (one, two):
            pace.step(data)
            pace.save()
        assert (one.folder, two.folder) == (tmp_path / "run", tmp_path / "run" / "2")
    with _joined(nn.Linear(IN, OUT)) as after:
        assert after.restore()
        assert after.folder == tmp_path / "run"


@of_cpus
def test_processes_that_read_have_ended_with_the_last_batch():
    """Story: held by a script's last batch, they outlived the loop, and were killed with a traceback at its end."""
    here, model = psutil.Process(), nn.Linear(IN, OUT)
    before = set(here.children())
    with _joined(model) as pace:
        found = 0
        for batch in pace.batches(DataLoader(torch.utils.data.TensorDataset(*rows(24, 1)), 8, num_workers=2)):
            batch.share(Assignment())
            found = max(found, len(set(here.children()) - before))
        assert found >= 2
        assert batch.ends_epoch
        assert not psutil.wait_procs(set(here.children()) - before, 10)[1], "a process still reads"


def test_a_measurement_that_is_ended_leaves_no_folder(tmp_path):
    script = launching.small(tmp_path, "time.sleep(60)")
    place = tmp_path / "tmp"
    place.mkdir()
    where = {**os.environ, "TMPDIR": str(place), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "paceline", "plan", str(script)]
    plan = subprocess.Popen(command, env=where, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not list(place.glob("paceline-*")):
            assert time.monotonic() < end
            assert plan.poll() is None
            time.sleep(0.05)
        while plan.poll() is None:  # an exit that falls into a finalizer is ignored by Python
            assert time.monotonic() < end
            plan.send_signal(signal.SIGTERM)
            time.sleep(1.0)
        assert plan.returncode == 143
    finally:
        plan.kill()
        plan.wait()
    assert not list(place.glob("paceline-*"))


STRUCK = """
import os, shutil, signal, sys, tempfile
from paceline.cli import main

make, remove = tempfile.mkdtemp, shutil.rmtree

def strike():
    os.kill(os.getpid(), signal.SIGTERM)

def made(*words, **named):
    path = make(*words, **named)
    strike()
    return path

def removed(*words, **named):
    strike()
    remove(*words, **named)

if sys.argv.pop(1) == "made":
    tempfile.mkdtemp = made
else:
    shutil.rmtree = removed
main()
"""


@pytest.mark.parametrize("when", ["made", "removed"])
def test_a_signal_that_comes_while_a_folder_is_made_or_removed_leaves_none(tmp_path, when):
    """Story: SIGTERM came between the making of a measurement's folder and the note that it is to be removed."""
    (tmp_path / "job.py").write_text("")
    place = tmp_path / "tmp"
    place.mkdir()
    where = {**os.environ, "TMPDIR": str(place), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-c", STRUCK, when, "plan", str(tmp_path / "job.py")]
    done = subprocess.run(words, env=where, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143, done.stderr
    assert not list(place.glob("paceline-*"))
