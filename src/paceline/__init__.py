"""Train PyTorch models as fast as the machines you already have allow."""

import importlib
from typing import TYPE_CHECKING, Any

from paceline.report import log as _log  # noqa: F401 - so that a script's later changes to the logger persist

if TYPE_CHECKING:
    from paceline import launch
    from paceline.ddp.module import DistributedDataParallel
    from paceline.errors import LinkError
    from paceline.launch.signals import Stopped
    from paceline.pace import Pace
    from paceline.session import join

__all__ = ["DistributedDataParallel", "LinkError", "Pace", "Stopped", "__version__", "join", "launch"]
__version__ = "0.2.0"


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # imports torch only when it is needed, so that the command line starts without delay
    if name in __all__:
        if name == "launch":
            return importlib.import_module("paceline.launch")
        from paceline import errors, pace, session
        from paceline.ddp import module as ddp
        from paceline.launch import signals

        return next(getattr(home, name) for home in (session, pace, errors, signals, ddp) if hasattr(home, name))
    raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {', '.join(__all__)}")
