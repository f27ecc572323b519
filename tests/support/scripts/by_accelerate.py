"""Trains by Accelerate, which knows nothing of paceline: `by_accelerate.py FOLDER [resume] [bf16]`."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from of_libraries import Model, Rows, write
from torch.utils.data import DataLoader


def main(folder, more):
    PartialState()  # before it: without a GPU it would train alone
    precision, dtype = ("bf16", torch.float32) if "bf16" in more else ("no", torch.float64)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    order = torch.Generator().manual_seed(4)
    model, data = Model(dtype), DataLoader(Rows(80, dtype), batch_size=4, shuffle=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    if "resume" in more:
        accelerator.load_state(str(folder / "state"))
    for epoch in range(1 if "resume" in more else 2):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch == 0 and "resume" not in more:
            accelerator.save_state(str(folder / "state"))
    model.eval()
    labels = [
        accelerator.gather_for_metrics(batch["labels"])
        for batch in accelerator.prepare(DataLoader(Rows(11, dtype), batch_size=4))
    ]
    rank, inner = accelerator.process_index, accelerator.unwrap_model(model)
    write(folder, rank, inner, model, evaluated=len(torch.cat(labels)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
