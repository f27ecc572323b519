"""Classes that promise all of an interface and do nothing, for tests that use a part of it."""

from __future__ import annotations


def partly(promise: type) -> type:
    return type(promise.__name__, (promise,), dict.fromkeys(promise.__abstractmethods__))
