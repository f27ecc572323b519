"""What a layer keeps in parameters that do not train, as Keras its moving means, is rank 0's before all look at it."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from launching import launch, small


class Keras(nn.Module):
    """As Keras 3 normalises with torch: moving means are parameters without a gradient, changed in forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.mean = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.count = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.still = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        x = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0))
                self.count += 1
        return self.head((x - self.mean) * self.still)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("engine", "num_nodes", "how"),
    [("sequential", 2, "evaluate"), ("processes:2", 1, "save"), ("processes:2", 1, "export")],
)
def test_they_are_rank_0s_in_every_process(engine, num_nodes, how, tmp_path):
    """Story: each process kept moving means of its own rows, and what was evaluated was no one model."""
    body = (
        "import test_moving_means_are_everyones as own",
        "from torch.utils.data import TensorDataset",
        "torch.manual_seed(pace.world.rank)",
        "keras = own.Keras()",
        "optimizer = torch.optim.SGD(keras.parameters(), 0.1)",
        f"words = {{'batch_size': 8, 'folder': {str(tmp_path / 'run')!r}}}",
        "data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)",
        "with paceline.join(keras, optimizer, torch.nn.functional.cross_entropy, **words) as other:",
        "    rank = other.world.rank",
        "    for step in range(3):",
        "        other.step((torch.randn(4, 4) + rank, torch.arange(4) % 2))",
        "    torch.save(keras.state_dict(), f'{other.folder}-before-{rank}.pt')",
        f"    how = {how!r}",
        "    if how == 'evaluate':",
        "        other.evaluate(data, lambda output, target: (output.argmax(1) == target).sum())",
        "    elif how == 'save':",
        "        other.save()",
        "    else:",
        "        other.export(f'{other.folder}/it.safetensors')",
        "    torch.save(keras.state_dict(), f'{other.folder}-after-{rank}.pt')",
    )
    launch(str(small(tmp_path, *body)), engine=engine, num_nodes=num_nodes)
    before, after = (
        [torch.load(tmp_path / f"run-{when}-{rank}.pt", weights_only=True) for rank in range(2)]
        for when in ("before", "after")
    )
    assert not torch.equal(before[0]["mean"], before[1]["mean"])
    assert after[0].keys() == after[1].keys()
    assert all(torch.equal(value, after[1][name]) for name, value in after[0].items())
    assert all(torch.equal(value, before[0][name]) for name, value in after[0].items())
    if how == "export":
        kept = load_file(tmp_path / "run" / "it.safetensors")
        assert all(torch.equal(value, kept[name]) for name, value in after[0].items())
