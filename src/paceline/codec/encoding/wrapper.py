"""Base of codecs around another codec, whose traits and state they take over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import contract
from paceline.messages import Bucket


class Wrapper(contract.Codec):
    """``inner``: the wrapped codec. State: the inner codec's."""

    def __init__(self, inner: contract.Codec | None = None):
        if not isinstance(inner, contract.Codec):
            name = type(self).__module__.rpartition(".")[2]
            raise ValueError(f"codec {name!r} needs a codec to wrap, as in '{name}/topk:keep=0.01'")
        self.inner = inner
        self.fidelity, self.wire, self.kinds = inner.fidelity, inner.wire, inner.kinds
        self.has_residual, self.scaled = inner.has_residual, inner.scaled
        self.needs_feedback, self.bucket_bytes = inner.needs_feedback, inner.bucket_bytes

    def init(self, bucket: Bucket, seed: int) -> Any:
        return self.inner.init(bucket, seed)

    def keep_unapplied(self, before: Any, after: Any, unused: Sequence[slice]) -> Any:
        return self.inner.keep_unapplied(before, after, unused)

    def redistribute(self, states: Sequence[Any], rank: int, size: int) -> Any:
        return self.inner.redistribute(states, rank, size)

    def on_view_change(self, bucket: Bucket, state: Any, seed: int) -> Any:
        return self.inner.on_view_change(bucket, state, seed)
