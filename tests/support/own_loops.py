"""Loops of a user's own shape, by paceline and in plain PyTorch. In the last batch some processes have no row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import cases
import paceline
from paceline.messages import Decision

ROWS, COUNT, CLIP = 21, 64, 0.05
dice = torch.Generator().manual_seed(4)
X, Z = (torch.randn(COUNT, cases.IN, generator=dice, dtype=torch.float64) for _ in range(2))
Y = torch.randint(0, cases.OUT, (COUNT,), generator=dice)
DATA = TensorDataset(X, Y, Z)
Result = tuple[dict[str, Tensor], dict[str, Any]]


def whole_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(X[i : i + ROWS], Y[i : i + ROWS], Z[i : i + ROWS]) for i in range(0, COUNT, ROWS)]


def build(kind: type[nn.Module] = cases.Net) -> nn.Module:
    torch.manual_seed(7)
    return kind().double()


def redos(pace: paceline.Pace) -> list[int]:
    """Steps that were made again, as they are."""
    agree, seen = pace.control.commit, []

    def watched(vote: Any, finish: Any) -> Any:
        outcome = agree(vote, finish)
        if outcome.decision is Decision.RETRY:
            seen.append(pace.num_steps)
        return outcome

    pace.control.commit = watched
    return seen


def several(engine: str | None = None, clip: bool = True) -> Result:
    """Two losses over the same rows, one of them as (sum, weight), and a clip by hand."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    with paceline.join(model, optimizer, batch_size=ROWS, engine=engine) as pace:
        seen = redos(pace)
        for batch in pace.batches(DATA, shuffle=False):
            rows = pace.rows(batch)
            if rows is not None:
                x, y, z = rows
                pace.backward(F.cross_entropy(model(x), y))
                pace.backward((0.1 * model(z).square().mean(1).sum(), len(z)))
            if clip:
                pace.clip(CLIP)
            losses.append(pace.update())
            norms.append(pace.grad_norm)
        ends = [pace.epoch, pace.next_step]
    return model.state_dict(), {"losses": losses, "norms": norms, "redone": seen, "ends": ends}


def several_plain(clip: bool = True) -> Result:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for x, y, z in whole_batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.1 * model(z).square().mean()
        loss.backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.state_dict(), {"losses": losses, "norms": norms}


class Judge(cases.Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(cases.HIDDEN, 1)


def true(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def false(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def gan(engine: str | None = None) -> Result:
    """Two models that train against each other, each with a pace of its own."""
    maker, judge = build(cases.Coder), build(Judge)
    losses = []
    with (
        paceline.join(maker, torch.optim.Adam(maker.parameters(), lr=0.01), batch_size=ROWS, engine=engine) as makes,
        paceline.join(judge, torch.optim.Adam(judge.parameters(), lr=0.01), batch_size=ROWS, engine=engine) as judges,
    ):
        for batch in judges.batches(DATA, shuffle=False):
            rows = judges.rows(batch)
            if rows is not None:
                x, _, z = rows
                judges.backward(true(judge(x)))
                judges.backward(false(judge(maker(z).detach())))
            losses.append(judges.update())
            rows = makes.rows(batch)
            if rows is not None:
                makes.backward(true(judge(maker(rows[2]))))
            losses.append(makes.update())
    weights = {f"maker.{k}": v for k, v in maker.state_dict().items()}
    return weights | {f"judge.{k}": v for k, v in judge.state_dict().items()}, {"losses": losses}


def gan_plain() -> Result:
    maker, judge = build(cases.Coder), build(Judge)
    makes = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    losses = []
    for x, _, z in whole_batches():
        judges.zero_grad()
        loss = true(judge(x)) + false(judge(maker(z).detach()))
        loss.backward()
        judges.step()
        losses.append(float(loss.detach()))
        makes.zero_grad()
        loss = true(judge(maker(z)))
        loss.backward()
        makes.step()
        losses.append(float(loss.detach()))
    weights = {f"maker.{k}": v for k, v in maker.state_dict().items()}
    return weights | {f"judge.{k}": v for k, v in judge.state_dict().items()}, {"losses": losses}


class Scored:
    """What evaluation must count: every row once."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return X[i % COUNT], i


def evaluated(engine: str | None = None) -> Result:
    """Means that every process must hold alike, over datasets of all sizes, and what must happen once."""
    model = build()
    model.head.eval()  # a part that stays out of training mode
    said: dict[str, Any] = {}
    with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_size=ROWS, engine=engine) as pace:
        for count in (0, 1, 2, 7, 600):
            seen = []

            def metric(output: Tensor, target: Tensor, seen: list[int] = seen) -> dict[str, Any]:
                assert not torch.is_grad_enabled()
                assert not model.training
                seen.extend(target.tolist())
                return {"target": target.sum(), "even": (target[target % 2 == 0].sum(), (target % 2 == 0).sum())}

            means = pace.evaluate(Scored(count), metric)
            everyone = [bytes(words).decode() for words in pace.control.all_gather(repr((means, seen)).encode())]
            said[str(count)] = everyone
        said["plain"] = pace.evaluate(Scored(7), lambda output, target: target.sum())
        said["training"] = [model.training, model.head.training, model.first.training]
        said["once"] = [words.decode() for words in pace.control.all_gather(b"1" if pace.once() else b"0")]
        said["did"] = [w.decode() for w in pace.control.all_gather(str(pace.once(lambda a: a + 1, 41)).encode())]
        said["leader"] = [w.decode() for w in pace.control.all_gather(str(pace.leader).encode())]
        try:
            pace.once(lambda: 1 / 0)
        except (ZeroDivisionError, RuntimeError) as error:
            said["failed"] = [w.decode() for w in pace.control.all_gather(repr(error).encode())]
    return model.state_dict(), said


LOOPS = {"several": several, "gan": gan, "evaluated": evaluated}
PLAIN = {"several": several_plain, "gan": gan_plain}
