"""All cases on 2 nodes, on 3 nodes and in 2 processes: ``python -m zoo [NAME ...] [--page docs/zoo.md]``."""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import paceline
from zoo import operators  # noqa: F401 - before anybody imports torchvision
from zoo.case import FAMILIES, Case, corpus, missing
from zoo.judge import Outcome, Verdict, gap, judge, moved
from zoo.page import page
from zoo.plain import Plain
from zoo.ranks import Trained, of_nodes, of_processes, together

Ways = Mapping[str, tuple[int, Callable[[], list[dict[str, str]]]]]
WAYS: Ways = {  # into how many parts each batch goes, and who computes them
    "2 nodes": (2, partial(of_nodes, 2)),
    "3 nodes": (3, partial(of_nodes, 3)),
    "processes:2": (2, partial(of_processes, 2)),
}


def run(case: Case, ways: Ways = WAYS, ask: bool = True) -> dict[str, Verdict]:
    """By way. ``ask``: `paceline verify` about what differs without a word."""
    plain, first = (together(case, [{}], join)[0] for join in (Plain, partial(Plain, still=True)))
    if fault := plain.error or first.error or ("" if plain.losses and moved(plain, first) else "nothing was trained"):
        return dict.fromkeys(ways, Verdict(Outcome.FAILED, text=f"the plain loop: {fault}"))

    @cache
    def control(**words: Any) -> float:
        other = together(case, [{}], partial(Plain, counts=case.counts, **words))[0]
        return float("inf") if other.error else gap(other, plain, first)

    def controls(parts: int) -> tuple[float, float]:
        return control(parts=parts), control(reverse=True)

    verdicts = {}
    for name, (parts, who) in ways.items():
        ranks: list[Trained] = together(case, who(), paceline.join)
        verdicts[name] = judge(case, ranks, plain, first, partial(controls, parts))
    if ask and case.differs and any(each.outcome is Outcome.WRONG for each in verdicts.values()):
        text = verified(case)
        for name, each in verdicts.items():
            if text and each.outcome is Outcome.WRONG:
                verdicts[name] = Verdict(Outcome.NAMED, each.gap, text)
    return verdicts


def verified(case: Case) -> str:
    """What `paceline verify` says of it on two nodes, where that names the cause."""
    script = str(Path(__file__).with_name("one.py"))
    command = [sys.executable, "-m", "paceline", "verify", "--steps", "6", script, case.name, case.module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    causes = [line.removeprefix("- ") for line in done.stdout.splitlines() if line.startswith("- ")]
    said = [line for line in causes if re.search(case.differs, line, re.IGNORECASE)]
    return " ".join(said) if done.returncode == 1 else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="patterns of cases, such as 'gpt2*'; all by default")
    parser.add_argument("--only", nargs="*", default=FAMILIES, choices=FAMILIES, help="families, by module")
    parser.add_argument("--quick", action="store_true", help="do not ask `paceline verify` about what differs")
    parser.add_argument("--page", type=Path, help="where the table goes")
    asked = parser.parse_args()
    if lacking := missing(asked.only):
        print(f"zoo: {', '.join(lacking)} not installed; use `make zoo`, or --only", file=sys.stderr)
        return 2
    cases = [
        c for c in corpus(asked.only) if not asked.names or any(fnmatch.fnmatch(c.name, each) for each in asked.names)
    ]
    found: dict[str, dict[str, Verdict]] = {}
    start = time.monotonic()
    for case in cases:
        begun = time.monotonic()
        found[case.name] = verdicts = run(case, ask=not asked.quick)
        words = "; ".join(f"{way}: {verdict}" for way, verdict in verdicts.items())
        print(f"{case.family}/{case.name}: {words} [{time.monotonic() - begun:.1f} s]", flush=True)
        for text in dict.fromkeys(v.text for v in verdicts.values() if v.text):
            print(f"    {text}", flush=True)
    bad = [f"{name} ({way})" for name, all_ in found.items() for way, each in all_.items() if each.outcome.bad]
    print(f"zoo: {len(cases)} models, {3 * len(cases) - len(bad)} of {3 * len(cases)} results as they should be, "
          f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
    if bad:
        print(f"zoo: wrong: {', '.join(bad)}", flush=True)
    if asked.page:
        asked.page.write_text(page(cases, found))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
