"""Everyone's gradients added up in the order of one fixed tree, whoever has computed which part.

Each rank sends the sums that its virtual shares make (engine "reproducible"), or its gradient as one share of as many
as there are ranks; everyone receives all, and adds up what is left of the tree.

*Cost* (N ranks, n bytes dense): (N - 1) n sent per rank where its shares are a span of the tree, as 2, 4 or 8 equal
parts of 8 are, up to 2 log2(shares) times that where not; 2 (N - 1) / N n is what a sum on the wire sends.
*Laws*: as allreduce; with virtual shares, the same bits for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.contract import DENSE, Ballot, Cost, Piece, Spec
from paceline.exchange import allreduce
from paceline.exchange.flow.cost_model import gathered, toll
from paceline.exchange.flow.send_queue import Flight, Sent
from paceline.messages import Span, add_up, spans

HEAD = 3  # values before the sums: how many shares there are, the first and the last + 1 that are here


class Exchange(allreduce.Exchange):
    """Sends gradients as they are."""

    overlaps = ("backward",)
    uses_codec, gathers, fixed_order = False, True, True

    def __init__(self) -> None:
        super().__init__(DENSE)

    def forms(self) -> Sequence[str]:
        return [DENSE] * len(self.specs)

    def _send(self, pieces: Sequence[Piece], flight: Flight) -> Sent:
        parts: list[Tensor] = []
        for piece in pieces:
            sums, (low, high), num_shares = piece.sums, piece.span, piece.num_shares
            if sums is None:
                assert piece.flat is not None
                low, high, num_shares = self.link.rank, self.link.rank + 1, self.link.size
                sums = {(low, high): piece.flat}
            like = next(iter(sums.values())) if sums else piece.flat
            assert like is not None
            parts = parts or [torch.tensor([num_shares, low, high], dtype=like.dtype, device=like.device)]
            parts += [sums[span] for span in spans((0, num_shares), low, high)]
        payload, spec = torch.cat(parts), pieces[0].spec
        what = f"gathering bucket {spec.index}: {', '.join(spec.names[:2])} ({payload.nbytes / 1e6:.1f} MB)"
        begin_s = self.link.threads.now()
        return Sent(pieces, self._lane.all_gather(payload, what), begin_s)

    def receive(self, flight: Flight, spec: Spec) -> tuple[Piece, Any]:
        assert self._flow
        sent, place = self._flow.take(flight, spec.index)
        before, sums, whole = sum(piece.spec.numel for piece in sent.pieces[:place]), dict[Span, Tensor](), (0, 0)
        for payload in sent.result:
            num_shares, low, high = (int(value) for value in payload[:HEAD].real.tolist())
            whole, here = (0, num_shares), spans((0, num_shares), low, high)
            start = HEAD + before * len(here)
            for i, span in enumerate(here):
                sums[span] = payload[start + i * spec.numel : start + (i + 1) * spec.numel]
        flat = add_up(whole, sums)
        assert flat is not None, f"of {whole[1]} shares of {spec.names[0]} only {sorted(sums)} have come"
        return Piece(spec, flat=flat), None

    def remember(self, got: Sequence[tuple[Piece, Any]], ballot: Ballot) -> None:
        """No codec has seen it."""

    def cost(self, specs: Sequence[Spec], rows: int, size: int) -> Cost:
        each = [gathered(4 * spec.numel, size, toll(self.link, size)) for spec in specs]
        return Cost(sum(one.steps for one in each), sum(one.bytes for one in each))
