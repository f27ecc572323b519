"""Calls a function as soon as a module has been imported, by whomever; at once where it was imported before."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def call(name: str, function: Callable[[], None]) -> None:
    """One function for a module: the first that asks."""
    if name in sys.modules:
        function()
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module as everyone else would. Many only look whether it is there, and do not import it."""

    looking = False

    def __init__(self, name: str, function: Callable[[], None]):
        self.name, self.function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(self.name)
        finally:
            self.looking = False
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, own: importlib.abc.Loader, finder: _Finder):
        self.own, self.finder = own, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__:
            module.__spec__.loader = module.__loader__ = self.own
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self.finder]
        self.own.exec_module(module)
        self.finder.function()
