"""Sequences: recurrent and convolutional networks, padded, packed, masked, aligned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.utils.data import TensorDataset

from zoo.case import Named, Parts, dice, family, labels, lengths, numbers, padded

case = family("sequences")
WORDS, TIME = 40, 9


def tokens(seed: int = 6) -> Tensor:
    return 1 + labels(WORDS - 1, TIME, seed=seed)


class LSTM(nn.Module):
    def __init__(self, layers: int = 2, tied: bool = True):
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, 24), nn.LSTM(24, 24, layers, batch_first=True)
        self.head = nn.Linear(24, WORDS)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(ids))[0]).transpose(1, 2)


@case(SGD, lr=1.0, join={"clip": 0.25})
def lstm_language() -> Parts:
    """The embedding is the output's weight; every row has as many words."""
    ids = tokens()
    return LSTM(), TensorDataset(ids[:, :-1], ids[:, 1:]), F.cross_entropy


def by_words(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, ignore_index=0, reduction="sum"), (target != 0).sum()


@case(Adam, lr=0.01)
def lstm_padded() -> Parts:
    ids = padded(tokens(), lengths(3, TIME))
    return LSTM(1, False), TensorDataset(ids[:, :-1], ids[:, 1:]), by_words


@case(NAdam, lr=0.01)
def tagger_ignoring() -> Parts:
    """Torch's own loss, which leaves out what has no tag."""
    tags = padded(labels(5, TIME), lengths(2, TIME), -100)
    model = nn.Sequential(
        nn.Embedding(WORDS, 16), nn.Flatten(0, 1), nn.Linear(16, 5), nn.Unflatten(0, (-1, TIME)), Swap()
    )
    return model, TensorDataset(tokens(), tags), F.cross_entropy


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Packed(nn.Module):
    """Sequences of unlike lengths, packed, through a recurrent network in both directions."""

    def __init__(self, kind: type[nn.Module] = nn.GRU):
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, 16), kind(16, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 3)

    def forward(self, ids: Tensor, length: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), length.cpu(), batch_first=True, enforce_sorted=False)
        last = self.rnn(packed)[1]
        last = last[0] if isinstance(last, tuple) else last
        return self.head(torch.cat([last[0], last[1]], 1))


@case(RMSprop, lr=0.003)
def gru_packed() -> Parts:
    return Packed(), TensorDataset(tokens(), lengths(2, TIME), labels(3)), F.cross_entropy


@case(Adadelta, lr=1.0)
def lstm_packed() -> Parts:
    return Packed(nn.LSTM), TensorDataset(tokens(), lengths(2, TIME), labels(3)), F.cross_entropy


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, 16), nn.RNN(16, 12, 2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, ids: Tensor, length: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), length.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=TIME)
        return self.head(out).transpose(1, 2)


@case(Adagrad, lr=0.05)
def rnn_tagger() -> Parts:
    length = lengths(2, TIME)
    data = TensorDataset(tokens(), length, padded(labels(4, TIME), length, -100))
    return Tagger(), data, nn.CrossEntropyLoss()


class Translate(nn.Module):
    """From sequence to sequence by attention, taught by what is right."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 16), nn.Embedding(WORDS, 16)
        self.encode, self.cell = nn.GRU(16, 16, batch_first=True), nn.GRUCell(32, 16)
        self.head = nn.Linear(32, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, last = self.encode(self.source(source))
        blank = (source == 0)[:, :, None]
        state, context, said = last[0], seen.mean(1), []
        for word in self.target(target[:, :-1]).unbind(1):
            state = self.cell(torch.cat([word, context], 1), state)
            weight = (seen @ state[:, :, None]).masked_fill(blank, -1e9).softmax(1)
            context = (weight * seen).sum(1)
            said.append(self.head(torch.cat([state, context], 1)))
        return torch.stack(said, 2)


def next_words(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    target = batch["target"][:, 1:]
    return F.cross_entropy(output, target, ignore_index=0, reduction="sum"), (target != 0).sum()


@case(Adam, lr=0.005, join={"clip": 1.0})
def attention_seq2seq() -> Parts:
    source, target = padded(tokens(), lengths(3, TIME)), padded(tokens(7), lengths(3, TIME, 8))
    return Translate(), Named(source=source, target=target), next_words


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 16, 3, stride=2, padding=1)
        self.rnn, self.head = nn.LSTM(16, 12, bidirectional=True, batch_first=True), nn.Linear(24, 8)

    def forward(self, sound: Tensor, **_: Tensor) -> Tensor:
        return self.head(self.rnn(F.relu(self.conv(sound)).transpose(1, 2))[0]).log_softmax(-1)


def aligned(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    rows, time = output.shape[:2]
    spoken = F.ctc_loss(
        output.transpose(0, 1), batch["text"], torch.full((rows,), time), batch["length"], reduction="none"
    )
    return (spoken / batch["length"]).sum(), rows


@case(AdamW, lr=0.005)
def ctc_speech() -> Parts:
    text = 1 + labels(7, 5)
    return Speech(), Named(sound=numbers(6, 30), text=text, length=lengths(1, 5)), aligned


def ctc_mean(output: Tensor, batch: Any) -> Tensor:
    rows, time = output.shape[:2]
    return F.ctc_loss(output.transpose(0, 1), batch["text"], torch.full((rows,), time), batch["length"])


@case(Adam, lr=0.005)
def ctc_speech_mean() -> Parts:
    """Torch's own mean: of each row by its length, then over rows."""
    text = 1 + labels(7, 5)
    return Speech(), Named(sound=numbers(6, 30), text=text, length=lengths(1, 5)), ctc_mean


class TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(4 if i == 0 else 12, 12, 3, dilation=2**i)) for i in range(3))
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(F.pad(x, (2 * 2**i, 0))))
        return self.head(x[:, :, -1]).squeeze(1)


@case(Adam, lr=0.01)
def temporal_convolutions() -> Parts:
    return TCN(), TensorDataset(numbers(4, 16), numbers(seed=8)), nn.HuberLoss()


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 12)
        self.both = nn.ModuleList(nn.Conv1d(12, 24, 2, dilation=2**i) for i in range(4))
        self.out = nn.ModuleList(nn.Conv1d(12, 12, 1) for _ in range(4))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(12, 16, 1))

    def forward(self, sound: Tensor) -> Tensor:
        x, skips = self.words(sound).transpose(1, 2), 0
        for i, (both, out) in enumerate(zip(self.both, self.out, strict=True)):
            gate, value = both(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = out(torch.tanh(value) * gate.sigmoid())
            x, skips = x + y, skips + y
        return self.head(skips)


@case(Adam, lr=0.005)
def wavenet() -> Parts:
    sound = labels(16, 17)
    return WaveNet(), TensorDataset(sound[:, :-1], sound[:, 1:]), F.cross_entropy


class GRUD(nn.Module):
    """What is missing decays to its mean, by how long it has been missing."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.cell, self.head = nn.Linear(3, 3), nn.GRUCell(6, 10), nn.Linear(10, 2)
        self.register_buffer("usual", torch.zeros(3))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        h, last, gap = x.new_zeros(len(x), 10), self.usual.expand(len(x), 3), x.new_zeros(len(x), 3)
        for value, there in zip(x.unbind(1), seen.unbind(1), strict=True):
            keep = torch.exp(-F.relu(self.decay(gap)))
            guess = keep * last + (1 - keep) * self.usual
            h = self.cell(torch.cat([torch.where(there > 0, value, guess), there], 1), h)
            last, gap = torch.where(there > 0, value, last), torch.where(there > 0, 0.0, gap + 1)
        return self.head(h)


@case(Adam, lr=0.01, weight_decay=1e-3, amsgrad=True)
def gru_with_decay() -> Parts:
    seen = labels(2, 7, 3).to(torch.get_default_dtype())
    return GRUD(), TensorDataset(numbers(7, 3), seen, labels(2)), F.cross_entropy


class Encoder(nn.Module):
    """Torch's own encoder, and a mask over what is padding."""

    def __init__(self, first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=first, activation="gelu")
        self.words = nn.Embedding(WORDS, 16, padding_idx=0)
        self.place = nn.Parameter(torch.randn(TIME, 16, generator=dice()) / 4)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        blank = ids == 0
        out = self.layers(self.words(ids) + self.place, src_key_padding_mask=blank)
        return self.head((out * ~blank[..., None]).sum(1) / (~blank).sum(1, keepdim=True))


@case(AdamW, lr=0.003)
def encoder_masked() -> Parts:
    return Encoder(True), TensorDataset(padded(tokens(), lengths(3, TIME)), labels(3)), F.cross_entropy


@case(NAdam, lr=0.003, decoupled_weight_decay=True)
def encoder_norm_last() -> Parts:
    return Encoder(False), TensorDataset(padded(tokens(), lengths(3, TIME)), labels(3)), F.cross_entropy


class StateSpace(nn.Module):
    """A diagonal linear recurrence, by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.angle = nn.Parameter(torch.full((16,), -1.0)), nn.Parameter(torch.linspace(0, 3, 16))
        self.into, self.out = nn.Linear(3, 16), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        pole = torch.exp(torch.complex(-torch.exp(self.rate), self.angle))
        u, h = self.into(x), 0
        for value in u.unbind(1):
            h = pole * h + value
        return self.out(torch.cat([h.real, h.imag], 1))


@case(Adam, lr=0.01)
def state_space() -> Parts:
    return StateSpace(), TensorDataset(numbers(8, 3), labels(3)), F.cross_entropy
