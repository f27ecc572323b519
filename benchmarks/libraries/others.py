"""Training scripts that others wrote, as their wheels have them: two ranks under torch's class, then under ours.

    PYTHONPATH=SITE python benchmarks/libraries/others.py FOLDER [NAME ...]

SITE has what `others_requirements.txt` names. FOLDER gets a small model and data sets, and what each script wrote.
Prints a row for each: how far the weights that it saved are apart, relative to the largest.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import torch

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "log", "red", "blue", "green", "big", "small"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRL = (
    "--model_name_or_path model --dtype float32 --per_device_train_batch_size 4 --report_to none --use_cpu "
    "--bf16 False --seed 1 --learning_rate 1e-3"
)
SHORT = f"{TRL} --max_steps 12 --max_length 64"
SOCKEYE = (
    "--prepared-data prepared --validation-source source --validation-target target --use-cpu --dist --shared-vocab "
    "--overwrite-output --num-layers 1 --transformer-model-size 128 --transformer-feed-forward-num-hidden 512 "
    "--transformer-attention-heads 4 --batch-type sentence --batch-size 16 --max-updates 60 --checkpoint-interval 30 "
    "--initial-learning-rate 0.002 --seed 1 --decode-and-evaluate 0"
)
SCRIPTS = {
    "trl sft": f"trl.scripts.sft {SHORT} --dataset_name texts --output_dir",
    "trl dpo": f"trl.scripts.dpo {SHORT} --dataset_name pairs --output_dir",
    "trl kto": f"trl.scripts.kto {SHORT} --dataset_name labelled --output_dir",
    "trl reward": f"trl.scripts.reward {SHORT} --dataset_name pairs --output_dir",
    "trl grpo": f"trl.scripts.grpo {TRL} --max_steps 6 --dataset_name chats --num_generations 4 "
    "--max_completion_length 16 --reward_model_name_or_path trl-reward-torch --output_dir",
    "sockeye train": f"sockeye.train {SOCKEYE} --output",
}
KINDS = {"torch": [], "ours": ["-m", "paceline.ddp"]}


def some(count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


def prepare(folder: Path) -> None:
    """A Llama of a million weights with a tokenizer of its own, and rows for each kind of training."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    random.seed(0)
    torch.manual_seed(0)
    bytes_ = pre_tokenizers.ByteLevel
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = bytes_(), decoders.ByteLevel()
    special = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>", "<pad>"], initial_alphabet=bytes_.alphabet())
    pairs.train_from_iterator([some(20) for _ in range(500)], special)
    ends = dict.fromkeys(("eos_token", "bos_token", "unk_token"), "<end>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token="<pad>", **ends, model_max_length=128)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = {
        "texts": lambda: {"text": some(20)},
        "pairs": lambda: {"prompt": some(6), "chosen": f" {some(5)}", "rejected": f" {some(5)}"},
        "labelled": lambda: {"prompt": some(6), "completion": f" {some(5)}", "label": random.random() < 0.5},
        "chats": lambda: {"prompt": [{"role": "user", "content": some(6)}]},
    }
    for name, row in rows.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "train.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(128)))
    digits = "".join(" ".join(random.choices("0123456789", k=8)) + "\n" for _ in range(2000))
    for name in ("source", "target"):
        (folder / name).write_text(digits)
    words = "--source source --target target --output prepared --shared-vocab --num-samples-per-shard 1000"
    finish(folder, "prepare", [sys.executable, "-m", "sockeye.prepare_data", *words.split()])


def finish(folder: Path, name: str, command: list[str]) -> None:
    """Runs it. Raises ValueError with the end of what it said."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=False)
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise ValueError(f"{name} ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """What a script left of its model."""
    if (folder / "params.best").exists():
        return torch.load(folder / "params.best", weights_only=True)
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    largest = max(float(each.abs().max()) for each in other.values())
    return max(float((one[name] - other[name]).abs().max()) for name in other) / largest


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "prepared").exists():
        prepare(folder)
    print("| script | weights | apart |\n|---|---|---|")
    for name in names or SCRIPTS:
        module, *words = SCRIPTS[name].split()
        short, found = re.sub(r"\W", "-", name), []
        for kind, ours in KINDS.items():
            finish(folder, f"{short}-{kind}", [*LAUNCH, *ours, "-m", module, *words, f"{short}-{kind}"])
            found.append(saved(folder / f"{short}-{kind}"))
        print(f"| `{module}` | {len(found[0])} | {apart(found[1], found[0]):.1e} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
