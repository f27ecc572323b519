"""Micro-batches, 16-bit computing and loss scaling are plain PyTorch's; what is not finite is told and undone."""

import re
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import paceline
from launching import launch
from nodes import gap
from paceline.engine.compute import precision
from paceline.messages import Decision

ROWS = 32


def data(steps, features=16):
    dice = torch.Generator().manual_seed(2)
    return [
        (torch.randn(ROWS, features, generator=dice), torch.randint(0, 3, (ROWS,), generator=dice))
        for _ in range(steps)
    ]


def net(width=32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3))


def autocast_loop(model, optimizer, batches, dtype, scaling=None):
    """Plain PyTorch: autocast, and its own scaler where there is one. (losses, scales)."""
    grad_scaler = torch.amp.GradScaler("cpu", enabled=scaling is not None, **(scaling or {}))
    losses, scales = [], []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(x), y)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        losses.append(float(loss.detach()))
        scales.append(grad_scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize("engine", ["sequential", "sequential+bf16", "threads:2"])
def test_bf16_is_autocast_bit_for_bit(engine):
    model, batches = net(), data(6)
    pace = paceline.join(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        F.cross_entropy,
        batch_size=ROWS,
        engine=engine,
        precision=None if "+" in engine else "bf16",
    )
    losses = [pace.step(batch) for batch in batches]
    pace.close()
    same = net()
    want, _ = autocast_loop(same, torch.optim.AdamW(same.parameters(), lr=0.01), batches, torch.bfloat16)
    assert losses == want
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    exact = net()
    assert float(F.cross_entropy(exact(batches[0][0]), batches[0][1]).detach()) != losses[0], "nothing was rounded"


@pytest.mark.dear
def test_bf16_between_processes_is_near_autocast(tmp_path):
    """Within 0.5 %: a process's rows are rounded as before, but their factors are multiplied in float32."""
    launch("rounded.py", tmp_path, engine="processes:2")
    got = torch.load(tmp_path / "rounded.pt", weights_only=True)
    model = net(256)
    losses, _ = autocast_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), data(6), torch.bfloat16)
    assert got["losses"] == pytest.approx(losses, rel=5e-3)
    assert gap(got["weights"], model.state_dict()) < 5e-3
    assert "factors" in got["forms"]


@pytest.mark.parametrize("engine", ["sequential", "threads:2"])
def test_fp16_is_the_loop_with_a_gradient_scaler(engine, monkeypatch):
    """From a scale that overflows down to one that fits, and up again."""
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    model, batches = net(), data(14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pace = paceline.join(model, optimizer, F.cross_entropy, batch_size=ROWS, engine=engine, precision="fp16")
    pace.run.scaler.scale = 2.0**24
    losses, scales, skipped = [], [], 0
    for batch in batches:
        losses.append(pace.step(batch))
        scales.append(pace.run.scaler.scale)
        skipped += pace.agreement.decision is Decision.SKIP
    pace.close()
    same = net()
    scaling = {"init_scale": 2.0**24, "growth_interval": 3}
    other = torch.optim.SGD(same.parameters(), lr=0.05, momentum=0.9)
    want, want_scales = autocast_loop(same, other, batches, torch.float16, scaling)
    assert scales == want_scales
    assert losses == want
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert 0 < skipped < len(batches) - 3
    assert any(b > a for a, b in pairwise(scales)), "the scale never grew"


def everything(model, optimizer, schedule):
    return [*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())], (
        schedule.last_epoch,
        optimizer.param_groups[0]["lr"],
    )


def test_a_step_that_overflows_has_never_been():
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    pace = paceline.join(
        model, optimizer, F.cross_entropy, batch_size=ROWS, precision="fp16", scheduler=schedule, engine="sequential"
    )
    good, bad = data(2)
    pace.step(good)
    tensors, numbers = everything(model, optimizer, schedule)
    before = [tensor.clone() for tensor in tensors]
    random = torch.get_rng_state()
    pace.step((bad[0] * 1e30, bad[1]))
    assert pace.agreement.decision is Decision.SKIP
    assert pace.run.scaler.scale == precision.START / 2
    after, same_numbers = everything(model, optimizer, schedule)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert same_numbers == numbers
    assert torch.equal(torch.get_rng_state(), random)
    pace.step(bad)
    assert not torch.equal(before[0], model[0].weight)
    assert schedule.last_epoch == 2
    pace.close()


def test_fp16_that_overflows_without_scaling_is_told_in_the_end():
    model = net()
    pace = paceline.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batch_size=ROWS, precision="fp16"
    )
    ((x, y),) = data(1)
    for _ in range(16):
        pace.step((x * 1e30, y))
        assert pace.agreement.decision is Decision.SKIP
    with pytest.raises(FloatingPointError, match=r"at step 16: .*the output of 0 \(Linear\)"):
        pace.step((x * 1e30, y))
    pace.close()


