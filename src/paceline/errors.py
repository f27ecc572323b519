"""Error types that a training raises. Does not import torch."""

from __future__ import annotations


class LinkError(ConnectionError):
    """A link has failed: rebuild it or end. ``peer``: the rank at the other end, where known.

    ``resumes``: this process may not continue from its own state; the run resumes from its newest checkpoint.
    """

    def __init__(self, message: str, peer: int | None = None, resumes: bool = False):
        super().__init__(message)
        self.peer, self.resumes = peer, resumes


class ShardsLost(RuntimeError):
    """Raised by every process with the same text: state that was divided between nodes is on none of them any more."""


class CheckpointError(OSError):
    """A checkpoint cannot be written, or is incomplete. ``errno``: that of the operating system, where it has one."""


class NotFinite(FloatingPointError):
    """Raised by every process with the same text: a step's loss or gradient is not finite."""


class NoGradient(RuntimeError):
    """Raised by every process with the same text: no trainable parameter has a gradient from a step's loss."""


class UnlikeOptions(ValueError):
    """Raised by every process with the same text: their optimizers have different options, such as learning rates."""


class NeverStepped(RuntimeError):
    """Raised by every process at the end: they joined, but each trained without calling `Pace.step`."""
