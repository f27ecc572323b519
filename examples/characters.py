"""Trains a character-level transformer on the text of this project's licence.

python examples/characters.py
paceline run examples/characters.py
"""

from pathlib import Path

import torch
from torch import nn

import paceline

STEPS, LENGTH, WIDTH = 45, 32, 64
torch.manual_seed(0)

text = (Path(__file__).resolve().parents[1] / "LICENSE").read_text()
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])


class Windows(torch.utils.data.Dataset):
    """A window of characters as input, and the next character of each position as target."""

    def __len__(self):
        return len(codes) - LENGTH

    def __getitem__(self, start):
        window = codes[start : start + LENGTH + 1]
        return window[:-1], window[1:]


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(letters), WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, seen):
        # (samples, length) -> (samples, length, letters)
        length = seen.shape[1]
        ahead = nn.Transformer.generate_square_subsequent_mask(length)  # causal mask
        x = self.letters(seen) + self.places(torch.arange(length))
        return self.head(self.blocks(x, mask=ahead, is_causal=True))


def loss(output, following):
    return nn.functional.cross_entropy(output.flatten(0, 1), following.flatten())


model = Speller()
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=STEPS)

with paceline.join(model, optimizer, loss, batch_size=16, clip=1.0, scheduler=scheduler) as pace:
    for batch in pace.batches(Windows()):
        value = pace.step(batch)
        if pace.num_steps % 15 == 0 and pace.leader:
            print(f"step {pace.num_steps}: loss {value:.3f}")
        if pace.num_steps == STEPS:
            break

    if pace.leader:
        model.eval()
        written = codes[:8]
        for _ in range(40):
            with torch.no_grad():
                guess = model(written[None, -LENGTH:])[0, -1].softmax(0)
            written = torch.cat([written, guess.multinomial(1)])
        print("".join(letters[code] for code in written))
