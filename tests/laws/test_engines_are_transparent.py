"""Any engine gives the sequential weights, parameter by parameter: uneven shares, every optimizer, clip and model.

Real processes, real sockets, real gloo between nodes on loopback.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import launching
from device import on_the_cpu
from nodes import MODELS, OPTIMIZERS, Wide, build, gap, reference, rows
from paceline.engine.node.optimizer_shards import ELEMENTWISE
from paceline.registry import parse

pytestmark = pytest.mark.long

HERE = Path(__file__).parents[1] / "support"
START = (
    "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[3:], sys.argv[1], int(sys.argv[2])))"
)
CASES = [f"{kind},{optimizer},0,allreduce,none" for kind in MODELS for optimizer in ("momentum", "adamw")]
CASES += [f"plain,{optimizer},0.05,allreduce,none" for optimizer in OPTIMIZERS]
CASES += ["sometimes,momentum,0.05,allreduce,none", "tied,adam,0.05,allreduce,none"]
FEW = "plain,momentum,0.05,allreduce,none,few"
CASES += [MICRO := "plain,momentum,0.05,allreduce,none,3"]

ROUNDED = "wide,sgd,0,allreduce,none,bf16"
REFUSED = "plain,momentum,0.05,allreduce!,none"


def launch(engine, num_nodes, folder, *cases):
    command = [sys.executable, "-W", "error", str(HERE / "scripts" / "many.py"), str(folder), *cases]
    done = subprocess.run(
        [sys.executable, "-c", START, engine, str(num_nodes), *command],
        env={**os.environ, "PYTHONPATH": launching.python_path(), **on_the_cpu(engine)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


HYBRID = "processes:2/pipeline:2,micros=2,cut=head"
PARAMS = [("processes:2", 1), ("processes:3", 1), ("sequential", 2), ("processes:2", 2), (HYBRID, 1), (HYBRID, 2)]


@pytest.fixture(scope="module", params=PARAMS)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    extra = [FEW, "plain,sgd,0,periodic:1,none", "plain,momentum,0,allreduce,feedback/topk:keep=1.0", REFUSED, ROUNDED]
    launch(*request.param, folder, *CASES, *extra)
    return folder


@pytest.mark.dear("trained0", "trained1", "trained2", "trained5", "plain,momentum,0,allreduce,none")
@pytest.mark.parametrize("case", CASES)
def test_processes_and_nodes_equal_one_process(trained, case):
    kind, optimizer, clip, *_ = case.split(",")
    batches = [rows(21, seed) for seed in range(5)]
    model = build(MODELS[kind])
    want, losses = reference(model, batches, OPTIMIZERS[optimizer], float(clip) or None)
    said = json.loads((trained / f"{case}.json").read_text())
    assert gap(load_file(trained / f"{case}.safetensors"), want) < 1e-12
    assert said["losses"] == pytest.approx(losses, rel=1e-12)
    model.load_state_dict(want)
    right = sum(float((model(x).argmax(1) == y).sum()) for x, y in batches)
    assert said["right"] == right / (21 * 5)


@pytest.mark.dear("trained0", "trained1", "trained2", "trained3", "trained5")
def test_batches_of_fewer_rows_than_there_are_micro_batches(trained):
    """Of five rows, and one: some processes and stages have none."""
    x, y = (torch.cat(parts) for parts in zip(*(rows(21, seed) for seed in range(5)), strict=True))
    batches = [(x[at : min(at + 5, 21)], y[at : min(at + 5, 21)]) for at in range(0, 21, 5)]
    want, losses = reference(build(), batches, OPTIMIZERS["momentum"], 0.05)
    assert json.loads((trained / f"{FEW}.json").read_text())["losses"] == pytest.approx(losses, rel=1e-12)
    assert gap(load_file(trained / f"{FEW}.safetensors"), want) < 1e-12


class Rounded(Wide):
    forward = torch.autocast("cpu", torch.bfloat16)(Wide.forward)  # a context for each call, which forgets old weights


def in_float32(output, target):
    return torch.nn.functional.cross_entropy(output.float(), target)


@pytest.mark.dear("trained0", "trained1", "trained2", "trained5")
@pytest.mark.parametrize("case", [CASES[0], MICRO, ROUNDED])
def test_factors_are_used_between_processes(trained, case):
    assert json.loads((trained / f"{case}.json").read_text())["forms"].count("factors") == 2


@pytest.mark.dear("trained0", "trained1", "trained2", "trained5")
def test_rounded_to_bf16_they_are_near_autocast(trained):
    """Within 0.5 %: everyone's rows are rounded as before, but their factors are multiplied in float32."""
    batches = [rows(21, seed, torch.float32) for seed in range(5)]
    want, losses = reference(build(Rounded, torch.float32), batches, OPTIMIZERS["sgd"], loss=in_float32)
    exact, _ = reference(build(Wide, torch.float32), batches, OPTIMIZERS["sgd"])
    got = load_file(trained / f"{ROUNDED}.safetensors")
    assert json.loads((trained / f"{ROUNDED}.json").read_text())["losses"] == pytest.approx(losses, rel=5e-3)
    assert gap(got, want) < 5e-3
    assert gap(got, exact) > 1e-5, "nothing was rounded"


