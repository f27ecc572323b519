"""Launchers: on this machine, over ssh, detached; supervision, restarts and diagnosis of hosts."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    """`paceline.launch` is this package, and what notebooks call."""

    def __call__(self, function: Callable[..., Any], *arguments: Any, processes: int = 2, **named: object) -> list[Any]:
        from paceline.launch.function import launch, refuse

        refuse(function, named)
        return launch(function, *arguments, processes=processes)


sys.modules[__name__].__class__ = _Launch
