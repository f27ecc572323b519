"""Timeline of one step of a model on one machine, layer by layer: recorded, written as JSON, read again."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.codec.encoding.packing import MIN_BYTES, fits, pack
from paceline.engine.compute.gradient_hooks import Backward
from paceline.messages import DENSE, FACTORS, Bucket, Decision, Gradient, StepOutcome, Update, UpdateRule

FORMAT = 1
WARM_UP = 2
TRIAL_FLOPS = 1 << 26  # of a product that is timed by a part of it
SAMPLE = 1 << 18  # values


@dataclass(frozen=True)
class Timeline:
    """*Units*: seconds. ``rows``: samples in the step.

    ``forward``: layers in order. ``backward``: for each form, the buckets in the order in which they were ready, and
    the seconds since the one before. ``buckets``: ``linear`` where factors are the whole gradient. ``factor_rows`` and
    ``products``, per bucket: rows of its factors, and seconds of multiplying them out. ``update``: with dense
    gradients; ``factored_update``: with factors of these rows, wherever they fit (0.0: not known). ``packed``, per
    bucket: the share of its bytes that lossless compression leaves, dense and as factors.
    """

    rows: int
    dtype: str
    buckets: tuple[Bucket, ...]
    forward: tuple[tuple[str, float], ...]
    backward: dict[str, tuple[tuple[int, float], ...]]
    factor_rows: tuple[int, ...]
    products: tuple[float, ...]
    update: float
    factored_update: float = 0.0
    packed: tuple[tuple[float, float], ...] = ()

    def total(self, forms: Sequence[str]) -> float:
        """Seconds of forward, backward and the update with one node's own rows."""
        backward = sum(dict(self.backward[form])[i] for i, form in enumerate(forms))
        own = {i: self.factor_rows[i] for i, form in enumerate(forms) if form == FACTORS}
        return sum(s for _, s in self.forward) + backward + self.updating(own)

    def updating(self, rows: Mapping[int, int]) -> float:
        """Seconds of an update with these buckets as factors of ``rows`` rows, of all nodes, and the others dense."""
        own = {i: self.factor_rows[i] for i in rows if self.factor_rows[i]}
        alone = sum(self.products[i] for i in own)
        if self.factored_update:
            pairs = zip(self.buckets, self.factor_rows, strict=True)
            possible = sum(bucket.numel for bucket, most in pairs if bucket.linear and bucket.fits(most))
            share = min(1.0, sum(self.buckets[i].numel for i in own) / max(1, possible))
            alone = share * (self.factored_update - self.update)
        return self.update + alone + sum(self.products[i] * (rows[i] / own[i] - 1) for i in own)

    def to_json(self) -> str:
        gradients = [
            {"names": s.names, "shapes": s.shapes, "linear": s.linear, "factor_rows": rows, "product_seconds": seconds}
            for s, rows, seconds in zip(self.buckets, self.factor_rows, self.products, strict=True)
        ]
        for gradient, left in zip(gradients, self.packed, strict=False):
            gradient["packed"] = left
        whole = {
            "timeline": FORMAT,
            "rows": self.rows,
            "dtype": self.dtype,
            "forward": self.forward,
            "backward": self.backward,
            "pieces": gradients,
            "update_seconds": self.update,
            "factored_update_seconds": self.factored_update,
        }
        return json.dumps(whole, indent=1)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def read(cls, path: str | Path) -> Timeline:
        try:
            whole = json.loads(Path(path).read_text())
            if whole["timeline"] != FORMAT:
                raise ValueError(f"its format is {whole['timeline']}, this version reads {FORMAT}")
            gradients = whole["pieces"]
            return cls(
                whole["rows"],
                whole["dtype"],
                tuple(
                    Bucket(i, tuple(p["names"]), tuple(tuple(shape) for shape in p["shapes"]), p["linear"])
                    for i, p in enumerate(gradients)
                ),
                tuple((name, seconds) for name, seconds in whole["forward"]),
                {form: tuple((i, s) for i, s in line) for form, line in whole["backward"].items()},
                tuple(p["factor_rows"] for p in gradients),
                tuple(p["product_seconds"] for p in gradients),
                whole["update_seconds"],
                whole.get("factored_update_seconds", 0.0),
                tuple(tuple(p["packed"]) for p in gradients if "packed" in p),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no timeline ({type(error).__name__}: {error}); "
                f"make one by paceline.engine.compute.timeline.record"
            ) from error


