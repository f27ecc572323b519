"""Alone on a GPU, a step's numbers are read while the next one is computed; a CPU stands for the GPU."""

import contextlib
import math
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import on_gpu
import paceline
from device import DEVICE
from paceline.errors import NoGradient, NotFinite
from paceline.report import record
from paceline.step.like_torch import UnreadLoss

ROWS, STEPS = 6, 5
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}


@pytest.fixture(autouse=True)
def later(monkeypatch):
    on_gpu.pretend(monkeypatch)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(torch.tanh(self.first(x))))))


def data(dtype=torch.float64, ignored=False):
    numbers = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        y = torch.randint(0, 3, (ROWS,), generator=numbers)
        if ignored:
            y[: 1 + step % 3] = -100
        found.append((torch.randn(ROWS, 8, generator=numbers).to(DEVICE, dtype), y.to(DEVICE)))
    return found


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(DEVICE, dtype)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "several": lambda p: [torch.optim.SGD((p := list(p))[:2], lr=0.1, momentum=0.9), torch.optim.Adam(p[2:], lr=1e-2)],
}


LOSSES = {
    "mean": F.cross_entropy,
    "pair": lambda output, y: (F.cross_entropy(output, y, reduction="sum"), len(y)),
    "parts": lambda output, y: {"class": F.cross_entropy(output, y), "size": output.square().mean()},
}


def plain(kind, loss, clip, schedule, batches):
    torch.manual_seed(3)
    model = build()
    optimizers = OPTIMIZERS[kind](model.parameters())
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    schedules = [schedule(each) for each in optimizers] if schedule else []
    torch.manual_seed(3)
    losses = []
    for x, y in batches:
        model.zero_grad()
        found = LOSSES[loss](model(x), y)
        value = found[0] / found[1] if isinstance(found, tuple) else sum(found.values()) if loss == "parts" else found
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in (*optimizers, *schedules):
            each.step()
        losses.append(value.item())
    return model, losses


def joined(kind="momentum", loss="mean", dtype=torch.float64, **options):
    model = build(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    options = {"batch_size": ROWS, "engine": "sequential", **options}
    if schedule := options.pop("schedule", None):
        options["scheduler"] = [schedule(o) for o in optimizer] if isinstance(optimizer, list) else schedule(optimizer)
    pace = paceline.join(model, optimizer, LOSSES[loss], **options)
    torch.manual_seed(3)
    return model, optimizer, pace


def distance(one, other):
    both = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) / max(1.0, float(b.abs().max())) for a, b in both)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("loss", "clip", "schedule", "ignored"),
    [
        ("mean", None, None, False),
        ("mean", 0.05, cosine, True),
        ("mean", 1e3, None, True),
        ("pair", 0.05, None, False),
        ("parts", None, cosine, 0),
    ],
)
def test_a_step_that_is_read_later_equals_plain_pytorch(kind, loss, clip, schedule, ignored):
    batches = data(ignored=ignored)
    model, _, pace = joined(kind, loss, clip=clip, schedule=schedule)
    with pace:
        losses = [pace.step(batch) for batch in batches]
        assert isinstance(losses[-1], UnreadLoss)
        assert pace.num_steps == STEPS
    wanted, values = plain(kind, loss, clip, schedule, batches)
    assert distance(model, wanted) < 1e-12
    assert [float(each) for each in losses] == pytest.approx(values, rel=1e-12)


class Watch(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waits(unless):
    """On a GPU, torch raises where an operation waits for it."""
    if DEVICE.type == "cpu" or unless:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gpu_has_a_whole_step_before_a_number_is_read(kind, loss):
    """Of the step itself, none is read."""
    metric = lambda output, y: (output.argmax(1) == y).sum()  # noqa: E731
    _, _, pace = joined(kind, loss, clip=1.0, schedule=cosine, metric=metric)
    with pace:
        batches = data()
        for batch in batches[:3]:
            pace.step(batch)
        for pending in (True, False):
            if not pending:
                assert 0 <= pace.metric <= 1
            with no_waits(unless=pending), Watch() as watched:
                pace.step(batches[3])
            update = next(i for i, name in enumerate(watched.names) if "_fused_" in name)
            first = next((i for i, name in enumerate(watched.names) if name in READS), len(watched.names))
            assert first > update
            assert (first < len(watched.names)) is pending


def test_the_tensors_of_a_metric_are_those_of_the_step_that_is_read():
    def metric(output, y):
        return {"rows": (y >= 0).sum()} if len(y) % 2 else (torch.bincount(y, minlength=3), None)

    _, _, pace = joined(metric=metric)
    with pace:
        for step, (x, y) in enumerate(data() * 2):
            rows = ROWS - step % 3 % 2
            pace.step((x[:rows], y[:rows]))
            if step % 4 > 1:  # each after one that nobody reads
                found = pace.metric
                assert found == {"rows": 1.0} if rows % 2 else torch.equal(found, torch.bincount(y.cpu(), minlength=3))


def everything(model, optimizer, pace, schedule):
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    tensors = [*model.state_dict().values()]
    for each in optimizers:
        tensors += [part for state in each.state.values() for part in state.values() if torch.is_tensor(part)]
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    position = pace.num_steps, pace.epoch, pace.next_step
    return (
        [each.clone() for each in tensors],
        rates,
        position,
        torch.get_rng_state(),
        schedule and schedule[0].last_epoch,
    )


def same(one, other):
    assert len(one[0]) == len(other[0])
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1:3] == other[1:3]
    assert torch.equal(one[3], other[3])


