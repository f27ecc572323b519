"""Train PyTorch models as fast as the machines you already have allow."""

from paceline.contract import LinkError
from paceline.session import Pace, join

__all__ = ["LinkError", "Pace", "__version__", "join"]
__version__ = "0.1.0"
