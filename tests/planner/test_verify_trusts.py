"""`verify` says "the same" of thirty models that are, and where it looks for causes all the same it finds none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from verifying import HIDDEN, IN, OUT, Script, kinds, verified

T = 5


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(IN, HIDDEN), *between, nn.Tanh(), nn.Linear(HIDDEN, OUT))


class By(nn.Module):
    """Layers by name, and a forward pass that uses them."""

    def __init__(self, run: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def series(x: Tensor, y: Tensor, i: int) -> Any:
    return torch.stack([x.roll(t) for t in range(T)]), y


def image(x: Tensor, y: Tensor, i: int) -> Any:
    return torch.outer(x, x)[None], y


def words(x: Tensor, y: Tensor, i: int) -> Any:
    return (x * 3).long().clamp(-5, 5) + 5, y


def text(x: Tensor, y: Tensor, i: int) -> Any:
    ids = words(x, y, i)[0]
    return {"input_ids": ids, "labels": ids}


def masked(x: Tensor, y: Tensor, i: int) -> Any:
    return words(x, y, i)[0], torch.where(torch.arange(IN) < 1 + i % 5, y, -100)


def masked_sum(output: Tensor, y: Tensor) -> Any:
    counts = y != -100
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum"), counts.sum()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    ).train()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).train()


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=16,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=OUT,
            max_position_embeddings=16,
        )
    ).train()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, HIDDEN), nn.Linear(HIDDEN, 11, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(11, OUT)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.head(self.embed(ids).mean(1)))


class Experts(nn.Module):
    """Each sample goes to the expert that its gate prefers; none is full."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, 3), nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        chosen, out = weights.argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            taken = (chosen == number).nonzero()[:, 0]
            if len(taken):
                out = out.index_add(0, taken, expert(x[taken]) * weights[taken, number, None])
        return out


class Follower(nn.Module):
    """A momentum encoder that moves once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                mine.lerp_(its, 0.2)
        return self.fast(x) - self.slow(x.detach())


class Positions(nn.Module):
    """A cache that forward makes when it is first called, and an activation that it keeps to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.linspace(0, 1, HIDDEN, dtype=x.dtype)
        self.last = (x + self.cache).detach()
        return x + self.cache


