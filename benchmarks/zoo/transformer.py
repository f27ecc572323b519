"""Models of the transformers library, from a configuration of a few small layers; the loss is their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, RMSprop
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from zoo.case import Named, Parts, family, images, labels, lengths, numbers, padded

case = family("transformers")
WORDS, TIME = 60, 10
WARM = partial(get_linear_schedule_with_warmup, num_warmup_steps=2, num_training_steps=8)


def ids(seed: int = 6) -> Tensor:
    return 3 + labels(WORDS - 3, TIME, seed=seed)


def count_all(batch: Any) -> float:
    """Of labels, those that count."""
    return float((batch["labels"] != -100).sum())


def count_next(batch: Any) -> float:
    return float((batch["labels"][:, 1:] != -100).sum())


def texts() -> Named:
    """Every word counts."""
    words = ids()
    return Named(input_ids=words, labels=words)


def padded_texts() -> Named:
    words, length = ids(), lengths(4, TIME)
    mask = (torch.arange(TIME) < length[:, None]).long()
    return Named(input_ids=padded(words, length), attention_mask=mask, labels=padded(words, length, -100))


def masked_texts() -> Named:
    words = ids()
    hidden = labels(4, TIME, seed=12) == 0
    hidden[:, 0] = True
    return Named(input_ids=torch.where(hidden, 2, words), labels=torch.where(hidden, words, -100))


def small(**words: Any) -> dict[str, Any]:
    """What most configurations call their sizes."""
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    }
    return sizes | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | words


def causal(**words: Any) -> dict[str, Any]:
    sizes = small(num_key_value_heads=1, attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, **words)
    return {name: value for name, value in sizes.items() if not name.endswith("dropout_prob")}


def build(kind: str, config: Any) -> Any:
    config._experts_implementation = "eager"  # the grouped product has no float64
    return getattr(hf, kind)(config).to(torch.get_default_dtype()).train()


GPT2 = {
    "vocab_size": WORDS,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@case(AdamW, lr=0.003, weight_decay=0.1, join={"clip": 1.0}, schedule=WARM)
def gpt2() -> Parts:
    return build("GPT2LMHeadModel", hf.GPT2Config(**GPT2, **QUIET)), texts(), None


@case(AdamW, lr=0.003, counts=count_next)
def gpt2_padded() -> Parts:
    return build("GPT2LMHeadModel", hf.GPT2Config(**GPT2, **QUIET)), padded_texts(), None


@case(AdamW, lr=0.003, schedule=partial(get_cosine_schedule_with_warmup, num_warmup_steps=2, num_training_steps=8))
def llama() -> Parts:
    return build("LlamaForCausalLM", hf.LlamaConfig(**causal())), texts(), None


@case(AdamW, lr=0.003, counts=count_next, join={"clip": 0.5})
def qwen2_padded() -> Parts:
    return build("Qwen2ForCausalLM", hf.Qwen2Config(**causal(tie_word_embeddings=True))), padded_texts(), None


@case(AdamW, lr=0.003)
def mixtral() -> Parts:
    config = hf.MixtralConfig(**causal(num_local_experts=4, num_experts_per_tok=2))
    return build("MixtralForCausalLM", config), texts(), None


@case(AdamW, lr=0.003, differs="auxiliary")
def mixtral_balanced() -> Parts:
    """With the router's loss: a product of two means over the batch."""
    words = causal(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5)
    return build("MixtralForCausalLM", hf.MixtralConfig(**words)), texts(), None


@case(Adam, lr=0.003)
def mamba() -> Parts:
    config = hf.MambaConfig(vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False)
    return build("MambaForCausalLM", config), texts(), None


@case(Adafactor, lr=0.01, counts=count_all)
def bert_masked() -> Parts:
    return build("BertForMaskedLM", hf.BertConfig(**small())), masked_texts(), None


@case(AdamW, lr=0.003)
def roberta_classes() -> Parts:
    config = hf.RobertaConfig(**small(num_labels=3, classifier_dropout=0.0, pad_token_id=0))
    words, length = ids(), lengths(4, TIME)
    mask = (torch.arange(TIME) < length[:, None]).long()
    data = Named(input_ids=padded(words, length), attention_mask=mask, labels=labels(3))
    return build("RobertaForSequenceClassification", config), data, None


@case(Adam, lr=0.003)
def bert_regression() -> Parts:
    config = hf.BertConfig(**small(num_labels=1, classifier_dropout=0.0))
    return build("BertForSequenceClassification", config), Named(input_ids=ids(), labels=numbers()), None


@case(AdamW, lr=0.003, counts=count_all)
def distilbert_tags() -> Parts:
    config = hf.DistilBertConfig(
        vocab_size=WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, num_labels=4,
    )  # fmt: skip
    length = lengths(3, TIME)
    mask = (torch.arange(TIME) < length[:, None]).long()
    data = Named(input_ids=ids(), attention_mask=mask, labels=padded(labels(4, TIME), length, -100))
    return build("DistilBertForTokenClassification", config), data, None


