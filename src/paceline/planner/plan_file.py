"""A plan as TOML and JSON: every configuration with prediction and measurement, the choice and its reason.

Keys of a plan: ``version``, ``chosen`` (the configuration to use; the only required key), ``hosts`` (the configurations
of hosts of -H that differ from it, by name), ``reason``, ``fidelity``, ``batch_size``, ``fingerprint`` (of the job and
its inputs), ``date``, ``machine``, ``versions``, ``rows``. Keys of a row: ``engine`` (the configuration, as
"processes:2+channels_last"), ``predicted_s`` and ``measured_s`` (seconds per step), ``spread_s``, ``per_s`` (samples
per second), ``speedup`` (over the first row, measured if both were), ``peak_bytes`` (all processes, shared memory
once), ``fidelity``, ``extrapolated`` (from smaller batches), ``steps`` (timed), ``optimizer`` (how processes shard its
work: "slices" or "whole tensors"), ``reason``. A plan over several machines also has ``num_nodes`` (how many to use),
``hosts`` (the configuration of each, the fastest first), ``teams`` (`planner.teams`), ``methods`` (`planner.methods`)
and ``pairs`` (of all hosts). Keys of a pair: ``one``, ``other`` (the hosts' names), ``latency_s`` (empty message, one
way), ``bytes_per_s`` (one way, the slower direction). An unknown number is omitted in TOML and null in JSON.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.planner.candidates import split
from paceline.planner.methods import Method
from paceline.planner.teams import Team
from paceline.registry import THREADS
from paceline.report.record import write_whole

VERSION = 1
CHOSEN, TIE = "chosen", "equal within the spread"


@dataclass(frozen=True)
class Row:
    """One candidate configuration. The module's docstring explains the keys."""

    engine: str
    predicted_s: float | None = None
    measured_s: float | None = None
    spread_s: float | None = None
    per_s: float | None = None
    speedup: float | None = None
    peak_bytes: int | None = None
    fidelity: str = "exact"
    extrapolated: bool = False
    steps: int = 0
    optimizer: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Between:
    """The network between two hosts. The module's docstring explains the keys."""

    one: str
    other: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Plan:
    """The chosen configuration, all candidates and the reason. The module's docstring explains the keys."""

    chosen: str
    reason: str = ""
    rows: tuple[Row, ...] = ()
    batch_size: int | None = None
    fidelity: str = "exact"
    fingerprint: str = ""
    date: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    num_nodes: int | None = None
    hosts: dict[str, str] = field(default_factory=dict)
    teams: tuple[Team, ...] = ()
    methods: tuple[Method, ...] = ()
    pairs: tuple[Between, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        """The hosts to start, of a plan over several hosts; empty for any other plan."""
        return tuple(self.hosts)[: self.num_nodes] if self.num_nodes else ()

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`, also after a round trip through JSON."""
        lists = {name: tuple(kind(**one) for one in fields.get(name, ())) for name, kind in LISTS.items()}
        return cls(**{key: value for key, value in {**fields, **lists}.items() if key != "version"})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_toml(self) -> str:
        plain = {key: value for key, value in self.to_dict().items() if value not in (None, {})}
        for name in LISTS:
            plain[name] = [{k: v for k, v in row.items() if v is not None} for row in plain[name]]
        import tomli_w  # imported late: most commands write no plan

        return tomli_w.dumps(plain)

    @classmethod
    def from_toml(cls, text: str, where: str = "plan") -> Plan:
        """Raises ValueError with the file, the key, its value and the accepted values."""
        import tomli

        try:
            given = tomli.loads(text)
        except tomli.TOMLDecodeError as error:
            raise ValueError(f"{where} is not TOML: {error}; write it with: paceline plan --out FILE") from None
        version = given.pop("version", VERSION)
        if version != VERSION:
            raise ValueError(f"{where} has version {version!r}, this paceline reads {VERSION}; make a new plan")
        if "chosen" not in given:
            raise ValueError(f"{where} lacks 'chosen', the configuration to use, as in: chosen = \"{THREADS}:2\"")
        _check(cls, given, where)
        split(given["chosen"], 1)
        lists: dict[str, Any] = {}
        for name, kind in LISTS.items():
            entries = given.pop(name, ())
            for i, entry in enumerate(entries):
                _check(kind, entry, f"{where}: {name}[{i}]")
                needed = (one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING)
                if missing := next((key for key in needed if key not in entry), None):
                    raise ValueError(f"{where}: {name}[{i}] lacks {missing!r}")
            lists[name] = tuple(kind(**entry) for entry in entries)
        return cls(**given, **lists)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Raises ValueError for a file that cannot be read or is not a plan."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the plan {os.fspath(path)!r}: {error}") from None
        return cls.from_toml(text, repr(os.fspath(path)))

    def write(self, path: str | os.PathLike[str]) -> None:
        write_whole(Path(path), self.to_toml())


# the keys of a plan that hold tables
LISTS: dict[str, type[Any]] = {"rows": Row, "teams": Team, "methods": Method, "pairs": Between}

# the types that each annotation above accepts, and their description in an error
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a string"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "int | None": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float), "a number"),
    "tuple[Row, ...]": ((list,), "an array of tables, [[rows]]"),
    "tuple[Team, ...]": ((list,), "an array of tables, [[teams]]"),
    "tuple[Method, ...]": ((list,), "an array of tables, [[methods]]"),
    "tuple[Between, ...]": ((list,), "an array of tables, [[pairs]]"),
    "dict[str, Any]": ((dict,), "a table"),
    "dict[str, str]": ((dict,), "a table"),
}


def _check(kind: type, given: Any, where: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be a table, got {given!r}")
    known = {one.name: str(one.type) for one in dataclasses.fields(kind)}
    errors = []
    for key, value in given.items():
        if key not in known:
            similar = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(known)}"
            errors.append(f"unknown key {key!r} ({hint})")
            continue
        accepted, description = KINDS[known[key]]
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            errors.append(f"{key!r} must be {description}, got {value!r}")
        elif known[key] == "dict[str, str]" and isinstance(value, dict):
            invalid = [f"{name} = {each!r}" for name, each in value.items() if not isinstance(each, str)]
            errors += [f"{key!r} must hold strings, got {each}" for each in invalid]
    if errors:
        raise ValueError(f"{where}: " + "; ".join(errors))
