"""Trains by Hugging Face's Trainer, which knows nothing of paceline: `by_trainer.py FOLDER [resume]`."""

import sys
from pathlib import Path

from of_libraries import Model, Rows, write
from transformers import Trainer, TrainerCallback, TrainingArguments


def main(folder, more):
    class Steps(TrainerCallback):
        count = 0

        def on_step_end(self, *_, **__):
            self.count += 1

    steps = Steps()
    given = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=0.01,
        max_steps=12,
        save_steps=6,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    model = Model()
    made = Trainer(
        model,
        given,
        train_dataset=Rows(80),
        eval_dataset=Rows(11),
        callbacks=[steps],
        compute_metrics=lambda found: {"count": len(found.label_ids)},
    )
    made.train(resume_from_checkpoint=str(folder / "out/checkpoint-6") if "resume" in more else None)
    wrapper, count = made.model_wrapped, made.evaluate()["eval_count"]
    write(folder, given.process_index, model, wrapper, evaluated=count, steps=steps.count)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
