"""Settings of `paceline train`. Does not import torch, so that a cached plan starts without delay."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.load_balance import parse_shares
from paceline.registry import CODEC, EXCHANGE, MODEL, MODEL_OF_SAMPLE
from paceline.report.record import write_whole

OPTIMIZERS = ("sgd", "adam", "adamw", "lars")
SCALINGS = ("none", "linear", "sqrt")
DECAYS = ("none", "cosine", "poly", "step")
PRECISIONS = ("fp32", "bf16", "fp16")
FIDELITIES = ("exact", "rounded", "approximate")
# options that may change when a run resumes: duration, speed, intervals, and the path of its images (they are compared)
FREE = "epochs", "json", "data", "workers", "save_every", "keep", "fidelity", "device", "precision", "shares", "encrypt"


@dataclass
class Settings:
    """None means the model's own default. *Units*: warmup in epochs; save_every in steps, besides every epoch."""

    model: str | None = None
    data: str | None = None
    test_fraction: float = 0.2
    skip_broken: bool = False
    workers: int = 0
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    lr_scaling: str = "none"
    warmup: float = 0.0
    decay: str = "none"
    clip: float | None = None
    accumulate: int = 1
    precision: str | None = None
    fidelity: str = "exact"
    batch_norm: str = "local"
    device: str = "auto"
    seed: int = 0
    codec: str = CODEC
    exchange: str = EXCHANGE
    save_every: int | None = None
    keep: int = 2
    shares: str | None = None
    encrypt: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError with all errors at once."""
        errors = []
        for name, accepted in (
            ("optimizer", OPTIMIZERS),
            ("lr_scaling", SCALINGS),
            ("decay", DECAYS),
            ("fidelity", FIDELITIES),
            ("batch_norm", ("local", "sync")),
        ):
            if getattr(self, name) not in accepted:
                errors.append(f"{option(name)} is one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        if self.precision not in (None, *PRECISIONS):
            errors.append(f"--precision is one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        for name in ("epochs", "batch_size", "accumulate", "save_every", "keep"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                errors.append(f"{option(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "clip"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                errors.append(f"{option(name)} must be above 0, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "momentum", "workers", "seed"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                errors.append(f"{option(name)} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.test_fraction < 1:
            errors.append(f"--test-fraction must lie between 0 and 1, got {self.test_fraction}")
        try:
            parse_shares(self.shares or "equal")
        except ValueError as error:
            errors.append(str(error))
        if errors:
            raise ValueError("; ".join(errors))

    @property
    def model_name(self) -> str:
        return self.model or (MODEL_OF_SAMPLE if self.data is None else MODEL)

    def others_than(self, *names: str) -> list[str]:
        """The options that differ from their defaults, except these."""
        return [option(name) for name in json.loads(self.to_json()) if name not in names]

    def to_json(self) -> str:
        """The options that differ from the defaults, as JSON."""
        values = dataclasses.asdict(self)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in values.items() if value != defaults[name]})

    @classmethod
    def from_json(cls, text: str, where: str = "settings") -> Settings:
        try:
            values: Any = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} cannot be read: {error}") from None
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or (unknown := sorted(values.keys() - names)):
            raise ValueError(f"{where} is not what `paceline train` wrote: {unknown or values!r} is not known")
        return cls(**values)

    @property
    def fixed(self) -> dict[str, Any]:
        """The options that a resumed run must keep, where they differ from the defaults."""
        return {name: value for name, value in json.loads(self.to_json()).items() if name not in FREE}

    def check_same_run(self, run: Path) -> None:
        """Raises ValueError where the folder has checkpoints of a run with other options."""
        if any(run.glob("checkpoint-*")) and (run / "settings.json").is_file():
            previous = Settings.read(run).fixed
            if previous != self.fixed:
                raise ValueError(
                    f"{run} holds the checkpoints of a run with the options {previous or 'none'}, and this run has "
                    f"{self.fixed or 'none'}; give another --out, or the same options"
                )

    def write(self, run: Path) -> None:
        path, text = run / "settings.json", self.to_json() + "\n"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)

    @classmethod
    def read(cls, run: Path) -> Settings:
        """The settings of an earlier run. Raises ValueError where there are none."""
        path = run / "settings.json"
        if not path.is_file():
            raise ValueError(
                f"there is no run to resume in {run}; accepted: the folder that an earlier run was given as --out"
            )
        return cls.from_json(path.read_text(), str(path))


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
