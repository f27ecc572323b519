"""Error types, by name. Costs no import of torch."""

from __future__ import annotations


class LinkError(ConnectionError):
    """A link is dead: rebuild it or end. Names the peer, where known.

    ``resumes``: this process may not continue from its own state; the run resumes from its newest checkpoint.
    """

    def __init__(self, message: str, peer: int | None = None, resumes: bool = False):
        super().__init__(message)
        self.peer, self.resumes = peer, resumes


class CheckpointError(OSError):
    """A checkpoint cannot be written, or is not whole. ``errno`` is the system's, where it has one."""


class NotFinite(FloatingPointError):
    """Raised by every process, with the same words: a step's loss or gradient has no value."""


class NoGradient(RuntimeError):
    """Raised by every process, with the same words: a step's loss trains nothing."""


class UnlikeOptions(ValueError):
    """Raised by every process, with the same words: their optimizers have unlike numbers, as a learning rate."""


class NeverStepped(RuntimeError):
    """Raised by every process at the end: they joined, and then each trained alone."""
