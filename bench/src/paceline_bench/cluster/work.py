"""What the nodes of a cluster train: a model with the same weights everywhere, and rows of each node's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.engine.compute.precision import parse_row
from paceline.train.network import network

CLASSES = 3
VOCABULARY, CONTEXT = 4096, 256
Step = Callable[[], float]


class Transformer(nn.Module):
    """A causal language model. *Shapes*: tokens (n, t) to logits (n, vocabulary, t), as cross_entropy takes them.

    ``tied``: the embedding is also the head, as in GPT-2.
    """

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int, tied: bool = False):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.token.weight, std=0.02)
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


class LanguageLSTM(nn.Module):
    """Two layers of LSTM between an embedding and a head. *Shapes*: as `Transformer`'s."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.token, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.token(tokens))[0])
        return logits.transpose(1, 2)


class VisionTransformer(nn.Module):
    """Patches of 16x16, their places, the mean of what the blocks make of them. *Shapes*: (n, 3, edge, edge)."""

    def __init__(self, edge: int, width: int, depth: int, heads: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros((edge // 16) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        # (n, t, 3, heads, each) to three of (n, heads, t, each)
        parts = self.query_key_value(self.before(x)).view(n, t, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, width))
        done: Tensor = x + self.narrow(F.gelu(self.wide(self.after(x))))
        return done


def tiny() -> nn.Module:
    """A convolution, one layer that travels as factors, and one that does not: for the benchmark's own tests."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
    )


LANGUAGE: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: Transformer(VOCABULARY, CONTEXT, 320, 6, 5),
    "gpt2-size": lambda: Transformer(50257, 1024, 768, 12, 12),
    "gpt2-tied": lambda: Transformer(16384, CONTEXT, 384, 6, 6, tied=True),
    "lstm": lambda: LanguageLSTM(10000, 512),
}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "tiny": tiny,
    "nothing": lambda: nn.Linear(1, 1),
    "vit": lambda: VisionTransformer(224, 256, 6, 4),  # 5 million parameters
}
SHAPES = {"tiny": (3, 8, 8), "nothing": (1,), "vit": (3, 224, 224)}


class Work:
    """``name``: one of ours, of ``LANGUAGE`` or ``IMAGES``, or package.module:function; "@128" after it: smaller ones.

    ``row``: an engine and numerics; what torch by hand does as well is taken from it: channels_last, bf16.
    Raises ValueError.
    """

    def __init__(self, name: str, batch: int, rank: int = 0, size: int = 1, row: str = "sequential"):
        self.name, self.batch, self.rank, self.size, self.row = name, batch, rank, size, row
        self.engine, self.numerics = parse_row(row)
        self.kind, _, edge = name.partition("@")
        if edge and not edge.isdigit():
            raise ValueError(f"{name!r}: after @ comes the edge of an image in pixels, such as resnet50v2@128")
        dice = torch.Generator().manual_seed(1 + rank)
        self.shape: tuple[int, ...]
        if self.kind in LANGUAGE:
            self._build, self.shape = LANGUAGE[self.kind], (int(edge or CONTEXT),)
            tokens = torch.randint(0, VOCABULARY, (batch, self.shape[0] + 1), generator=dice)
            self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            return
        if self.kind in IMAGES:
            self._build, self.shape = IMAGES[self.kind], SHAPES[self.kind]
        else:
            net = network(self.kind)
            self._build, self.shape = lambda: net.build(CLASSES), net.input or (3, 224, 224)
        if edge:
            self.shape = (*self.shape[:-2], int(edge), int(edge))
        self.x = torch.randn(batch, *self.shape, generator=dice)
        self.y = torch.randint(0, CLASSES, (batch,), generator=dice)

    def network(self) -> nn.Module:
        """The same weights on every node and at every call."""
        torch.manual_seed(0)
        return self._build()

    def model(self) -> nn.Module:
        """As one lays it out by hand for this row."""
        model = self.network()
        if self.numerics.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def sgd(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def by_hand(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
        """A step as one writes it in torch, in this row's layout and precision."""
        optimizer = optimizer or self.sgd(model)
        x = self.numerics.moved(self.x, torch.device("cpu"))

        def step() -> float:
            optimizer.zero_grad()  # by default to None, and Horovod takes no argument
            with self.numerics.forward(torch.device("cpu")):
                loss = F.cross_entropy(model(x), self.y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.item()

        return step