BAD = {
    "loss": (lambda x, y: (x * math.nan, y), F.cross_entropy, NotFinite, r"the loss is not finite at step 3"),
    "value": (
        lambda x, y: (x, y),
        lambda output, y: F.cross_entropy(output, y) + (math.inf if BAD["now"] else 0.0),
        NotFinite,
        "the loss is not finite at step 3",
    ),
    "gradient": (
        lambda x, y: (x, y),
        lambda output, y: F.cross_entropy(output, y) + ((0 * output.sum()).sqrt() if BAD["now"] else 0),
        NotFinite,
        r"the gradient is not finite at step 3: loss sum \d",
    ),
    "nothing": (
        lambda x, y: (x, torch.full_like(y, -100)),
        F.cross_entropy,
        NoGradient,
        r"step 3 trains nothing: nothing in the global batch counts",
    ),
    "now": 0,
}
ASKS = {
    "step": lambda pace, loss, batch: pace.step(batch),
    "loss": lambda pace, loss, batch: loss.item(),
    "print": lambda pace, loss, batch: f"{loss:.3f}",
    "metric": lambda pace, loss, batch: pace.metric,
    "norm": lambda pace, loss, batch: pace.grad_norm,
    "evaluate": lambda pace, loss, batch: pace.evaluate(TensorDataset(*batch)),
    "save": lambda pace, loss, batch: pace.save(),
    "own": lambda pace, loss, batch: (
        pace.backward(F.cross_entropy(pace.job.model(batch[0]), batch[1])),
        pace.update(),
    ),
    "another": lambda pace, loss, batch: (pace.job.optimizer.param_groups[0].update(foreach=True), pace.step(batch)),
    "close": lambda pace, loss, batch: pace.close(),
}


@pytest.mark.parametrize("kind", ["momentum", "adamw", "several"])
@pytest.mark.parametrize(
    ("bad", "asks"), [*((bad, "step") for bad in list(BAD)[:3]), *(("loss", asks) for asks in ASKS)]
)
def test_a_step_that_is_refused_changes_nothing(tmp_path, monkeypatch, kind, bad, asks):
    """Nor the step that was computed before that was known; and training goes on, as if both had not been there."""
    change, loss, error, text = BAD[bad]
    made = []

    def schedule(optimizer):
        made.append(cosine(optimizer))
        return made[-1]

    monkeypatch.setitem(LOSSES, "bad", loss)
    metric = lambda output, y: (output.argmax(1) == y).sum()  # noqa: E731
    model, optimizer, pace = joined(kind, "bad", schedule=schedule, folder=tmp_path, metric=metric)
    batches = data()
    for batch in batches[:3]:
        pace.step(batch)
    assert pace.agreement.vote.weight == ROWS
    before = everything(model, optimizer, pace, made)
    monkeypatch.setitem(BAD, "now", bad in ("value", "gradient"))
    given = pace.step(change(*batches[3]))
    assert isinstance(given, UnreadLoss)
    monkeypatch.setitem(BAD, "now", 0)
    with pytest.raises(error, match=text):
        ASKS[asks](pace, given, batches[4])
    pace.job.optimizer.param_groups[0]["foreach"] = None
    same(before, everything(model, optimizer, pace, made))
    assert list(tmp_path.glob("**/step-*")) == []
    for batch in batches[3:] if asks != "close" else ():
        pace.step(batch)
    pace.close()
    monkeypatch.setitem(LOSSES, "bad", F.cross_entropy)
    wanted, _, other = joined(kind, "bad", schedule=cosine)
    with other:
        for batch in batches if asks != "close" else batches[:3]:
            other.step(batch)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), wanted.state_dict().values(), strict=True)
    )


