"""A model's own loss over labels of which some do not count: N processes train what one does, or say the remedy.

Story: -100 in the labels of a `transformers` model and loss=None: two nodes were 1e-2 apart where training moved 1e-2.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import ranks
from nodes import OPTIMIZERS, Rank, gap
from paceline.contract import GlobalBatch
from paceline.errors import NoGradient

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

WORDS, LENGTH, ROWS = 32, 9, 8
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {**SIZES, "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1}
BART = {
    **{f"{part}_{what}": many for part in ("encoder", "decoder") for what, many in (("layers", 1), ("ffn_dim", 32))},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0, "attention_dropout": 0.0},
    **{"vocab_size": WORDS, "d_model": 16, "max_position_embeddings": 40, "pad_token_id": 1},
}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
# class of the model, class of its configuration, what it is made of, its labels
EXACT = {
    "GPT2LMHeadModel": ("GPT2Config", {**GPT2, "vocab_size": WORDS}, "words"),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA, "words"),
    "MixtralForCausalLM": ("MixtralConfig", {**LLAMA, "num_local_experts": 4}, "words"),
    "BertForMaskedLM": ("BertConfig", BERT, "words"),
    "RobertaForMaskedLM": ("RobertaConfig", {**BERT, "max_position_embeddings": 40}, "words"),
    "BertForTokenClassification": ("BertConfig", {**BERT, "num_labels": 5}, "tokens"),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "vocab_size": WORDS, "decoder_start_token_id": 0}, "words"),
    "BartForConditionalGeneration": ("BartConfig", BART, "words"),
    "ElectraForPreTraining": ("ElectraConfig", {**BERT, "embedding_size": 16}, "replaced"),
    "BertForSequenceClassification": ("BertConfig", {**BERT, "num_labels": 5}, "sentences"),
    "BertForQuestionAnswering": ("BertConfig", BERT, "spans"),
}


def build(name):
    config, sizes, labels = EXACT[name]
    torch.manual_seed(2)
    # the library computes losses in float32
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).train(), rows(labels)


def rows(labels):
    """Sentences of unlike lengths; of two rows no label counts."""
    dice = torch.Generator().manual_seed(1)
    words = torch.randint(4, WORDS, (ROWS, LENGTH), generator=dice)
    there = torch.arange(LENGTH)[None] < torch.tensor([4, 5, 7, 2, 3, 9, 4, 6])[:, None]
    kinds = {
        "words": words.where(there, -100),
        "tokens": (words % 5).where(there, -100),
        "replaced": words % 2,
        "sentences": words[:, 0] % 5,
    }
    batch = {"input_ids": words, "attention_mask": there.long()}
    if labels == "spans":
        return {**batch, "start_positions": words[:, 0] % 3, "end_positions": words[:, 1] % 3}
    batch["labels"] = kinds[labels]
    if labels in ("words", "tokens"):
        batch["labels"][-2:] = -100
        batch["labels"][0, 1:3] = -100
    return batch


class Padded(GlobalBatch):
    """A global batch whose shares are each as long as their own longest sentence, as a collate_fn makes them."""

    def __init__(self, batch):
        self.batch, self.weight = batch, float(ROWS)

    def share(self, assignment):
        mine = assignment.rows(ROWS)
        if not mine:
            return None
        part = {name: tensor[mine.start : mine.stop] for name, tensor in self.batch.items()}
        if "start_positions" in part:  # the answer is looked for in the padding, too
            return part
        longest = int(part["attention_mask"].sum(1).max())
        return {name: tensor[:, :longest].contiguous() if tensor.dim() > 1 else tensor for name, tensor in part.items()}


def one_process(model, batch, steps=2):
    model = copy.deepcopy(model)
    optimizer, losses = OPTIMIZERS["sgd"](model.parameters()), []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, losses


@pytest.mark.parametrize("name", EXACT)
def test_processes_with_unlike_numbers_of_labels_train_what_one_does(name):
    """The last rank of three has no label that counts, and pads to a length of its own."""
    model, batch = build(name)
    want, want_losses = one_process(model, batch)
    moved = gap(want, model.state_dict())

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=None, shares=(5, 1, 2)[: link.size])
        return [rank.step(Padded(batch)).vote for _ in range(2)], rank.state()

    for size in (2, 3):
        for votes, state in ranks.run(size, work):
            assert gap(state, want) < 1e-5 * moved
            losses = [vote.loss_sum / vote.weight for vote in votes]
            assert losses == pytest.approx(want_losses, rel=1e-6)
    assert moved > 1e-4


@pytest.mark.parametrize(
    "how", [{"accumulate": 3}, {"accumulate": 8}, {"engine": "replicas:2"}, {"engine": "reproducible:4"}]
)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForTokenClassification", "T5ForConditionalGeneration"])
def test_micro_batches_and_replicas_train_what_one_pass_does(name, how):
    model, batch = build(name)
    want, want_losses = one_process(model, batch)
    start = copy.deepcopy(model.state_dict())
    with paceline.join(
        model, OPTIMIZERS["sgd"](model.parameters()), batch_size=ROWS, **{"engine": "sequential", **how}
    ) as pace:
        losses = [pace.step(batch) for _ in range(2)]
    assert gap(model.state_dict(), want) < 1e-5 * gap(want, start)
    assert losses == pytest.approx(want_losses, rel=1e-6)


def test_a_batch_of_which_no_label_counts_is_an_error():
    model, batch = build("BertForMaskedLM")
    batch["labels"][:] = -100
    pace = joined(model)
    with pytest.raises(NoGradient, match="nothing in the global batch counts"):
        pace.step(batch)
    pace.close()


MIXED = {
    "two losses": (transformers.BertForPreTraining, transformers.BertConfig, BERT),
    "experts": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        {**LLAMA, "num_local_experts": 4, "output_router_logits": True},
    ),
}


def mixed(name, labels="words"):
    model, config, sizes = MIXED[name]
    torch.manual_seed(2)
    batch = rows(labels)
    if name == "two losses":
        batch["next_sentence_label"] = batch["input_ids"][:, 0] % 2
    return model(config(**sizes)).train(), batch


def joined(model, loss=None, **how):
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return paceline.join(model, optimizer, loss, batch_size=ROWS, **{"engine": "sequential", "accumulate": 2, **how})


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("how", [{}, {"engine": "replicas:2", "accumulate": 1}])
def test_another_loss_with_labels_that_do_not_count_is_refused(name, how):
    model, batch = mixed(name)
    pace = joined(model, **how)
    with pytest.raises(ValueError, match="the model's own loss is no single mean over the labels that count") as told:
        pace.step(batch)
    assert len(str(told.value).splitlines()) == 3
    pace.close()


def test_the_remedy_of_the_refusal_is_right():
    """Word for word."""
    model, batch = mixed("experts")
    pace = joined(copy.deepcopy(model))
    with pytest.raises(ValueError, match="loss=lambda") as told:
        pace.step(batch)
    pace.close()
    loss = eval("dict(" + "".join(str(told.value).splitlines()[1:]) + ")", {"F": F, "dict": dict})["loss"]
    states = []
    for how in ({"accumulate": 1}, {"accumulate": 3}):
        mine = copy.deepcopy(model)
        with joined(mine, loss, **how) as pace:
            pace.step(batch)
        states.append(mine.state_dict())
    assert gap(*states) < 1e-5 * gap(states[0], model.state_dict())


def test_alone_nothing_is_refused():
    model, batch = mixed("two losses")
    want, _ = one_process(model, batch, 1)
    with joined(model, accumulate=1) as pace:
        pace.step(batch)
    assert gap(model.state_dict(), want) < 1e-6


def test_experts_that_are_balanced_over_a_part_are_reported_once(capsys):
    model, batch = mixed("experts")
    batch["labels"] = batch["input_ids"]
    with joined(model) as pace:
        for _ in range(2):
            pace.step(batch)
    assert capsys.readouterr().err.count("has an auxiliary loss (aux_loss, of a mixture of experts)") == 1


class Own(nn.Module):
    """No model of the library, and its targets are called otherwise."""

    def __init__(self, ignored=0, weights=None):
        super().__init__()
        self.layer, self.ignored = nn.Linear(4, 5), ignored
        self.register_buffer("weights", weights)

    def forward(self, x, wanted):
        places = self.layer(x)
        return SimpleNamespace(
            loss=F.cross_entropy(places.flatten(0, 1), wanted.view(-1), self.weights, ignore_index=self.ignored)
        )


@pytest.mark.parametrize("weights", [None, torch.arange(1.0, 6.0)])
@pytest.mark.parametrize("how", [{}, {"accumulate": 5}, {"engine": "replicas:2", "accumulate": 1}])
def test_so_is_a_model_of_ones_own(weights, how):
    torch.manual_seed(4)
    model, batch = (
        Own(weights=weights),
        {"x": torch.randn(ROWS, 3, 4), "wanted": torch.arange(ROWS * 3).view(-1, 3) % 5},
    )
    batch["wanted"][:3] = 0
    want, want_losses = one_process(model, batch, 1)
    start = copy.deepcopy(model.state_dict())
    with joined(model, **how) as pace:
        assert pace.step(batch) == pytest.approx(want_losses[0], rel=1e-6)
    assert gap(model.state_dict(), want) < 1e-5 * gap(want, start)
