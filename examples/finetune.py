"""Fine-tunes a model of the `transformers` library, with its own loss. It needs: pip install transformers

python examples/finetune.py
paceline run examples/finetune.py
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import paceline

torch.manual_seed(0)
# random weights, to avoid a download; use BertForSequenceClassification.from_pretrained(...) as usual
config = BertConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=2
)
model = BertForSequenceClassification(config)
for parameter in model.bert.embeddings.parameters():  # paceline detects frozen parameters
    parameter.requires_grad_(False)


class Sentences(torch.utils.data.Dataset):
    """Sentences of 16 words; the first word is 0 or 1, and is also the label."""

    def __len__(self):
        return 1024

    def __getitem__(self, i):
        dice = torch.Generator().manual_seed(i)
        words = torch.randint(2, 64, (16,), generator=dice)
        words[0] = i % 2
        return {"input_ids": words, "attention_mask": torch.ones(16, dtype=torch.long), "labels": words[0]}


def num_right(output, batch):
    return (output.logits.argmax(1) == batch["labels"]).sum()


model.train()  # from_pretrained() returns a model in eval mode, which would train without dropout
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

# without a loss, the model is called with the whole dict, and the .loss of its output is used
with paceline.join(model, optimizer, batch_size=64, clip=1.0) as pace:
    for batch in pace.batches(Sentences(), epochs=2):
        loss = pace.step(batch)
        if batch.ends_epoch:
            accuracy = pace.evaluate(Sentences(), num_right)
            if pace.leader:
                print(f"epoch {batch.epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.1%}")
