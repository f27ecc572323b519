"""Experiments that compare a batch with its parts: model, loss, hooks and state, in one process.

They use the current weights and restore all state after each pass. The module `causes` interprets the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from paceline.planner.diagnose import gradient_hooks, layers_in_parts
from paceline.planner.diagnose.layers_in_parts import Part, Trace, cut
from paceline.planner.diagnose.loss_kind import Fixed, LossTerms, Recomputed, differentiable, examine_terms, repeated
from paceline.planner.diagnose.saved_state import unequal
from paceline.planner.diagnose.subject import ForwardPasses, Pinned, Subject


def examine(subject: Subject) -> dict[str, Any]:
    """All measurements as JSON values; "failed" holds the experiments that raised, with their errors."""
    experiments = Experiments(subject)
    found: dict[str, Any] = {"failed": {}}
    for name in ("layers", "narrow", "repeats", "state", "laws", "hooks", "backward", "random", "metric", "padding"):
        try:
            found[name] = getattr(experiments, name)()
        except Exception as error:  # a model may raise for a part of its batch
            found["failed"][name] = f"{type(error).__name__}: {error}"
        finally:
            experiments.restore()
    return found


class Experiments(ForwardPasses):
    """The experiments, in order: later ones exclude the layers that earlier ones found."""

    def __init__(self, subject: Subject):
        super().__init__(subject)
        self.mixes = False  # samples depend on each other, not only through batch norm
        self.random_layers: set[str] = set()
        self.not_repeatable: list[str] = []

    def layers(self) -> list[dict[str, Any]]:
        """The layers whose output for a part of the batch differs."""
        rows, whole_part = self.subject.rows, self.subject.whole
        whole = layers_in_parts.trace(self.model, self.passes(rows))
        same_seed = layers_in_parts.compare(self.model, self.passes(rows), whole, whole_part)
        other = layers_in_parts.compare(self.model, self.passes(rows, 1), whole, whole_part)
        self.random_layers = set(same_seed.unlike) | set(other.unlike)
        self.not_repeatable = sorted(same_seed.unlike)
        unlike, paths = self._unlike(whole)
        found = [self._kind(name, gap, whole, name in paths) for name, gap in unlike.items()]
        self.norms = [each["name"] for each in found if each["kind"] == "normalises"]
        forced, _ = self._unlike(whole, forces=True)  # layers behind the first difference
        for name, gap in forced.items():
            if name not in unlike and not any(self.modules[name].children()):
                kind = self._kind(name, gap, whole, False)
                found += [kind] if kind["kind"] == "normalises" else []
        self.norms = [each["name"] for each in found if each["kind"] == "normalises"]
        self.mixes = any(each["kind"] != "normalises" for each in found)
        if self.mixes and self._by_size_alone():
            found = [{**each, "kind": "size"} if each["kind"] == "mixes" else each for each in found]
        return found

    def _unlike(self, whole: Trace, forces: bool = False) -> tuple[dict[str, float], set[str]]:
        unlike, paths = dict[str, float](), set[str]()
        for part in self.subject.parts:
            trial = layers_in_parts.compare(self.model, self.passes(cut(self.subject.rows, part)), whole, part, forces)
            for name, gap in trial.unlike.items():
                if name not in self.random_layers:
                    unlike[name] = max(gap, unlike.get(name, 0.0))
            paths |= trial.paths
        return unlike, paths

    def _kind(self, name: str, gap: float, whole: Trace, path: bool) -> dict[str, Any]:
        """normalises: over the batch; buffers: uses buffers that it updates first; mixes: any other dependence."""
        module = self.modules[name]
        found = {"name": name, "type": type(module).__name__, "gap": gap, "path": path, "kind": "mixes"}
        if list(module.children()) and not list(module.buffers(recurse=False)):
            return found  # it contains layers, which have their own entries
        if self._is_shift_invariant(name, whole):
            return {**found, "kind": "normalises"}
        if list(module.buffers()) and module.training and self._clean_in_eval(name):
            return {**found, "kind": "buffers" if self._reads_buffers(name) else "normalises"}
        return found

    def _is_shift_invariant(self, name: str, whole: Trace) -> bool:
        """Whether its output is invariant to scale and shift of its input, as batch norm's is."""
        module, call = self.modules[name], whole.calls[name][0]
        floats = [leaf for leaf in call.inputs if leaf.is_floating_point()]
        if len(call.inputs) != 1 or len(floats) != 1 or len(call.outputs) != 1 or not module.training:
            return False
        try:
            with torch.no_grad(), Pinned():
                self.restore()
                plain = module(floats[0].clone())
                self.restore()
                moved = module(2 * floats[0] + 1)
        except Exception:  # the layer needs further arguments
            return False
        alike = isinstance(plain, Tensor) and not unequal(plain, moved, 0.02)
        return alike and bool((plain != plain.reshape(-1)[:1]).any())

    def _clean_in_eval(self, name: str) -> bool:
        with self.evaluating([name]):
            whole = layers_in_parts.trace(self.model, self.passes(self.subject.rows))
            return name not in self._unlike(whole)[0]

    def _reads_buffers(self, name: str) -> bool:
        """Whether its output in training depends on the values of its buffers."""
        module = self.modules[name]
        floats = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        whole = layers_in_parts.trace(self.model, self.passes(self.subject.rows))

        def run() -> Any:
            with torch.no_grad(), Pinned():
                self.restore()
                for buffer in floats:
                    buffer.mul_(1.5).add_(0.25)
                return self.subject.forward(self.subject.rows)

        return name in layers_in_parts.compare(self.model, run, whole, self.subject.whole).unlike

    def _by_size_alone(self) -> bool:
        """Whether each part's outputs stay the same when all other samples are replaced."""
        rows = self.subject.rows
        with torch.no_grad(), self.with_running_statistics():
            one = self.run(rows)
            for part in self.subject.parts:
                two = self.run(tree_map_only(Tensor, partial(repeated, part=part), rows))
                pairs = zip(tree_iter(cut(one, part)), tree_iter(cut(two, part)), strict=True)
                if any(unequal(a, b) for a, b in pairs if isinstance(a, Tensor)):
                    return False
        return True

    def repeats(self) -> list[str]:
        """Layers, or the loss, that differ between two passes with the same state and seed."""
        found = list(self.not_repeatable)
        one, two = self.results(self.subject.rows), self.results(self.subject.rows)
        if not found and any(unequal(a, b, 1e-12) for a, b in zip(one, two, strict=True)):
            found.append("the loss")
        return found

    def state(self) -> list[dict[str, Any]]:
        """State that a forward pass changes, and changes differently for a part of the batch."""
        rows = self.subject.rows
        after = self._after(rows)
        twice = self._after(rows, 1)
        parts = [self._after(cut(rows, part)) for part in self.subject.parts]
        unlike: dict[str, str] = {}
        for name in dict.fromkeys(name for each in (after, *parts) for name in each):
            kinds = {each[name][0] for each in (after, *parts) if name in each}
            values = [each.get(name, ("", None))[1] for each in (after, *parts)]
            if name in after and name in twice and unequal(values[0], twice[name][1]):
                continue  # it stores a random number
            if any(unequal(values[0], value) for value in values[1:]):
                unlike[name] = kinds.pop()
        saved, norms = set(self.model.state_dict()), tuple(f"{norm}." if norm else "" for norm in self.norms)
        found = []
        for kind in dict.fromkeys(unlike.values()):
            names = [name for name in unlike if unlike[name] == kind and not name.startswith(norms)]
            feeds = bool(names) and self._feeds(names, after, parts[0])
            found += [{"name": name, "kind": kind, "feeds": feeds} for name in names if feeds or name in saved]
        # each forward pass changes these once, by the same amount for a part
        moved = [name for name, (kind, _) in after.items() if kind == "frozen" and name not in unlike]
        return found + [{"name": name, "kind": "momentum", "feeds": False} for name in moved]

    def _after(self, rows: Any, seed: int = 0) -> dict[str, tuple[str, Any]]:
        with torch.no_grad(), Pinned():
            self.subject.terms(self.run(rows, seed), rows)
        found = self.saved.changed()
        self.restore()
        return found

    def _feeds(self, names: Sequence[str], one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether the next pass differs between the two states."""
        results = []
        for each in (one, other):
            self.restore()
            with torch.no_grad(), Pinned():
                self.saved.set_values({name: each[name][1] for name in names if name in each})
                output = self.subject.forward(self.subject.rows)
                terms = self.subject.terms(output, self.subject.rows)
            results.append([leaf for leaf in tree_iter((output, list(terms.values()))) if isinstance(leaf, Tensor)])
        return len(results[0]) != len(results[1]) or any(unequal(a, b) for a, b in zip(*results, strict=True))

    def laws(self) -> list[dict[str, Any]]:
        subject, loss_terms = self.subject, self.subject.loss_terms
        if not loss_terms:
            return []
        with self.with_running_statistics():
            if not subject.own_loss:
                with torch.no_grad():
                    output = self.run(subject.rows)
                self.restore()
                return examine_terms(Fixed(self._rested(loss_terms), output, subject.rows), subject.parts, subject.rows)

            def compute(rows: Any) -> Any:
                output = self.run(rows)
                return output, loss_terms(output, rows)

            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            with gradient_hooks.off(self.model):
                through = Recomputed(compute, subject.rows, subject.count, trained)
                return examine_terms(through, subject.parts, subject.rows)

    def _rested(self, loss_terms: LossTerms) -> LossTerms:
        """The loss, with its own state restored before each call."""

        def rested_terms(output: Any, rows: Any) -> Any:
            self.restore()
            return loss_terms(output, rows)

        return rested_terms

    def hooks(self) -> dict[str, Any]:
        """Whether hooks on parameters depend on the size of the gradient."""
        return gradient_hooks.on_parameters(self.model, self._parts_of_gradient(), self.restore, self.saved)

    def backward(self) -> dict[str, Any]:
        """Whether backward from the model's outputs is additive over the parts of the batch."""
        if self.mixes or self.random_layers:
            return {}
        return gradient_hooks.inside(self.model, self._pull, self.subject.parts, self.with_running_statistics)

    def _pull(self, part: Part | None, scale: float) -> list[Tensor | None]:
        """Gradients of the parameters for fixed gradients at the outputs of all samples, or of a part."""
        subject = self.subject
        output = self.run(cut(subject.rows, part) if part else subject.rows)
        generator = torch.Generator().manual_seed(1)
        total = torch.zeros((), dtype=torch.float64)
        count = part.size if part else subject.count
        for leaf in differentiable(output):
            if not leaf.dim() or len(leaf) % count:
                continue
            shape = (len(leaf) // count * subject.count, *leaf.shape[1:])
            weights = torch.randn(shape, generator=generator, dtype=torch.float64) * (scale / subject.count)
            total = total + (leaf * cut(weights, part) if part else leaf * weights).sum()
        for parameter in self.model.parameters():
            parameter.grad = None
        if not total.requires_grad:
            raise ValueError("no output has the samples first")
        total.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in self.model.parameters()]

    def _parts_of_gradient(self) -> list[list[Tensor]]:
        """The gradient of each process, without hooks."""
        subject, found = self.subject, []
        parameters = list(self.model.parameters())
        for part in subject.parts:
            with self.with_running_statistics(), gradient_hooks.off(self.model):
                rows = cut(subject.rows, part)
                output = self.run(rows)
                if subject.loss_terms:
                    terms = [v * times / subject.count for v, times, _ in subject.loss_terms(output, rows).values()]
                else:
                    terms = [leaf.square().mean() for leaf in differentiable(output)]
                total = sum(terms, start=torch.zeros((), dtype=torch.float64))
                trained = [p for p in parameters if p.requires_grad]
                known = iter(torch.autograd.grad(total, trained, allow_unused=True))
            each = [next(known) if p.requires_grad else None for p in parameters]
            found.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, each, strict=True)])
        return found

    def random(self) -> dict[str, Any]:
        """Whether the result of a pass depends on the seed."""
        with Pinned(pins=False) as counts:
            one, two = self.results(self.subject.rows, 0), self.results(self.subject.rows, 1)
        differs = len(one) != len(two) or any(unequal(a, b) for a, b in zip(one, two, strict=True))
        where: list[str] = []
        if differs:
            passes = [self.passes(self.subject.rows, seed, pins=False) for seed in (0, 1)]
            whole = layers_in_parts.trace(self.model, passes[0])
            unlike = layers_in_parts.compare(self.model, passes[1], whole, self.subject.whole).unlike
            where = sorted(unlike) or ["the loss"]
        return {"differs": differs, "draws": counts.draws, "where": where}

    def narrow(self) -> dict[str, int]:
        """How often float64 becomes float32, by module."""
        stack: list[str] = []
        handles = []

        def leave(*_: Any) -> None:
            stack.pop()

        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
            handles.append(module.register_forward_hook(leave))
        try:
            with torch.no_grad(), Pinned(lambda: stack[-1] if stack else "the loss") as noted:
                output = self.run(self.subject.rows)
                terms = self.subject.terms(output, self.subject.rows)
        finally:
            for handle in handles:
                handle.remove()
        if any(value.dtype == torch.float32 for value, _, _ in terms.values()):
            noted.narrow["the loss"] = noted.narrow.get("the loss", 0) + 1
        return {name or "the model": number for name, number in noted.narrow.items()}

    def metric(self) -> list[str]:
        """The metric's values whose sums over the parts differ from those over the batch."""
        subject = self.subject
        if not subject.metric:
            return []
        with torch.no_grad(), Pinned():
            output = self.run(subject.rows)
            whole = subject.metric(output, subject.rows)
            parts = [subject.metric(cut(output, part), cut(subject.rows, part)) for part in subject.parts]
        found = []
        for name, (value, weight) in whole.items():
            total = sum(each.get(name, (0.0, 0.0))[0] for each in parts)
            weights = sum(each.get(name, (0.0, 0.0))[1] for each in parts)
            if weights and weight and unequal(float(value / weight), float(total / weights), 1e-5):
                found.append(name or "the metric")
        return found

    def padding(self) -> list[int]:
        """Parts whose loss differs between the samples as their process reads (pads) them and as the batch has them."""
        found = []
        for number, (part, read) in enumerate(zip(self.subject.parts, self.subject.read, strict=False)):
            own_rows = cut(self.subject.rows, part)
            shapes = [[leaf.shape for leaf in tree_iter(each) if isinstance(leaf, Tensor)] for each in (own_rows, read)]
            if shapes[0] == shapes[1]:
                continue
            with torch.no_grad(), self.with_running_statistics():
                losses = []
                for rows in (own_rows, read):
                    terms = self.subject.terms(self.run(rows), rows)
                    losses.append([value * times / max(weight, 1e-30) for value, times, weight in terms.values()])
            if any(unequal(a, b) for a, b in zip(*losses, strict=True)):
                found.append(number)
        return found
