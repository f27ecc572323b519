"""A model that is in eval mode when it trains is reported once; batch norm that is frozen on purpose is not."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import launching
import paceline


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.norm(self.layer(x)))


def build():
    torch.manual_seed(1)
    return nn.Sequential(Body(), nn.Linear(6, 3))


def joined(model, folder=None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return paceline.join(model, optimizer, F.cross_entropy, batch_size=8, engine="sequential", folder=folder)


DATA = torch.ones(8, 4), torch.arange(8) % 3


def hints(folder):
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [line["text"] for line in lines if line["event"] == "hint"]


def whole(model):
    model.eval()


def part(model):
    model[0].eval()


def frozen_norm(model):
    model[0].norm.eval()


def frozen_part(model):
    model[0].eval().requires_grad_(False)


def nothing_there(model):
    model[1].eval()  # a layer that computes the same in both modes


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (whole, "the model is in eval mode at step 0 (as from_pretrained()"),
        (part, "in training mode at step 0, but inside of it 0 (Body) is in eval mode"),
        *((put, "") for put in (frozen_norm, frozen_part, nothing_there, nn.Module.train)),
    ],
)
def test_a_model_in_eval_mode_is_reported_once(put, said, capsys, tmp_path):
    """Story: every from_pretrained() returns one, and it was trained without dropout and with frozen statistics."""
    model = build()
    put(model)
    with joined(model, tmp_path) as pace:
        for _ in range(2):
            pace.step(DATA)
    errors = capsys.readouterr().err
    assert errors.count("eval mode at") + errors.count("is in eval mode (") == bool(said)
    assert said in errors
    assert "\n" not in errors.strip()
    assert len(hints(tmp_path)) == bool(said)


def test_a_loop_of_ones_own_is_told_too(capsys):
    model = build().eval()
    with joined(model) as pace:
        pace.backward(F.cross_entropy(model(DATA[0]), DATA[1]), rows=8)
        pace.update()
    assert "the model is in eval mode at step 0" in capsys.readouterr().err


def test_an_evaluation_that_leaves_it_in_eval_mode_is_told(capsys):
    model = build()
    with joined(model) as pace:
        pace.step(DATA)
        pace.evaluate(torch.utils.data.TensorDataset(*DATA), lambda output, target: (output.argmax(1) == target).sum())
        pace.step(DATA)
        assert capsys.readouterr().err == ""
        model.eval()
        pace.step(DATA)
        assert "the model is in eval mode at step 2" in capsys.readouterr().err
        model.train()
        pace.step(DATA)
        model.eval()
        pace.step(DATA)
    assert capsys.readouterr().err == ""


@pytest.mark.dear
def test_one_process_of_all_says_it(tmp_path):
    script = launching.small(
        tmp_path, "model.eval()", "pace.step((torch.ones(4, 4), torch.ones(4, dtype=int)))", before=""
    )
    done = launching.launch(str(script), engine="processes:2")
    assert done.stderr.count("the model is in eval mode at step 0") == 1


@pytest.mark.dear
@pytest.mark.parametrize("codec", ["topk", "feedback/topk"])
def test_a_codec_that_drops_values_is_reported_with_the_one_that_does_not(tmp_path, codec):
    rows = "pace.step((torch.ones(4, 4), torch.ones(4, dtype=int)))"
    script = launching.small(tmp_path, rows, rows)
    script.write_text(script.read_text().replace("batch_size=8", f"batch_size=8, codec={codec!r}"))
    done = launching.launch(str(script), engine="sequential", num_nodes=2)
    text = "codec 'topk' drops the values that it does not send; feedback/topk sends them in later steps"
    assert done.stderr.count(text) == (codec == "topk")