def test_losses_that_are_kept_keep_no_batch():
    _, _, pace = joined()
    with pace:
        batches, losses = data(), []
        seen = [weakref.ref(x) for x, _ in batches]
        while batches:
            losses.append(pace.step(batches.pop(0)))
        del losses[0]
        assert [each() is None for each in seen] == [True] * (STEPS - 1) + [False]  # the last one is not read


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_first_step_is_refused_at_once(kind):
    """Torch's fused optimizers would leave a first momentum of whatever the memory held."""
    model, optimizer, pace = joined(kind)
    batches = data()
    x, y = batches[0]
    with pytest.raises(NotFinite, match="the loss is not finite at step 0"):
        pace.step((x * math.nan, y))
    assert not any(optimizer.state.values())
    with pace:
        for batch in batches:
            pace.step(batch)
    assert distance(model, plain(kind, "mean", None, None, batches)[0]) < 1e-12


def test_a_step_before_an_error_of_the_script_is_recorded(tmp_path):
    def train():
        _, _, pace = joined(folder=tmp_path)
        with pace:
            for batch in data():
                pace.step(batch)
            raise KeyError("of the script")

    with pytest.raises(KeyError):
        train()
    assert [each["step"] for each in record.read(tmp_path) if each["event"] == "step"] == list(range(STEPS))


def test_the_record_has_each_step_once_and_in_order(tmp_path, monkeypatch):
    def steps(folder):
        _, _, pace = joined(folder=tmp_path / folder, loss="parts", clip=1.0)
        with pace:
            for batch in data():
                pace.step(batch)
        found = [each for each in record.read(tmp_path / folder) if each["event"] == "step"]
        names = "step", "loss", "weight", "norm", "terms", "verdict", "lr"
        return bool(pace.run.ahead), [{name: each[name] for name in names} for each in found]

    ahead, found = steps("later")
    monkeypatch.undo()
    alone, wanted = steps("at once")
    assert (ahead, alone) == (True, DEVICE.type != "cpu")
    assert [each["step"] for each in found] == list(range(STEPS))
    for one, other in zip(found, wanted, strict=True):
        for name in other:
            assert one[name] == pytest.approx(other[name], rel=1e-5) if name != "verdict" else one[name] == other[name]


def test_a_run_is_resumed_bit_by_bit(tmp_path):
    batches, found = data(), []
    for resumes in (False, True):
        model, _, pace = joined("adamw", schedule=cosine, folder=tmp_path / str(resumes))
        for batch in batches[:3]:
            pace.step(batch)
        if resumes:
            pace.save()
            pace.close()
            model, _, pace = joined("adamw", schedule=cosine, folder=tmp_path / str(resumes))
            assert pace.restore()
            assert pace.num_steps == 3
        for batch in batches[3:]:
            pace.step(batch)
        pace.close()
        found.append(list(model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_optimizer_stays_as_its_user_made_it():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=ROWS, engine="sequential") as pace:
        for batch in data():
            pace.step(batch)
        assert pace.run.ahead
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == options
    assert not hasattr(optimizer, "found_inf")
    F.cross_entropy(model(data()[0][0]), data()[0][1]).backward()
    optimizer.step()


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.RMSprop, {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=False), {}),
        (lambda p: torch.optim.Adam(p, capturable=True), {}),
        (hooked, {}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"precision": "fp16"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"batch_norm": "sync"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"overlap": "forward"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"accumulate": 2}),
    ],
    ids=["other", "foreach", "not fused", "capturable", "hooked", "fp16", "sync", "forward", "accumulate"],
)
def test_other_steps_are_read_at_once(make, options):
    model = build(torch.float32)
    how = {"batch_size": ROWS, "engine": "sequential", **options}
    with contextlib.closing(paceline.join(model, make(model.parameters()), F.cross_entropy, **how)) as pace:
        assert pace.run.ahead is None
        if DEVICE.type != "cpu" or not ("precision" in options or pace.job.optimizer.defaults.get("capturable")):
            assert isinstance(pace.step(data(torch.float32)[0]), float)


SCRIPT = """
import math, sys
import torch
from torch import nn
from torch.nn import functional as F
import paceline
from paceline.engine.compute import batch, optimizer_step

batch.on_gpu, optimizer_step.takes_gradients = lambda tensor: True, lambda model: True
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pace = paceline.join(model, optimizer, F.cross_entropy, batch_size=4, engine="sequential", folder=sys.argv[1])
for factor in (1.0, 1.0, float(sys.argv[2])):
    pace.step((factor * torch.ones(4, 3), torch.tensor([0, 1, 0, 1])))
"""


@pytest.mark.parametrize("factor", ["1", "nan"])
def test_the_last_step_is_read_where_the_script_just_ends(tmp_path, factor):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    words = [sys.executable, str(path), str(tmp_path / "run"), factor]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    steps = [each["step"] for each in record.read(tmp_path / "run") if each["event"] == "step"]
    assert steps == ([0, 1, 2] if factor == "1" else [0, 1])
    assert ("the loss is not finite at step 2" in done.stderr) is (factor == "nan")
