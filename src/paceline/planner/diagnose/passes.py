"""Forward passes of a model that is examined, each from the same state, and everything put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from paceline.planner.diagnose.equal_draws import Pinned
from paceline.planner.diagnose.saved_state import Kept
from paceline.planner.diagnose.subject import Subject


class Passes:
    def __init__(self, subject: Subject):
        self.subject, self.model = subject, subject.model
        self.kept = Kept({"": subject.model, "loss.": subject.loss})
        self.grads = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        self.modules = dict(self.model.named_modules())
        self.norms: list[str] = []  # layers that normalise over a batch

    def rest(self) -> None:
        """Everything as it was."""
        self.kept.restore()
        for parameter, grad in self.grads:
            parameter.grad = grad
        self.subject.seed(0)

    @contextlib.contextmanager
    def calm(self) -> Iterator[None]:
        """Layers that normalise over a batch do so by their running statistics."""
        inside = [m for name in self.norms for m in self.modules[name].modules() if m.training]
        for module in inside:
            module.training = False
        try:
            with Pinned():
                yield
        finally:
            for module in inside:
                module.training = True

    def run(self, rows: Any, seed: int = 0) -> Any:
        self.rest()
        self.subject.seed(seed)
        return self.subject.forward(rows)

    def passes(self, rows: Any, seed: int = 0) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad(), Pinned():
                return self.run(rows, seed)

        return run

    def says(self, rows: Any, seed: int = 0) -> list[Any]:
        """What a pass gives: its outputs, and its loss."""
        with torch.no_grad():
            output = self.run(rows, seed)
            said = self.subject.judge(output, rows) if self.subject.judge else {}
        leaves = [leaf.detach().clone() for leaf in tree_iter(output) if isinstance(leaf, Tensor)]
        return leaves + [value.detach().clone() for value, _, _ in said.values()]