@pytest.mark.parametrize("accumulate", [2, 8])
def test_micro_batches_need_less_memory(accumulate):
    """What autograd keeps for backward, at its most."""

    def peak(accumulate):
        model = net()
        pace = paceline.join(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            F.cross_entropy,
            batch_size=ROWS,
            accumulate=accumulate,
            engine="sequential",
        )
        held, most = {}, 0
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

        class Kept:
            def __init__(self, tensor):
                self.tensor = tensor
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters:
                    held[id(self)] = tensor.nbytes
                nonlocal most
                most = max(most, sum(held.values()))

            def __del__(self):
                held.pop(id(self), None)

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            pace.step(data(1)[0])
        pace.close()
        return most

    whole = peak(1)
    assert peak(accumulate) < 1.2 * whole / accumulate


def test_nothing_is_given_up_by_too_many_micro_batches():
    case = cases.Case(options={"accumulate": 1000})
    got, want = case.train(7, "sequential"), case.plain(7)
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
    assert gap(got["weights"], want["weights"]) < 1e-12


def planted(where):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 32), nn.Linear(32, 3))
    x, y = data(2)[1]
    if where == "input":
        x = x.clone()
        x[-1, 3] = float("nan")
    elif where == "parameter":
        model[3].bias.data[2] = float("inf")
    else:
        model[where].register_forward_hook(
            lambda module, args, output: output.index_fill(1, torch.tensor(2), torch.nan)
        )
    return model, (x, y)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (0, r"the output of 0 \(Linear\)"),
        (1, r"the output of 1 \(BatchNorm1d\)"),
        (4, r"the output of 4 \(Linear\)"),
        ("input", "the input itself"),
        ("parameter", "parameter '3.bias' itself"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loss_that_is_not_finite_names_step_rate_and_layer_and_leaves_no_trace(where, words, accumulate, tmp_path):
    model, batch = planted(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    pace = paceline.join(
        model, optimizer, F.cross_entropy, batch_size=ROWS, folder=tmp_path, accumulate=accumulate, engine="sequential"
    )
    if where == "input":
        pace.step(data(1)[0])
    kept = pace.save()
    files = {path: path.read_bytes() for path in kept.iterdir()}
    before = [tensor.clone() for tensor in model.state_dict().values()]
    random = torch.get_rng_state()
    step = pace.num_steps
    with pytest.raises(FloatingPointError, match=rf"the loss is not finite at step {step}: .*rate 0.125; .*{words}"):
        pace.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert {path: path.read_bytes() for path in kept.iterdir()} == files
    pace.close()


def test_a_loss_that_breaks_by_itself_is_said_to():
    model = nn.Linear(4, 3)
    pace = paceline.join(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda output, y: (output.sum() - output.sum()).log() * 0,
        batch_size=8,
    )
    with pytest.raises(FloatingPointError, match="the loss, of a finite output"):
        pace.step((torch.ones(8, 4), torch.zeros(8)))
    pace.close()


@pytest.mark.dear
def test_two_processes_name_the_layer_that_only_the_second_saw_break(tmp_path):
    done = launch("broken.py", tmp_path, engine="processes:2", code=1)
    hint, *lines = [line for line in done.stderr.splitlines() if line]
    assert hint.startswith("paceline: batch norm (1) takes the statistics"), done.stderr
    assert len(lines) == 1, done.stderr
    assert re.search(
        r"^paceline: the loss is not finite at step 2: .* learning rate 0.1; .*the output of 0 \(Linear\) "
        r"\(rank 0 of 1 on \S+, local rank 1\)",
        lines[0],
    )
    said = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(said["before"], said["after"], strict=True))
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-00000002"]


def test_a_fused_step_walks_in_the_weights_own_layout():
    """Weights in channels_last hold their values in another order than a gradient that was added up flat."""

    def trained(row):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 3))
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 3
        with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8, engine=row) as pace:
            for _ in range(4):
                pace.step((x, y))
        return model.state_dict()

    plain, fused = trained("sequential"), trained("sequential+fused")
    assert all(torch.allclose(plain[name], fused[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cpu_never_reads_what_has_not_arrived(device):
    """Story: an input on a GPU, for a model on the CPU, was read during its copy. A GPU's stream waits by itself."""
    asked = []

    class Input:
        def to(self, device, non_blocking=False, **others):
            asked.append(non_blocking)

        def dim(self):
            return 4

    for numerics in (precision.Numerics(), precision.Numerics(channels_last=True)):
        numerics.moved(Input(), torch.device(device))
    assert asked == [device == "cuda"] * 2
