"""A model in a wrapper that communicates by itself: the module inside is trained, or it is refused by name."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

import cases
import paceline
from device import of_cpus
from launching import launch
from nodes import gap

# torch's own modules warn of each other as they are imported
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]
KINDS = ("plain", "plainly", "deep", "twofold", "armed", "called")


@of_cpus
def test_a_wrapped_model_trains_to_the_weights_of_the_module_inside(tmp_path):
    """Story: DistributedDataParallel's own all-reduce ran beside ours: other weights at every start, without a word."""
    done = launch("wrapped.py", tmp_path, *KINDS, engine="sequential", num_nodes=2)
    want = cases.Case(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)).plain(16)["weights"]
    plain = load_file(tmp_path / "plain.safetensors")
    assert gap(plain, want) < 1e-12
    for kind in KINDS[1:]:
        weights = load_file(tmp_path / f"{kind}.safetensors")
        inner = {name.replace("module.", ""): tensor for name, tensor in weights.items()}
        assert (inner.keys() == weights.keys()) == (kind != "deep"), "the names are those of the module that is trained"
        assert all(torch.equal(inner[name], plain[name]) for name in plain), kind
    said = [line for line in done.stderr.splitlines() if "wrapped in DistributedDataParallel" in line]
    assert len(said) == len(KINDS) - 1, done.stderr


@pytest.fixture
def alone(tmp_path):
    """A process group of one, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def join(model, optimizer=None, **words):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.join(model, optimizer, F.cross_entropy, **{"batch_size": 4, "engine": "sequential", **words})


BATCH = (torch.randn(4, cases.IN), torch.tensor([0, 1, 2, 0]))


def test_a_loop_of_ones_own_is_told_to_take_the_module_inside(alone):
    with join(DistributedDataParallel(cases.Net())) as pace:
        for call in (lambda: pace.rows(BATCH), lambda: pace.backward(torch.ones(()), 1), pace.update):
            with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel; .*model\.module"):
                call()


def test_a_wrapper_that_was_not_given_is_not_trained_through(alone):
    model = cases.Net()
    outer = DistributedDataParallel(model)
    with join(model) as pace, torch.no_grad():
        outer(BATCH[0])  # looked at, which adds up nothing
        with torch.enable_grad(), pytest.raises(ValueError, match=r"called through DistributedDataParallel"):
            outer(BATCH[0])
        with torch.enable_grad():
            pace.step(BATCH)
    outer(BATCH[0]).sum().backward()


@pytest.mark.parametrize("engine", ["replicas:2", "threads:2"])
def test_a_wrapper_deep_inside_is_bypassed_by_every_engine(alone, engine):
    torch.manual_seed(7)
    plain, other = cases.Net(), cases.Net()
    other.load_state_dict(plain.state_dict())
    other.second = DistributedDataParallel(other.second)
    for model in (plain, other):
        with join(model, engine=engine) as pace:
            pace.step(BATCH)
            pace.step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    assert "forward" not in vars(other.second)


def test_a_model_in_data_parallel_is_exported_as_the_module_inside(tmp_path, capsys):
    model = cases.Net()
    with join(DataParallel(model), torch.optim.Adam(model.parameters())) as pace:
        pace.step(BATCH)
        pace.export(tmp_path / "it.safetensors")
    assert load_file(tmp_path / "it.safetensors").keys() == model.state_dict().keys()
    assert capsys.readouterr().err.count("wrapped in DataParallel: paceline trains the module inside") == 1


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))


def tensor_parallel(model):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model.second, dist.init_device_mesh("cpu", (1,)), ColwiseParallel())
    return model


def replicated(model):
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


def within(model):
    model.second = sharded(model.second)
    return model


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (sharded, "divides parameters among processes"),
        (within, "layer 'second' .*divides parameters among processes"),
        (tensor_parallel, "parameter 'second.weight' is a DTensor"),
        (replicated, "adds up gradients by itself|divides parameters"),
    ],
)
def test_who_divides_parameters_or_adds_up_by_itself_is_refused_by_name(alone, wrap, said):
    # torch keeps a DTensor's process group in the thread that used it; whatever another thread forks later would die of
    # ending the group's threads, which a fork does not have
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ValueError, match=f"^join: .*{said}.*give join.. the plain model"),
    ):
        pool.submit(lambda: join(wrap(cases.Net()))).result()


def test_fsdp_around_a_model_is_refused_by_name(alone):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(cases.Net(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match="the model is a FullyShardedDataParallel, which divides parameters"):
        join(model)


def made_by(module, kind):
    """A class as another package would define it."""
    return type(kind, (torch.optim.SGD,), {"__module__": module})


@pytest.mark.parametrize(
    ("module", "kind"),
    [("horovod.torch.optimizer", "SGD"), ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")],
)
def test_an_optimizer_that_adds_up_by_itself_is_refused_by_name(module, kind):
    model = cases.Net()
    with pytest.raises(ValueError, match=f"the optimizer is a {kind}, which .* by itself"):
        join(model, made_by(module, kind)(model.parameters(), lr=0.1))


def test_optimizers_of_torch_that_communicate_are_refused_by_name(alone):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = cases.Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="the optimizer is a ZeroRedundancyOptimizer, which communicates by itself"):
        join(model, optimizer)


def test_an_optimizer_inside_backward_is_refused_by_name():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = cases.Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.second.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"parameter 'second\.weight' is updated inside backward"):
        join(model)


def test_none_of_its_process_groups_outlives_a_test():
    """Story: processes of a DataLoader, many tests later, died in `os.fork`."""

    def fork():
        if not (child := os.fork()):
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    gc.collect()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(fork).result(10) == 0
