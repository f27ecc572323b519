"""The table of the zoo for the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import groupby

from zoo.case import COUNT, EPOCHS, ROWS, Case
from zoo.judge import EXACT, ROUNDING, Outcome, Verdict

Found = Mapping[str, Mapping[str, Verdict]]
PACKAGES = "torch", "timm", "torchvision", "transformers", "keras"

ABOUT = """# The zoo

{models} models in the style of public ones, small and with random weights, are each trained by a plain PyTorch loop in
one process and by paceline in three ways: on two nodes, on three nodes, and by two processes of one node. All train in
float64, from the same weights, on the same data: {epochs} epochs of {count} samples in global batches of {rows}. The
last batch of an epoch is short. Nodes are real processes that communicate over sockets. `make zoo` installs the
packages it needs, trains all models again and writes this page. It fails if a result differs without a message.

The number of a result is the distance from the plain loop divided by the distance that training moved: of all
parameters, of all buffers, or of the losses, whichever is largest.

| result | meaning |
|---|---|
| exact | The number is at most {exact:.0e}. |
| rounding | The model computes its loss, or a part of itself, in float32, or amplifies rounding. The number is at \
most {rounding:.0f} times that of a control: one process that computes each batch in two (three) parts and sums \
their gradients, or that takes the samples of each batch in reverse order. |
| refused | `join` or the first step raises an error. Its text is below. |
| reported | The model gives another result if a batch is divided, and a message on standard error says \
why. Its text is below. |
| verify names it | There is no message during training. `paceline verify` reports the cause. |

Results: {results}. Versions: {versions}.
"""


def page(cases: Sequence[Case], found: Found) -> str:
    counts = Counter(each.outcome for all_ in found.values() for each in all_.values())
    about = ABOUT.format(
        models=len(cases),
        epochs=EPOCHS,
        count=COUNT,
        rows=ROWS,
        exact=EXACT,
        rounding=ROUNDING,
        results=", ".join(f"{counts[kind]} {kind.value}" for kind in Outcome if counts[kind] or kind is Outcome.WRONG),
        versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
    )
    parts, said = [about], dict[str, int]()
    for family, members in groupby(cases, lambda case: case.family):
        ways = list(next(iter(found.values())))
        parts += [
            f"\n## {family[0].upper()}{family[1:]}\n",
            row("model", "trained by", *ways),
            row(*["---"] * (2 + len(ways))),
        ]
        for case in members:
            cells = [cell(each, said) for each in found[case.name].values()]
            parts.append(row(f"`{case.name}`", case.words, *cells))
    if said:
        parts.append("\n## Messages\n")
        parts += [f"{number}. {text}" for text, number in said.items()]
    return "\n".join(parts) + "\n"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def cell(verdict: Verdict, said: dict[str, int]) -> str:
    """``said``: the number of each text, in the order of their coming."""
    if verdict.outcome in (Outcome.EXACT, Outcome.ROUNDED):
        return str(verdict)
    number = said.setdefault(" ".join(verdict.text.split()), len(said) + 1)
    return f"{verdict} [{number}](#messages)"
