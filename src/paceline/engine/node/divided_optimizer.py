"""The optimizer of a node that updates shards of the weights, while other nodes update the others.

Shards replace the parameters in the optimizer's groups; number, order and options of the groups do not change. Only for
optimizers whose update of an element depends on that element alone (SGD, Adam, ...).

*Invariants*: the assembled state is that of one process; dividing it again, among any number of nodes, gives the same
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import contract
from paceline.engine.checks import own_steps
from paceline.engine.compute import state_store
from paceline.engine.compute.optimizer_step import step_if_finite
from paceline.engine.node.optimizer_shards import SLICES, division
from paceline.engine.node.several_optimizers import kind_of
from paceline.messages import Shard, Update


class DividedOptimizer(contract.DividedOptimizer):
    """``parameters``: those that are trained, by name. Raises ValueError for an optimizer that cannot be divided."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]):
        if division(optimizer) != SLICES:
            raise ValueError(
                f"optimizer {kind_of(optimizer)} may need whole weights for an update, and each node would have "
                f"parts of them; use an elementwise optimizer of torch.optim, such as SGD or AdamW"
            )
        if own_steps.hooked(optimizer):
            raise ValueError(
                f"optimizer {kind_of(optimizer)} has step hooks, which would see parts of weights on each node; remove "
                f"them, or use another exchange"
            )
        self._optimizer, self._parameters = optimizer, parameters
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        self._parts: dict[Shard, nn.Parameter] = {}

    def divide(self, shards: Sequence[Shard]) -> None:
        self._whole = [list(group["params"]) for group in self._optimizer.param_groups]
        self.shards, self._parts = tuple(shards), {}
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        by_name: dict[str, list[Shard]] = {}
        for shard in shards:
            by_name.setdefault(shard[0], []).append(shard)
        for group in self._optimizer.param_groups:
            kept = []
            for parameter in group["params"]:
                if (name := names.get(id(parameter))) is None or not parameter.numel():
                    kept.append(parameter)  # not trained here: unchanged
                    continue
                state = self._optimizer.state.pop(parameter, None)
                for shard in by_name.get(name, ()):
                    part = self._parts[shard] = nn.Parameter(self._view(shard))
                    kept.append(part)
                    if state is not None:
                        self._optimizer.state[part] = _cut(state, parameter.shape, shard)
            group["params"] = kept
        self._optimizer.state_dict = self._incomplete  # type: ignore[method-assign]
        self._optimizer.load_state_dict = self._divided  # type: ignore[method-assign,assignment]
        self._optimizer.add_param_group = self._too_late  # type: ignore[method-assign,assignment]

    def _view(self, shard: Shard) -> Tensor:
        name, first, end = shard
        weight = self._parameters[name].detach()
        return state_store.read(weight, first, end) if weight.dim() else weight

    def apply(self, update: Update, used: Mapping[str, int]) -> tuple[bool, float | None]:
        """(whether the shards' gradients were applied, the norm of the whole gradient)."""
        gradients = dict[str, Tensor]()
        for gradient in update.gradients:
            assert gradient.flat is not None
            bucket = gradient.bucket
            gradients |= zip(bucket.names, torch.split(gradient.flat, list(bucket.numels)), strict=True)
        for shard, part in self._parts.items():
            name, first, end = shard
            part.data = self._view(shard)  # whatever has changed the weight since
            part.grad = gradients[name][first:end].view(part.shape).to(part.device) if used[name] else None
        result = step_if_finite(list(self._parts.values()), self._optimizer, update.rule, update.rule.squares)
        for shard, part in self._parts.items():
            part.grad = None  # a view of the whole bucket's sum
            self._write(shard, part.detach())
        return result

    def _write(self, shard: Shard, values: Tensor) -> None:
        """Writes the values of a part that is no view of its weight, which is not contiguous."""
        name, first, end = shard
        weight = self._parameters[name].detach()
        if not weight.is_contiguous():
            flat = weight.reshape(-1)
            flat[first:end] = values
            weight.copy_(flat.view(weight.shape))

    def values(self, shard: Shard) -> Tensor:
        name, first, end = shard
        return state_store.read(self._parameters[name], first, end)

    def state(self, shard: Shard) -> dict[str, Any]:
        part = self._parts.get(shard)
        return {} if part is None else dict(self._optimizer.state.get(part, {}))

    def assemble(self, states: Mapping[Shard, Mapping[str, Any]]) -> None:
        found: dict[str, dict[Shard, Mapping[str, Any]]] = {}
        for shard, state in states.items():
            found.setdefault(shard[0], {})[shard] = state
        own = [(part, *each) for part in self._parts.values() for each in self._optimizer.state.get(part, {}).items()]
        devices = {(part.device, key): value.device for part, key, value in own if isinstance(value, Tensor)}
        self._hold_whole()
        for name, its in found.items():
            if any(its.values()):
                whole = self._parameters[name]
                joined = _joined(whole, its)
                places = {key: devices.get((whole.device, key)) for key in joined}
                moved = {k: v.to(places[k] or v.device) if isinstance(v, Tensor) else v for k, v in joined.items()}
                self._optimizer.state[whole] = moved

    def _hold_whole(self) -> None:
        """The parameters themselves again, without any state of theirs."""
        if self.shards is None:
            return
        for part in self._parts.values():
            self._optimizer.state.pop(part, None)
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        del self._optimizer.state_dict, self._optimizer.load_state_dict, self._optimizer.add_param_group
        self.shards, self._parts = None, {}

    def _incomplete(self) -> NoReturn:
        raise RuntimeError(
            "optimizer.state_dict() was called between two steps, when each node has a part of the state; "
            "pace.save(folder) saves all of it, and after pace.close() state_dict() returns it"
        )

    def _divided(self, state: Any) -> NoReturn:
        raise RuntimeError(
            "optimizer.load_state_dict() was called between two steps, when each node has a part of the state; load it "
            "before join(), or call pace.restore(folder)"
        )

    def _too_late(self, group: Any) -> NoReturn:
        raise ValueError(
            "a parameter group was added after join(), when the optimizer's work is already divided between the "
            "nodes; add it before join()"
        )


def _cut(state: Mapping[str, Any], shape: torch.Size, shard: Shard) -> dict[str, Any]:
    """Copies of these values of tensors of the weight's shape, and of all else."""
    _, first, end = shard

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (state_store.read(value, first, end) if value.shape == shape and shape else value).clone()

    return {key: cut(value) for key, value in state.items()}


def _joined(parameter: Tensor, states: Mapping[Shard, Mapping[str, Any]]) -> dict[str, Any]:
    """The reverse of `_cut`. ``states``: of all values of the parameter."""
    ordered = sorted(states.items(), key=lambda item: item[0][1])
    (_, first, end), some = ordered[0]
    joined = dict[str, Any]()
    for key, value in some.items():
        if not parameter.dim() or not isinstance(value, Tensor) or value.shape != (end - first,):
            joined[key] = value
            continue
        flat = torch.cat([state[key] for _, state in ordered])
        joined[key] = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
        joined[key].copy_(flat.view(parameter.shape))
    return joined
