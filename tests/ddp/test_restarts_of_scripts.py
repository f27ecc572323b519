"""`paceline run --restarts` of a DDP script: it resumes from the script's own checkpoint, after any error but one that
comes back."""

import pytest
import torch

from launching import begin, finish

pytestmark = [pytest.mark.dear, pytest.mark.long]

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

what, kept = sys.argv[1:]
if what == "early":
    raise RuntimeError("before training")
dist.init_process_group("gloo")
torch.manual_seed(0)
module, step = torch.nn.Linear(4, 2), 0
if os.path.exists(kept):
    state = torch.load(kept)
    module.load_state_dict(state["module"])
    step = state["step"]
model = DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = step
for step in range(first, 8):
    if step == 5 and dist.get_rank() == 1 and (what == "always" or first == 0):
        raise RuntimeError(f"at step {step}")
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if step == 3 and dist.get_rank() == 0:
        torch.save({"module": module.state_dict(), "step": step + 1}, kept + ".part")
        os.replace(kept + ".part", kept)
    dist.barrier()
if dist.get_rank() == 0:
    os.write(1, f"from {first} to {step}, {float(module.bias.detach().sum()):.4f}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(script, what, restarts, code=0):
    words = "--restarts", restarts, "--plan", "processes:2"
    return finish(begin("run", *words, script, what, script.with_name("kept")), code)


def alone():
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        module(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return float(module.bias.detach().sum())


def test_an_error_of_one_rank_is_one_restart(script):
    output, errors = run(script, "once", 3)
    assert errors.count("it resumes from its newest checkpoint") == 1
    assert f"from 4 to 7, {alone():.4f}" in output


def test_an_error_that_comes_back_after_as_many_steps_ends_the_run(script):
    _, errors = run(script, "always", 5, code=1)
    assert "the run failed twice after 1 steps with the same error (RuntimeError: at step 5)" in errors


@pytest.mark.parametrize(("restarts", "said"), [(3, True), (0, False)])
def test_an_error_before_training_is_not_tried_again_and_said(script, restarts, said):
    _, errors = run(script, "early", restarts, code=1)
    assert ("the run failed before training began: not started again" in errors) == said
