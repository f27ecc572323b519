"""What if there were other machines, or another link: `nodes=8,link=10gbit,latency=5ms` becomes numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
TIMES = {"ms": 1e-3, "us": 1e-6, "s": 1.0}
MOST_NODES = 4096
FORM = "nodes=8,link=10gbit,latency=5ms, each of them only where it differs"


@dataclass(frozen=True)
class WhatIf:
    """None: as it is. *Units*: bits per second; seconds."""

    nodes: int | None = None
    bits_per_s: float | None = None
    latency_s: float | None = None
    words: str = ""

    @classmethod
    def parse(cls, text: str) -> WhatIf:
        """Raises ValueError."""
        said: dict[str, str] = {}
        for word in text.split(","):
            key, equals, value = word.strip().partition("=")
            if not equals or key not in ("nodes", "link", "latency") or key in said:
                raise ValueError(f"--what-if {text!r}: {word.strip()!r} is not understood; accepted: {FORM}")
            said[key] = value
        nodes = said.get("nodes")
        if nodes is not None and not (nodes.isdecimal() and 1 < int(nodes) <= MOST_NODES):
            raise ValueError(f"--what-if {text!r}: nodes must be a whole number from 2 to {MOST_NODES}, got {nodes!r}")
        return cls(
            int(nodes) if nodes else None,
            rate(said["link"]) if "link" in said else None,
            duration(said["latency"]) if "latency" in said else None,
            ", ".join([said[key] + " latency" * (key == "latency") for key in ("link", "latency") if key in said]),
        )


def rate(text: str) -> float:
    """Bits per second. Raises ValueError."""
    return _number(text, RATES, "a link's rate", "1gbit, 2.5gbit or 100mbit")


def duration(text: str) -> float:
    """Seconds. Raises ValueError."""
    return _number(text, TIMES, "a latency", "5ms or 200us")


def _number(text: str, units: dict[str, float], what: str, accepted: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if not match or match[2] not in units or not float(match[1]):
        raise ValueError(f"{text!r} is not {what}; accepted: a number above 0 and its unit, as in {accepted}")
    return float(match[1]) * units[match[2]]
