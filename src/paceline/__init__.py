"""Train PyTorch models as fast as the machines you already have allow."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.contract import LinkError
    from paceline.session import Pace, join

__all__ = ["LinkError", "Pace", "__version__", "join"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports torch when it is needed, not before: what only measures and starts processes does without."""
    if name == "LinkError":
        from paceline.contract import LinkError

        return LinkError
    if name in ("Pace", "join"):
        from paceline import session

        return getattr(session, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