def _product_s(engine: contract.Engine, left: Tensor, right: Tensor) -> float:
    """Seconds of adding left.T @ right to a gradient, measured on a part of it."""
    (rows, out_features), in_features = left.shape, right.shape[1]
    slab = max(1, min(out_features, TRIAL_FLOPS // max(1, 2 * rows * in_features)))
    into = torch.zeros(slab, in_features, dtype=right.dtype, device=right.device)
    start = time.perf_counter()
    engine.multiply(into, left.T[:slab], right)
    return float((time.perf_counter() - start) * out_features / slab)


def record(engine: contract.Engine, model: torch.nn.Module, batch: Any, passes: int = 7) -> Timeline:
    """The medians of ``passes`` steps on ``batch``, by an engine of one process that was opened on ``model``.

    The steps are real and change the model: pass a copy.
    """
    if isinstance(backward := getattr(engine, "backward", None), Backward):
        backward.watch()  # the engine of a single node does not offer buckets early by itself
    forwards, dense, factors, updates, factored = [], [], [], [], []
    products: dict[int, list[float]] = {}
    forms = [DENSE] * len(engine.buckets)
    for left in range(WARM_UP + passes, 0, -1):
        forward, backward, outcome = _step(engine, model, batch, forms)
        whole = _packed(outcome) if left == 1 else {}
        start = time.perf_counter()
        engine.apply(Update.of(outcome, UpdateRule(1.0 / outcome.vote.weight, check=True)))
        updates.append(time.perf_counter() - start)
        forwards.append(forward)
        dense.append(backward)
    rows, impure = list(outcome.vote.rows), set[int]()
    forms = [FACTORS if s.linear and s.fits(n) else DENSE for s, n in zip(engine.buckets, rows, strict=True)]
    for left in range(WARM_UP + passes, 0, -1):
        _, backward, outcome = _step(engine, model, batch, forms)
        factors.append(backward)
        impure |= {i for i, is_dense in enumerate(outcome.vote.dense) if is_dense}
        forms = [DENSE if i in impure else form for i, form in enumerate(forms)]  # as an exchange does after a retry
        split = _packed(outcome) if left == 1 else {}
        start = time.perf_counter()
        engine.apply(Update.of(outcome, UpdateRule(1.0 / outcome.vote.weight, check=True)))
        factored.append(time.perf_counter() - start)
        for gradient in outcome.gradients:
            if gradient.output_grad is not None and gradient.layer_input is not None:
                products.setdefault(gradient.bucket.index, []).append(
                    _product_s(engine, gradient.output_grad, gradient.layer_input)
                )
    for i in impure:
        rows[i], products[i] = 0, [0.0]
    return Timeline(
        round(outcome.vote.weight),
        str(engine.weights[0].dtype).removeprefix("torch."),
        tuple(replace(bucket, linear=bucket.linear and bucket.index not in impure) for bucket in engine.buckets),
        _medians(forwards),
        {DENSE: _medians(dense), FACTORS: _medians(factors)},
        tuple(rows),
        tuple(statistics.median(products.get(bucket.index, [0.0])[-passes:]) for bucket in engine.buckets),
        statistics.median(updates[WARM_UP:]),
        statistics.median(factored[WARM_UP:]),
        tuple((whole[i], split[i]) for i in range(len(engine.buckets))),
    )


def _packed(outcome: StepOutcome) -> dict[int, float]:
    """The share of each bucket's bytes that packing leaves, on a sample of it; 1.0 where it would not be packed."""
    found = {}
    for gradient in outcome.gradients:
        sides = [side.reshape(-1) for side in gradient.parts]
        num_bytes = sum(side.nbytes for side in sides)
        packable = num_bytes >= MIN_BYTES and all(map(fits, sides))
        found[gradient.bucket.index] = 1.0
        if packable:
            left = sum(side.nbytes * pack(side[:SAMPLE]).numel() / side[:SAMPLE].nbytes for side in sides if len(side))
            found[gradient.bucket.index] = min(1.0, left / num_bytes)
    return found


def _step(
    engine: contract.Engine, model: torch.nn.Module, batch: Any, forms: Sequence[str]
) -> tuple[list[tuple[str, float]], list[tuple[int, float]], StepOutcome]:
    """(seconds of each layer, seconds from each bucket to the next, the outcome for an update)."""
    layers: list[tuple[str, float]] = []
    ready: list[tuple[int, float]] = []
    gradients: list[Gradient] = []
    last = 0.0

    def lap() -> float:
        nonlocal last
        before, last = last, time.perf_counter()
        return last - before

    def offer(gradient: Gradient) -> None:
        ready.append((gradient.bucket.index, lap()))
        gradients.append(gradient)

    hooks = [
        module.register_forward_hook(lambda *_, name=name: layers.append((name, lap())))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    snapshot = engine.snapshot()
    lap()
    try:
        vote = engine.gradient(batch, 1.0, forms, offer)
    finally:
        for hook in hooks:
            hook.remove()
        engine.rollback(snapshot)
    return layers, ready, StepOutcome(Decision.COMMIT, sorted(gradients, key=lambda p: p.bucket.index), vote)


def _medians(passes: Sequence[Sequence[tuple[Any, float]]]) -> tuple[tuple[Any, float], ...]:
    columns = zip(*passes[WARM_UP:], strict=True)
    return tuple((column[0][0], statistics.median(seconds for _, seconds in column)) for column in columns)
