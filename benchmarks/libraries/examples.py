"""Accelerate's examples, as its repository has them: two ranks under torch's class, then under ours.

    PYTHONPATH=SITE python benchmarks/libraries/examples.py ACCELERATE FOLDER [NAME ...]

SITE has what `others_requirements.txt` names, ACCELERATE is a checkout. FOLDER gets what the examples would load from
a hub, under the same names: a small BERT, a small Llama, sentences and a metric. Prints a row for each: how far the
weights, in float64, are apart at its end, relative to the largest.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from others import KINDS, LAUNCH, apart, finish, prepare, some

KEEP = Path(__file__).with_name("keep_weights.py").absolute()
NAMES = {
    "nlp_example": "--cpu",
    "complete_nlp_example": "--cpu --output_dir out --checkpointing_steps epoch",
    "by_feature/automatic_gradient_accumulation": "--cpu",
    "by_feature/checkpointing": "--cpu --output_dir out --checkpointing_steps epoch",
    "by_feature/cross_validation": "--cpu --num_folds 2",
    "by_feature/ddp_comm_hook": "--cpu --ddp_comm_hook fp16",
    "by_feature/early_stopping": "--cpu",
    "by_feature/gradient_accumulation": "--cpu --gradient_accumulation_steps 2",
    "by_feature/gradient_accumulation_for_autoregressive_models": "--cpu --gradient_accumulation_steps 2",
    "by_feature/local_sgd": "--cpu --local_sgd_steps 2",
    "by_feature/memory": "--cpu",
    "by_feature/multi_process_metrics": "--cpu",
    "by_feature/profiler": "--cpu",
    "by_feature/schedule_free": "--cpu",
    "by_feature/tracking": "--cpu",
}
METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="accuracy", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
"""


def stand_ins(folder: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128, pad_token_id=1)
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    tokenizer.save_pretrained(folder / "bert-base-cased")
    (folder / "HuggingFaceTB").mkdir(exist_ok=True)
    (folder / "HuggingFaceTB" / "SmolLM-360M").symlink_to(folder / "model")
    (folder / "glue").mkdir(exist_ok=True)
    (folder / "glue" / "glue.py").write_text(METRIC)
    random.seed(1)
    pairs = lambda i: {"idx": i, "sentence1": some(8), "sentence2": some(8), "label": i % 2}  # noqa: E731
    data_set(folder / "nyu-mll" / "glue", "mrpc", pairs)
    data_set(folder / "Salesforce" / "wikitext", "wikitext-2-v1", lambda i: {"text": some(16)}, 512)


def data_set(folder: Path, name: str, row: Callable[[int], dict[str, str | int]], count: int = 128) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": count, "validation": 32, "test": 32}
    listed = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in files)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{listed}---\n")
    for split, num_rows in files.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(num_rows)))


def main(accelerate: Path, folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "prepared").exists():
        prepare(folder)
    if not (folder / "glue").exists():
        stand_ins(folder)
    print("| script | weights | apart |\n|---|---|---|")
    for name in names or NAMES:
        script, found = accelerate.absolute() / "examples" / f"{name}.py", []
        for kind, ours in KINDS.items():
            out = f"{Path(name).name}-{kind}"
            finish(folder, out, [*LAUNCH, *ours, str(KEEP), out, str(script), *NAMES[name].split()])
            said = torch.load(folder / f"{out}.pt", weights_only=True)
            assert said["class"].startswith("paceline") == bool(ours), said["class"]
            assert {each.dtype for each in said["weights"].values()} == {torch.float64}
            found.append(said["weights"])
        print(f"| `{name}.py` | {len(found[0])} | {apart(found[1], found[0]):.1e} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).absolute(), sys.argv[3:])
