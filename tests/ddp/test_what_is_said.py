"""What a DDP script is told: its launcher's variables, why a model has torch's sums, what nccl needs."""

import json

import pytest

from launching import begin, finish

pytestmark = [pytest.mark.dear, pytest.mark.long]

HEAD = """
import json, os
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import Embedding, Linear, Sequential
from torch.nn.parallel import DistributedDataParallel as DDP
"""
WHY = {
    "DDP(Sequential(Embedding(5, 800, sparse=True), Linear(800, 800)))": "an embedding with sparse gradients",
    "DDP(torch.compile(Linear(800, 800)))": "a compiled model",
    "DDP(Linear(800, 800)).register_comm_hook(None, default_hooks.allreduce_hook)": "a communication hook",
    "DDP(Linear(800, 800))._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)": "a communication hook",
    "DDP(Linear(800, 800))": "",
    "DDP(torch.compile(Linear(4, 4)))": "",  # torch's sums are as few bytes
    "DDP(torch.nn.Conv2d(3, 3, 3)).register_comm_hook(None, default_hooks.allreduce_hook)": "",
}


def run(folder, text, *words, code=0, **more):
    (folder / "train.py").write_text(HEAD + text)
    return finish(begin("run", "--plan", "processes:2", *words, folder / "train.py", **more), code)


@pytest.mark.parametrize("off", [False, True])
def test_why_a_model_has_torchs_sums_is_said_once(off, tmp_path):
    lines = [f"dist.barrier(); os.write(2, b'* {i}\\n' * (not dist.get_rank())); {text}" for i, text in enumerate(WHY)]
    text = "\n".join(["dist.init_process_group('gloo')", *lines, "dist.barrier()", "dist.destroy_process_group()"])
    _, errors = run(tmp_path, text, *(["--ddp-off"] if off else []))
    said = [part.partition("because of ")[2].partition("\n")[0] for part in errors.split("* ")[1:]]
    assert said == ([""] * len(WHY) if off else list(WHY.values()))
    assert errors.count("because of") == (0 if off else 4)


def test_nccl_without_a_gpu_is_torchs_error_and_one_hint(tmp_path):
    _, errors = run(tmp_path, "dist.init_process_group('nccl')", code=1, CUDA_VISIBLE_DEVICES="")
    assert "NCCL" in errors
    assert "this process has no GPU, which nccl needs; init_process_group('gloo') trains on CPUs" in errors


def test_variables_are_those_of_torchrun(tmp_path):
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME"
    )
    output, _ = run(
        tmp_path,
        "dist.init_process_group('gloo')\n"
        f"found = {{name: os.environ.get(name) for name in {names.split()}}}\n"
        "found['elastic'] = dist.is_torchelastic_launched()\n"
        "every = [None, None]\n"
        "dist.all_gather_object(every, found)\n"
        "print(json.dumps(every))\n"
        "dist.destroy_process_group()",
    )
    (found,) = (json.loads(line) for line in output.splitlines() if line.startswith("["))
    for rank, each in enumerate(found):
        same = {"LOCAL_RANK": str(rank), "RANK": str(rank), "ROLE_RANK": str(rank), "elastic": True}
        same |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default"}
        assert each == {**same, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def test_a_compiled_wrapper_is_compiled_without_a_word(tmp_path):
    """Story: torch's compiler warned of a function of its own, which it found in our forward."""
    _, errors = run(
        tmp_path,
        "dist.init_process_group('gloo')\n"
        "model = torch.compile(DDP(Sequential(Linear(800, 800), Linear(800, 3))), backend='aot_eager')\n"
        "model(torch.ones(2, 800)).sum().backward()\n"
        "dist.destroy_process_group()",
    )
    assert "does not know how to trace" not in errors
