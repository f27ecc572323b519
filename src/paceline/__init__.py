"""Train PyTorch models as fast as the machines you already have allow."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.contract import LinkError
    from paceline.interrupt import Stopped
    from paceline.session import Pace, join

__all__ = ["LinkError", "Pace", "Stopped", "__version__", "join"]
__version__ = "0.2.0"

_HOMES = {"LinkError": "contract", "Stopped": "interrupt", "Pace": "session", "join": "session"}


def __getattr__(name: str) -> Any:
    # the command line starts at once: torch is imported by whoever computes
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"paceline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {', '.join(__all__)}")
