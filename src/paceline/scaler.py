"""Loss scaling for fp16: gradients are computed larger by a power of two, so that small ones do not vanish.

A step whose gradient overflows is skipped and the scale halved; after many good steps it doubles.
*Source*: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

START, GROWTH_STEPS = 65536.0, 2000


@dataclass
class Scaler:
    """``scale`` 1 and ``moves`` False: no scaling."""

    scale: float = START
    moves: bool = False
    good_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a step that is not finite may only mean that the scale is too large."""
        return self.moves and self.scale > 1.0

    def move(self, applied: bool) -> None:
        if not self.moves:
            return
        self.good_steps = self.good_steps + 1 if applied else 0
        if not applied:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps % GROWTH_STEPS == 0:
            self.scale *= 2