@case(AdamW, lr=0.003)
def bert_answers() -> Parts:
    """Where an answer begins and ends."""
    config = hf.BertConfig(**small())
    data = Named(input_ids=ids(), start_positions=labels(TIME), end_positions=labels(TIME, seed=13))
    return build("BertForQuestionAnswering", config), data, None


@case(Adam, lr=0.003, counts=count_all)
def albert_masked() -> Parts:
    """Both layers are one."""
    return build("AlbertForMaskedLM", hf.AlbertConfig(**small(embedding_size=8))), masked_texts(), None


@case(AdamW, lr=0.003, counts=lambda batch: float(batch["attention_mask"].sum()))
def electra_detector() -> Parts:
    """A mean over the words that are there: which of them were replaced?"""
    config = hf.ElectraConfig(**small(embedding_size=8))
    length = lengths(4, TIME)
    mask = (torch.arange(TIME) < length[:, None]).long()
    return (
        build("ElectraForPreTraining", config),
        Named(input_ids=ids(), attention_mask=mask, labels=labels(2, TIME)),
        None,
    )


@case(Adafactor, lr=0.01, counts=count_all)
def t5() -> Parts:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    target = padded(ids(7), lengths(3, TIME, 9), -100)
    return build("T5ForConditionalGeneration", config), Named(input_ids=ids(), labels=target), None


@case(AdamW, lr=0.003, counts=count_all)
def bart() -> Parts:
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    target = padded(ids(7), lengths(3, TIME, 9), -100)
    return build("BartForConditionalGeneration", config), Named(input_ids=ids(), labels=target), None


@case(AdamW, lr=0.003, counts=count_all)
def whisper() -> Parts:
    config = hf.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
        max_target_positions=16, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    target = padded(ids(7), lengths(3, TIME, 9), -100)
    return build("WhisperForConditionalGeneration", config), Named(input_features=numbers(8, 20), labels=target), None


@case(Adam, lr=0.001)
def wav2vec2_ctc() -> Parts:
    """The sum of what each row costs: refused, or counted by rows."""
    config = hf.Wav2Vec2Config(
        **small(vocab_size=12, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, activation_dropout=0.0,
        ctc_loss_reduction="mean", ctc_zero_infinity=True,
    )  # fmt: skip
    text = padded(1 + labels(11, 4), lengths(1, 4), -100)
    return build("Wav2Vec2ForCTC", config), Named(input_values=numbers(320), labels=text), None


@case(AdamW, lr=0.003)
def vit() -> Parts:
    config = hf.ViTConfig(**{**small(num_labels=5), "image_size": 16, "patch_size": 8})
    pictures = images(16)
    return (
        build("ViTForImageClassification", config),
        Named(pixel_values=pictures.tensors[0], labels=pictures.tensors[1]),
        None,
    )


def with_loss(model: Any, batch: Any) -> Any:
    return model(**batch, return_loss=True)


@case(
    AdamW,
    lr=0.003,
    join={"forward": with_loss},
    differs="compares",
)
def clip() -> Parts:
    """Images and texts, each against all others of the batch."""
    sizes = small(attention_dropout=0.0)
    text = {**sizes, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = hf.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8}, projection_dim=8
    )
    data = Named(input_ids=ids(), pixel_values=images(16).tensors[0])
    return build("CLIPModel", config), data, None


@case(SGD, lr=0.05, momentum=0.9, counts=count_next)
def opt_padded() -> Parts:
    config = hf.OPTConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, dropout=0.0,
        max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return build("OPTForCausalLM", config), padded_texts(), None


@case(RMSprop, lr=0.001)
def gpt_neox() -> Parts:
    words = {name: value for name, value in causal().items() if name != "num_key_value_heads"}
    return build("GPTNeoXForCausalLM", hf.GPTNeoXConfig(**words, hidden_dropout=0.0)), texts(), None


@case(AdamW, lr=0.003, join={"batch_norm": "sync"})
def segformer() -> Parts:
    """A class for each patch of an image; its head has batch norm."""
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2], hidden_dropout_prob=0.0, drop_path_rate=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, decoder_hidden_size=16, num_labels=4,
    )  # fmt: skip
    data = Named(pixel_values=images(16).tensors[0], labels=labels(4, 16, 16))
    return build("SegformerForSemanticSegmentation", config), data, None


@case(AdamW, lr=0.003)
def gpt2_trainer_loss() -> Parts:
    """A loss beside the model, over the words that count, as (sum, weight)."""
    return build("GPT2LMHeadModel", hf.GPT2Config(**GPT2, **QUIET)), padded_texts(), by_words


def by_words(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    wanted = batch["labels"][:, 1:]
    loss = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].transpose(1, 2), wanted, ignore_index=-100, reduction="sum"
    )
    return loss, (wanted != -100).sum()