@pytest.mark.dear("trained0", "trained1", "trained2", "trained5")
def test_weights_averaged_every_step_are_all_reduce(trained):
    batches = [rows(21, seed) for seed in range(5)]
    want, _ = reference(build(), batches, OPTIMIZERS["sgd"])
    assert gap(load_file(trained / "plain,sgd,0,periodic:1,none.safetensors"), want) < 1e-12


@pytest.mark.dear("trained0", "trained1", "trained2", "trained5")
def test_steps_refused_by_one_process_are_redone_by_all(trained):
    batches = [rows(21, seed) for seed in range(5)]
    want, losses = reference(build(), batches, OPTIMIZERS["momentum"], 0.05)
    said = json.loads((trained / f"{REFUSED}.json").read_text())
    assert said["redone"] == [1, 3]
    assert said["losses"] == pytest.approx(losses, rel=1e-12)
    assert gap(load_file(trained / f"{REFUSED}.safetensors"), want) < 1e-12


@pytest.mark.dear("trained0", "trained1", "trained2", "trained5")
def test_a_codec_that_keeps_everything_is_no_codec(trained):
    batches = [rows(21, seed) for seed in range(5)]
    want, _ = reference(build(), batches, OPTIMIZERS["momentum"])
    assert gap(load_file(trained / "plain,momentum,0,allreduce,feedback/topk:keep=1.0.safetensors"), want) < 1e-12


@pytest.mark.parametrize("name", ["sequential", "threads:1", "threads:2", *(f"replicas:{k}" for k in (1, 2, 3, 20))])
def test_gradient_equals_autograd_per_parameter(name):
    engine = parse("engine", name)
    model, data = build(), rows(13, 1)
    loss = torch.nn.functional.cross_entropy(model(data[0]), data[1])
    names = [name for name, _ in model.named_parameters()]
    want = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    for form in ("dense", "factors"):
        engine.open(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy)
        gradients = []
        forms = [form if bucket.linear else "dense" for bucket in engine.buckets]
        vote = engine.gradient(data, 1 / 13, forms, gradients.append)
        engine.close()
        assert vote.loss_sum / vote.weight == pytest.approx(loss.item(), rel=1e-14)
        got = {}
        for gradient in gradients:
            flat = (
                gradient.flat
                if gradient.output_grad is None
                else (gradient.output_grad.T @ gradient.layer_input).reshape(-1)
            )
            parts = flat.split(list(gradient.bucket.numels))
            got.update(
                {
                    n: p.view(s).clone()
                    for n, s, p in zip(gradient.bucket.names, gradient.bucket.shapes, parts, strict=True)
                }
            )
        assert got.keys() == want.keys()
        for name in names:
            assert torch.allclose(got[name], want[name], rtol=1e-12, atol=1e-15), name


def test_the_elementwise_optimizers_exist():
    """The list by which updates are sliced names real optimizers, and none that looks at whole tensors."""
    assert all(hasattr(torch.optim, name) for name in ELEMENTWISE)
    assert not {"LBFGS", "Muon", "Adafactor"} & set(ELEMENTWISE)
