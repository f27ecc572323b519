"""What became of a case: equal to the plain loop, refused, reported, or wrong without a word; or a word for nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from zoo.case import Case
from zoo.ranks import Trained

EXACT = 1e-9  # of what training moved
FLOAT32 = 1e-4  # the most that rounding, of which that to float32 is the largest, may be
ROUNDING = 3.0  # times what the control differs: parts of other sizes round otherwise


class Outcome(Enum):
    EXACT = "exact"
    ROUNDED = "rounding"
    REFUSED = "refused"
    REPORTED = "reported"
    NAMED = "verify names it"
    FAILED = "failed"
    ALARM = "FALSE ALARM"
    WRONG = "WRONG"

    @property
    def bad(self) -> bool:
        return self in (Outcome.FAILED, Outcome.ALARM, Outcome.WRONG)


@dataclass(frozen=True)
class Verdict:
    """``gap``: how far from the plain loop, of what training moved; ``text``: what was said about it."""

    outcome: Outcome
    gap: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        if self.outcome in (Outcome.EXACT, Outcome.ROUNDED):
            return f"{self.outcome.value} ({self.gap:.0e})"
        return f"{self.outcome.value} ({self.gap:.0e})" if self.outcome is Outcome.WRONG else self.outcome.value


def gap(one: Trained, other: Trained, first: Trained) -> float:
    """The difference of two trainings over what training moved: of parameters, of buffers, of losses the largest."""
    if len(one.losses) != len(other.losses) or one.parameters.keys() != other.parameters.keys():
        return float("inf")
    found = _far(one.parameters, other.parameters, first.parameters)
    if one.buffers.keys() == other.buffers.keys():
        found = max(found, _far(one.buffers, other.buffers, first.buffers))
    losses = [torch.tensor(each.losses, dtype=torch.float64) for each in (one, other)]
    return max(found, float((losses[0] - losses[1]).abs().max() / losses[1].abs().max().clamp_min(1e-30)))


def moved(plain: Trained, first: Trained) -> bool:
    return any(not torch.equal(each, first.parameters[name]) for name, each in plain.parameters.items())


def _far(one: dict[str, Tensor], other: dict[str, Tensor], first: dict[str, Tensor]) -> float:
    apart = way = 0.0
    for name, tensor in other.items():
        if tensor.shape != one[name].shape:
            return float("inf")
        a, b, start = one[name].double(), tensor.double(), first[name].double()
        apart += float((a - b).square().sum())
        if start.shape == b.shape:
            way += float((b - start).square().sum())
    if apart == 0.0:
        return 0.0
    size = (apart / max(way, 1e-300)) ** 0.5
    return size if size == size else float("inf")


def lines(trained: Trained) -> list[str]:
    """What paceline said while it trained, beside how it computes."""
    found = [line.removeprefix("paceline: ") for line in trained.said.splitlines() if line.startswith("paceline: ")]
    return [line for line in found if not re.match(r"\S+, (not measured|as measured|the fastest)", line)]


def judge(
    case: Case, ranks: Sequence[Trained], plain: Trained, first: Trained, controls: Callable[[], Iterable[float]]
) -> Verdict:
    """``first``: before training. ``controls``: how far one process is that computes each batch in other ways."""
    errors = [each.error for each in ranks if each.error]
    if errors:
        own = next((text for text in errors if text.startswith("ValueError: ")), "")
        if own:
            return Verdict(Outcome.REFUSED, text=own.removeprefix("ValueError: "))
        return Verdict(Outcome.FAILED, text=next((e for e in errors if not e.startswith("LinkError")), errors[0]))
    apart = max(gap(each, plain, first) for each in ranks[:1])
    same = [_far(each.parameters, ranks[0].parameters, first.parameters) for each in ranks]
    found = max(apart, *same)
    said = [line for each in ranks for line in lines(each)]
    alarm = " / ".join(dict.fromkeys(said))
    if found <= EXACT:
        return Verdict(Outcome.ALARM if alarm else Outcome.EXACT, found, alarm)
    alone = max((each for each in controls() if each <= FLOAT32), default=0.0)
    if found <= ROUNDING * alone:
        return Verdict(Outcome.ALARM if alarm else Outcome.ROUNDED, found, alarm)
    told = next((line for line in said if case.differs and re.search(case.differs, line, re.I)), "")
    text = told or f"said: {alarm or 'nothing'}"
    return Verdict(Outcome.REPORTED if told else Outcome.WRONG, found, text)