class Counter(nn.Module):
    """Warms up over the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        return x * min(1.0, 0.2 * self.calls) * self.steps


def lstm() -> nn.Module:
    return By(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]),
        lstm=nn.LSTM(IN, HIDDEN, batch_first=True),
        head=nn.Linear(HIDDEN, OUT),
    )


def gru_time_first() -> nn.Module:
    return By(lambda m, x: m.head(m.gru(x.transpose(0, 1))[0][-1]), gru=nn.GRU(IN, HIDDEN), head=nn.Linear(HIDDEN, OUT))


def packed_forward(m: Any, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), T) - (x[:, 0, 0] > 0).long()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.head(m.lstm(packed)[1][0][-1])


def attention() -> nn.Module:
    return By(
        lambda m, x: m.head(m.attend(m.up(x)).mean(1)),
        up=nn.Linear(IN, HIDDEN),
        attend=nn.TransformerEncoderLayer(HIDDEN, 2, 16, batch_first=True),
        head=nn.Linear(HIDDEN, OUT),
    )


def time_first_attention() -> nn.Module:
    return By(
        lambda m, x: m.head(m.attend(m.up(x).transpose(0, 1)).mean(0)),
        up=nn.Linear(IN, HIDDEN),
        attend=nn.TransformerEncoderLayer(HIDDEN, 2, 16),
        head=nn.Linear(HIDDEN, OUT),
    )


def conv(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *between, nn.ReLU(), nn.Flatten(), nn.Linear(64, OUT))


def frozen_norm(model: nn.Module) -> None:
    model[1].eval()
    model[1].requires_grad_(False)


def linear_hook(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda grad: 0.5 * grad)


def own_loop(pace: Any, model: nn.Module, rows: Any) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def named_terms(output: Tensor, y: Tensor) -> Any:
    return {"entropy": F.cross_entropy(output, y), "size": 0.1 * output.square().mean()}


GOOD = {
    "layers": Script(mlp),
    "Adam": Script(mlp, optimizer=adam),
    "clipped": Script(mlp, options={"clip": 0.1}),
    "micro-batches": Script(mlp, options={"accumulate": 2}),
    "own loop": Script(mlp, own=own_loop),
    "dropout": Script(lambda: mlp(nn.Dropout(0.5))),
    "layer norm": Script(lambda: mlp(nn.LayerNorm(HIDDEN))),
    "group norm": Script(lambda: conv(nn.GroupNorm(2, 4)), item=image),
    "instance norm": Script(lambda: conv(nn.InstanceNorm2d(4)), item=image),
    "frozen batch norm": Script(lambda: mlp(nn.BatchNorm1d(HIDDEN)), prepare=frozen_norm),
    "spectral norm": Script(lambda: mlp(parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN)))),
    "weight norm": Script(lambda: mlp(parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN)))),
    "lstm": Script(lstm, item=series),
    "gru, time first": Script(gru_time_first, item=series),
    "packed sequences": Script(
        lambda: By(packed_forward, lstm=nn.LSTM(IN, HIDDEN, batch_first=True), head=nn.Linear(HIDDEN, OUT)), item=series
    ),
    "transformer": Script(attention, item=series),
    "transformer, time first": Script(time_first_attention, item=series),
    "tied weights": Script(Tied, item=words),
    "experts": Script(lambda: mlp(Experts())),
    "momentum encoder": Script(lambda: mlp(Follower())),
    "caches": Script(lambda: mlp(Positions())),
    "counters": Script(lambda: mlp(Counter())),
    "linear hook": Script(mlp, prepare=linear_hook),
    "terms by name": Script(mlp, named_terms),
    "sum and weight": Script(
        lambda: By(lambda m, ids: m.head(m.embed(ids)), embed=nn.Embedding(11, HIDDEN), head=nn.Linear(HIDDEN, OUT)),
        masked_sum,
        masked,
    ),
    "autoencoder": Script(
        lambda: nn.Sequential(nn.Linear(IN, 3), nn.Tanh(), nn.Linear(3, IN)), F.mse_loss, lambda x, y, i: (x, x)
    ),
    "activation checkpointing": Script(
        lambda: By(
            lambda m, x: m.head(checkpoint(m.body, m.first(x), use_reentrant=False)),
            first=nn.Linear(IN, HIDDEN),
            body=nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()),
            head=nn.Linear(HIDDEN, OUT),
        )
    ),
    "two inputs": Script(
        lambda: By(lambda m, a, b: m.head(m.first(a) * m.first(b)), first=nn.Linear(IN, 4), head=nn.Linear(4, OUT)),
        item=lambda x, y, i: (x, x.flip(0), y),
    ),
    "own loss": Script(
        lambda: By(
            lambda m, x, y: SimpleNamespace(logits=m.net(x), loss=F.cross_entropy(m.net(x), y)),
            net=mlp(),
        ),
        None,
        lambda x, y, i: {"x": x, "y": y},
    ),
    "GPT-2": Script(gpt2, None, text, adam),
    "Llama": Script(llama, None, text, adam),
    "BERT": Script(bert, None, lambda x, y, i: {"input_ids": words(x, y, i)[0], "labels": y}, adam),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_model_is_the_same_and_has_no_cause(name, tmp_path, monkeypatch):
    GOOD[name].model()  # two threads that import transformers at once disturb each other
    found = verified(GOOD[name], tmp_path, monkeypatch, looks=True)
    assert found.same, found
    assert kinds(found) <= {"unknown", "loop", "float32"}, found.causes
    assert kinds(found) == {"float32"} or found.close


METHODS = {
    "server": {"exchange": "server"},
    "diloco": {"exchange": "diloco:1,lr=1,beta=0"},
    "lowrank": {"exchange": "allreduce:forms=dense", "codec": f"feedback/lowrank:rank={HIDDEN},min_rate=0"},
    "pipeline": {"engine": "pipeline:2,micros=2,cut=1"},
}
LOSSY = {
    "diloco": {"exchange": "diloco:2"},
    "lowrank": {"codec": "feedback/lowrank:rank=1,min_rate=0"},
    "qsgd": {"codec": "qsgd"},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_without_loss_is_the_same(name, tmp_path, monkeypatch):
    assert verified(Script(mlp, **METHODS[name]), tmp_path, monkeypatch).close


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_method_is_the_only_cause(name, tmp_path, monkeypatch):
    found = verified(Script(mlp, **LOSSY[name]), tmp_path, monkeypatch)
    assert not found.same
    assert kinds(found) == {"synchronisation"}


def test_there_are_thirty():
    assert len(GOOD) >= 30
