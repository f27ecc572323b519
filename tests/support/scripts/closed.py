"""Each of several processes uses its training after the end, and writes the errors: closed.py FOLDER."""

import json
import sys
from pathlib import Path

import torch

import paceline

FOLDER = Path(sys.argv[1])
X, Y = torch.randn(8, 3), torch.arange(8) % 2
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=4, folder=FOLDER / "run") as pace:
    pace.step((X[:2], Y[:2]))
pace.close()
samples = torch.utils.data.TensorDataset(X, Y)
said = {}
for name, use in {
    "step": lambda: pace.step((X[:2], Y[:2])),
    "evaluate": lambda: pace.evaluate(samples, lambda output, y: y.sum()),
    "gather": lambda: pace.gather(1),
    "all_reduce": lambda: pace.all_reduce(1),
    "save": pace.save,
    "restore": pace.restore,
    "export": lambda: pace.export(FOLDER / "weights.safetensors"),
    "once": lambda: pace.once(print),
}.items():
    try:
        use()
    except RuntimeError as error:
        said[name] = str(error)
(FOLDER / str(pace.world.rank)).write_text(json.dumps(said))
