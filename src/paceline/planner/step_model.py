"""Step model: the times of one step of a job on one node, per layer, interpolated to any number of samples.

A step model comes from the JSON of a timeline (`engine.compute.timeline`) and needs no torch. Two step models, recorded
with fewer and with more samples, are interpolated linearly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.messages import DENSE, FACTORS, ExchangeTraffic

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class LayerTiming:
    """A bucket: gradients that are sent together. *Units*: seconds, for the step model's number of samples.

    ``sides``: inputs plus outputs of a fully-connected layer, 0 for any other bucket. ``rows``: rows of its factors.
    ``dense_s``, ``factors_s``: backward time from the previous bucket's readiness to this one's. ``product_s``: time to
    multiply the factors, which the update does once per node. ``packed_dense``, ``packed_factors``: the ratio of
    lossless compression, compressed over uncompressed size.
    """

    name: str
    numel: int
    sides: int = 0
    rows: float = 0.0
    dense_s: float = 0.0
    factors_s: float = 0.0
    product_s: float = 0.0
    packed_dense: float = 1.0
    packed_factors: float = 1.0

    def fits(self, num_rows: float) -> bool:
        """Whether factors of ``num_rows`` rows are no larger than the dense gradient."""
        return self.sides > 0 and num_rows > 0 and num_rows * self.sides <= self.numel


@dataclass(frozen=True)
class StepModel:
    """*Units*: seconds. ``order``: for each representation, the buckets in the order in which backward completes them.

    ``update_s``: update from dense gradients. ``factored_s``: update from factors of the node's own samples where they
    fit; ``update_s`` if unknown. ``absorbs``: the optimizer takes factors, so they also pay on a single node.
    """

    rows: float
    item_bytes: int
    forward_s: float
    parts: tuple[LayerTiming, ...]
    order: dict[str, tuple[int, ...]]
    update_s: float
    factored_s: float
    absorbs: bool = False
    cores: int = 1
    ways: ExchangeTraffic = field(default_factory=ExchangeTraffic)

    @classmethod
    def of(
        cls, timeline: dict[str, Any], absorbs: bool = False, cores: int = 1, ways: ExchangeTraffic | None = None
    ) -> StepModel:
        """From a timeline's JSON. Raises ValueError for any other JSON."""
        try:
            backward = {form: dict(map(tuple, timeline["backward"][form])) for form in (DENSE, FACTORS)}
            parts = tuple(
                LayerTiming(
                    ", ".join(bucket["names"][:2]),
                    sum(map(math.prod, bucket["shapes"])),
                    sum(bucket["shapes"][0]) if bucket["linear"] else 0,
                    bucket["factor_rows"],
                    backward[DENSE][i],
                    backward[FACTORS][i],
                    bucket["product_seconds"],
                    *bucket.get("packed", (1.0, 1.0)),
                )
                for i, bucket in enumerate(timeline["pieces"])
            )
            update_s = timeline["update_seconds"]
            return cls(
                timeline["rows"],
                ITEM_BYTES.get(timeline["dtype"], 4),
                sum(seconds for _, seconds in timeline["forward"]),
                parts,
                {form: tuple(i for i, _ in timeline["backward"][form]) for form in (DENSE, FACTORS)},
                update_s,
                timeline.get("factored_update_seconds") or update_s,
                absorbs,
                cores,
                ways or ExchangeTraffic(),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a timeline's JSON ({type(error).__name__}: {error}); record it again") from None

    @classmethod
    def read(cls, fields: dict[str, Any]) -> StepModel:
        """The inverse of `dataclasses.asdict`, after a round trip through JSON."""
        order = {form: tuple(indexes) for form, indexes in fields["order"].items()}
        parts = tuple(LayerTiming(**part) for part in fields["parts"])
        return cls(**{**fields, "parts": parts, "order": order, "ways": ExchangeTraffic(**fields["ways"])})

    def ready(self, forms: Sequence[str]) -> list[float]:
        """When each bucket is ready, in seconds since the beginning of the step."""
        elapsed_s, found = self.forward_s, [0.0] * len(self.parts)
        for i in self.order[FACTORS if FACTORS in forms else DENSE]:
            elapsed_s += self.parts[i].factors_s if forms[i] == FACTORS else self.parts[i].dense_s
            found[i] = elapsed_s
        return found

    def updating_s(self, forms: Sequence[str], others: float = 0.0) -> float:
        """The time of the update. ``others``: rows of the other nodes' factors relative to this node's."""
        own = [part for part in self.parts if part.fits(part.rows)]
        factored = [part for part, form in zip(self.parts, forms, strict=True) if form == FACTORS]
        share = sum(part.numel for part in factored) / max(1, sum(part.numel for part in own))
        more_s = others * sum(part.product_s for part in factored)
        return self.update_s + min(1.0, share) * (self.factored_s - self.update_s) + more_s

    def alone_s(self) -> float:
        """The time of a step without other nodes."""
        forms = self.alone()
        return max(self.ready(forms), default=self.forward_s) + self.updating_s(forms)

    def alone(self) -> list[str]:
        factors = self.absorbs and self.ways.factors
        return [FACTORS if factors and part.fits(part.rows) else DENSE for part in self.parts]

    def scaled(self, times: float) -> StepModel:
        """All times multiplied by ``times``: the time of the whole step is known better than those of its parts."""
        parts = tuple(
            replace(p, dense_s=p.dense_s * times, factors_s=p.factors_s * times, product_s=p.product_s * times)
            for p in self.parts
        )
        own = {name: getattr(self, name) * times for name in ("forward_s", "update_s", "factored_s")}
        return replace(self, parts=parts, **own)

    def at(self, rows: float, fewer: StepModel | None = None) -> StepModel:
        """The step model for ``rows`` samples, interpolated with ``fewer``; without it proportional, but the update."""
        if rows == self.rows:
            return self
        times = rows / self.rows
        if fewer is None or fewer.rows >= self.rows or len(fewer.parts) != len(self.parts):
            low, reach = self, 0.0
        else:
            low, reach = fewer, (rows - fewer.rows) / (self.rows - fewer.rows)

        def between(less: float, more: float) -> float:
            if low is self:
                return more * times
            # noise may tilt the line; time never shrinks faster than the number of samples
            return max(less + reach * (more - less), min(less / low.rows, more / self.rows) * rows)

        parts = tuple(
            replace(
                more,
                rows=more.rows * times,
                dense_s=between(less.dense_s, more.dense_s),
                factors_s=between(less.factors_s, more.factors_s),
                product_s=between(less.product_s, more.product_s),
            )
            for less, more in zip(low.parts, self.parts, strict=True)
        )
        by_rows = self.factored_s if low is self else between(low.factored_s, self.factored_s)
        return replace(
            self, rows=rows, forward_s=between(low.forward_s, self.forward_s), parts=parts, factored_s=by_rows
        )
