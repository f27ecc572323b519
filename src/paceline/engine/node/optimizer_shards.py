"""Sharding of the optimizer's work and state among the processes of a node.

    slices           each element's update depends on that element alone (SGD, Adam, ...): each process has rows
                     of every weight; a weight with fewer rows than processes has one owner
    whole tensors    any other optimizer (Muon, Adafactor, LARS, a user's own): every weight has one owner,
                     balanced by size; a trial on small tensors must show that tensors do not depend on each other

The parts replace the parameters in the optimizer's groups; the number and order of the groups do not change.

*Invariants*: the gathered state is that of one process; loading it gives the same steps.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.engine.checks import own_steps
from paceline.engine.compute.state_store import is_cut
from paceline.engine.node.local_group import LocalGroup
from paceline.engine.node.several_optimizers import kind_of, members
from paceline.engine.node.shared_memory import LINE_BYTES, tensor_at
from paceline.messages import RowRange
from paceline.registry import THREADS

# torch.optim's optimizers that may update any slice of a weight by itself
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")
SLICES = "slices"
ALL = (0, 0)
DOING = "gathering the optimizer's state"

Part = tuple[str, slice, torch.nn.Parameter]  # name, rows, the part as the optimizer sees it


def division(optimizer: torch.optim.Optimizer) -> str:
    """The unit in which processes divide its work: any rows of a weight, or whole weights."""
    kinds = map(type, members(optimizer))
    alike = all(kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim") for kind in kinds)
    return SLICES if alike else "whole tensors"


class OptimizerShards:
    """This process's parts. ``unowned``: parameters that the optimizer does not hold. Raises ValueError for an
    optimizer that cannot be divided."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], local_group: LocalGroup):
        self.optimizer, self.local_group = optimizer, local_group
        self.division = division(optimizer)
        elementwise = self.division == SLICES
        if not elementwise and local_group.size > 1 and (why := _couples(optimizer)):
            raise ValueError(
                f"optimizer {kind_of(optimizer)} {why}, so its work cannot be divided among {local_group.size} "
                f"processes; use engine '{THREADS}:k', or an optimizer of torch.optim"
            )
        self._shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
        self._lengths = [len(group["params"]) for group in optimizer.param_groups]
        self._labels = [group.get("param_names") for group in optimizer.param_groups]
        self.own_parts: list[Part] = []
        self._rows: dict[int, slice] = {}  # by a parameter's number in the optimizer: this process's rows
        self._parts: dict[int, Tensor] = {}  # by the same: the part that replaces the parameter
        names = {id(parameter): name for name, parameter in parameters.items()}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.unowned = [name for name, parameter in parameters.items() if id(parameter) not in held]
        self._divide(names, self._owners(names, elementwise))
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign,assignment]
        optimizer.add_param_group = self._too_late  # type: ignore[method-assign,assignment]

    def _owners(self, names: Mapping[int, str], elementwise: bool) -> dict[int, int | None]:
        """Each parameter's owner, by number; None: all have rows. The largest first, to the process with the least."""
        numbered = enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        found = sorted(((i, p) for i, p in numbered if id(p) in names), key=lambda pair: (-pair[1].numel(), pair[0]))
        load, owners = [0] * self.local_group.size, dict[int, int | None]()
        for i, parameter in found:
            if elementwise and parameter.dim() and len(parameter) >= self.local_group.size:
                owners[i] = None
                continue
            owners[i] = owner = load.index(min(load))
            load[owner] += parameter.numel()
        return owners

    def _divide(self, names: Mapping[int, str], owners: Mapping[int, int | None]) -> None:
        rank, size, number = self.local_group.rank, self.local_group.size, 0
        for group in self.optimizer.param_groups:
            kept, labels = [], []
            for position, parameter in enumerate(group["params"]):
                owner = owners.get(number)
                if id(parameter) not in names:
                    kept.append(parameter)  # not trained here: unchanged
                    self._rows[number] = slice(None)
                elif owner is not None and owner != rank:
                    self.optimizer.state.pop(parameter, None)
                else:
                    rows = len(parameter) if parameter.dim() else 0
                    own = slice(rank * rows // size, (rank + 1) * rows // size) if owner is None else slice(None)
                    part = torch.nn.Parameter(parameter.data[own] if owner is None else parameter.data)
                    if parameter in self.optimizer.state:
                        state = self.optimizer.state.pop(parameter)
                        self.optimizer.state[part] = _cut(state, own, parameter.shape)
                    kept.append(part)
                    self.own_parts.append((names[id(parameter)], own, part))
                    self._rows[number], self._parts[number] = own, part
                if number in self._rows and "param_names" in group:
                    labels.append(group["param_names"][position])
                number += 1
            group["params"] = kept
            if "param_names" in group:
                group["param_names"] = labels

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as of one process. Every process of the node must call it. Its tensors are copies of the
        optimizer's, once in memory that the processes share."""
        own = self._own_state()
        whole = self._gather([(i, ALL) for i in range(len(self._shapes))], own["state"])
        return {"state": whole, "param_groups": own["param_groups"]}

    def rows(self, wanted: Sequence[tuple[int, RowRange]]) -> list[dict[str, Any] | None]:
        """The whole state of these rows of parameters, by their numbers; None where there is none. Every process of the
        node must call it, for the same rows."""
        whole = self._gather(wanted, self._own_state()["state"])
        return [whole.get(at) for at in range(len(wanted))]

    def _gather(
        self, wanted: Sequence[tuple[int, RowRange]], own: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """The whole state of each wanted range of rows, by its index in ``wanted``."""
        listed = [
            (at, key, *self._describe(i, key, value, window))
            for at, (i, window) in enumerate(wanted)
            for key, value in own.get(i, {}).items()
        ]
        received = [json.loads(body) for body in self.local_group.all_gather_bytes(json.dumps(listed).encode(), DOING)]
        places: dict[tuple[int, str], tuple[int, list[int], torch.dtype]] = {}
        whole: dict[int, dict[str, Any]] = defaultdict(dict)
        num_bytes = 0
        for at, key, value, shape, dtype in sorted((one for each in received for one in each), key=lambda one: one[0]):
            if dtype is None:
                whole[at].setdefault(key, value)
            elif (at, key) not in places:
                kind = getattr(torch, dtype)
                places[at, key] = (num_bytes, shape, kind)
                size = torch.Size(shape).numel() * kind.itemsize
                num_bytes += -(-size // LINE_BYTES) * LINE_BYTES
                whole[at][key] = None
        memory = self.local_group.shared_memory(num_bytes)
        for (at, key), (start, shape, kind) in places.items():
            whole[at][key] = tensor_at(memory, start, shape, kind)
            i, window = wanted[at]
            if i in own:
                part = own[i][key]
                _, into, of = self._place(i, part, window)
                whole[at][key][into].copy_(part[of])
        self.local_group.barrier(DOING)
        return dict(sorted(whole.items()))

    def _place(self, i: int, value: Tensor, window: RowRange) -> tuple[list[int], Any, Any]:
        """(the shape of the wanted rows, those of them that are in ``value``, and their place in ``value``)."""
        if not self._shapes[i] or value.shape != self._part_shape(i):
            return list(value.shape), ..., ...
        start, stop = window if window[1] else (0, self._shapes[i][0])
        into, of = self._common(i, start, stop)
        return [stop - start, *self._shapes[i][1:]], into, of

    def _common(self, i: int, start: int, stop: int) -> tuple[slice, slice]:
        """This process's rows among ``start`` to ``stop``: as indices into that range, and into its own part."""
        own_start, own_stop, _ = self._rows[i].indices(self._shapes[i][0])
        first = max(start, own_start)
        last = max(first, min(stop, own_stop))
        return slice(first - start, last - start), slice(first - own_start, last - own_start)

    def take(self, i: int, given: Mapping[str, Any] | None, window: RowRange) -> None:
        """Loads a parameter's rows as `rows` returned them elsewhere, as far as they are this process's; None: none."""
        if i not in self._parts:
            return
        own = self.optimizer.state.pop(self._parts[i], {})
        if given is not None:
            its = {key: self._put(i, own.get(key), value, window) for key, value in given.items()}
            self.optimizer.state[self._parts[i]] = its

    def _put(self, i: int, own: Any, its: Any, window: RowRange) -> Any:
        shape = self._shapes[i]
        if not is_cut(its, shape, window):
            return _cut({"": its}, self._rows[i], shape)[""]
        into, of = self._common(i, *window)
        if own is None:
            own = torch.zeros(self._part_shape(i), dtype=its.dtype)
        own[of].copy_(its[into])
        return own

    def _own_state(self) -> dict[str, Any]:
        """The optimizer's own state_dict, with the numbers that its parameters had before the division."""
        own = type(self.optimizer).state_dict(self.optimizer)
        numbers = sorted(self._rows)
        groups, start = [], 0
        for group, length, labels in zip(own["param_groups"], self._lengths, self._labels, strict=True):
            whole = {**group, "params": list(range(start, start + length))}
            groups.append(whole if labels is None else {**whole, "param_names": labels})
            start += length
        return {"state": {numbers[i]: state for i, state in own["state"].items()}, "param_groups": groups}

    def _describe(self, i: int, key: str, value: Any, window: RowRange) -> tuple[Any, list[int], str | None]:
        """(plain value, whole shape, type) of one entry of one parameter's state."""
        if isinstance(value, Tensor):
            return None, self._place(i, value, window)[0], str(value.dtype).removeprefix("torch.")
        if value is None or isinstance(value, bool | int | float | str):
            return value, [], None
        raise ValueError(
            f"optimizer {kind_of(self.optimizer)} keeps a {type(value).__name__} as {key!r} of a parameter; a "
            f"state divided among processes is gathered from tensors and plain numbers only; use engine '{THREADS}:k'"
        )

    def _part_shape(self, i: int) -> torch.Size:
        rows = range(*self._rows[i].indices(self._shapes[i][0]))
        return torch.Size([len(rows), *self._shapes[i][1:]])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a whole state, the same on every process, and keeps this process's parts of it."""
        given = [len(group["params"]) for group in state["param_groups"]]
        if given != self._lengths:
            raise ValueError(
                f"the optimizer has groups of {self._lengths} parameters, the state to load is of {given}; load the "
                f"state of an optimizer made the same way"
            )
        local = {number: position for position, number in enumerate(sorted(self._rows))}
        order = [number for group in state["param_groups"] for number in group["params"]]
        groups, start = [], 0
        for group, length in zip(state["param_groups"], self._lengths, strict=True):
            numbers = [i for i in range(start, start + length) if i in local]
            own = {**group, "params": [local[i] for i in numbers]}
            if "param_names" in group:
                own["param_names"] = [group["param_names"][i - start] for i in numbers]
            groups.append(own)
            start += length
        parts = {
            local[i]: _cut(state["state"][number], self._rows[i], self._shapes[i])
            for i, number in enumerate(order)
            if i in local and number in state["state"]
        }
        type(self.optimizer).load_state_dict(self.optimizer, {"state": parts, "param_groups": groups})

    def _too_late(self, group: Any) -> NoReturn:
        raise ValueError(
            "a parameter group was added after join(), when the optimizer's work is already divided among the "
            "processes of this node; add it before join()"
        )

    def close(self) -> None:
        """From now on `state_dict` raises: the processes no longer gather the whole state."""

        def closed() -> NoReturn:
            raise RuntimeError(
                "optimizer.state_dict() was called after pace.close(), when the state is divided among the processes "
                "of this node; call it, in every process, before pace.close() or inside the `with` block"
            )

        for each in members(self.optimizer):
            each.state_dict = closed


def _cut(state: Mapping[str, Any], own: slice, shape: torch.Size) -> dict[str, Any]:
    """One parameter's state, with only these rows of tensors of the parameter's shape; tensors are copies."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value[own] if value.shape == shape and own != slice(None) else value).clone()

    return {key: part(value) for key, value in state.items()}


def _couples(optimizer: torch.optim.Optimizer) -> str:
    """Why tensors are not updated each by itself, or "", by a trial: two together, and each alone.

    Where the optimizer refuses small tensors, the trial is repeated with larger ones.
    """
    if len(each := members(optimizer)) > 1:
        return next(filter(None, map(_couples, each)), "")
    if type(optimizer).__module__.startswith("torch.optim"):
        return ""  # none of torch's does, but for LBFGS, which is refused before
    try:
        try:
            differs = _differs_beside_others(optimizer, 4)
        except Exception:
            differs = _differs_beside_others(optimizer, 64)
    except Exception as error:
        return f"cannot be tried on two tensors of its own sizes up to 64 ({type(error).__name__}: {error})"
    return "updates a weight differently when there are others" if differs else ""


def _differs_beside_others(optimizer: torch.optim.Optimizer, most: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = [[[min(n, most) for n in p.shape] for p in group["params"][:2]] for group in optimizer.param_groups]
    values = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in row] for row in shapes]
    grads = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in row] for row in shapes]

    def train(only: tuple[int, int] | None) -> list[list[Tensor]]:
        twin, parts = _twin(optimizer), [[torch.nn.Parameter(value.clone()) for value in row] for row in values]
        for i, group in enumerate(twin.param_groups):
            group["params"] = [part for j, part in enumerate(parts[i]) if only in (None, (i, j))]
        for size in (1e-3, 1.0, 1e3):  # some clip what is large
            for row, given in zip(parts, grads, strict=True):
                for part, grad in zip(row, given, strict=True):
                    part.grad = grad * size
            twin.step()
        return [[part.detach() for part in row] for row in parts]

    together = train(None)
    return not all(
        torch.allclose(train((i, j))[i][j], value, rtol=1e-9, atol=0, equal_nan=True)
        for i, row in enumerate(together)
        for j, value in enumerate(row)
    )


def _twin(optimizer: torch.optim.Optimizer) -> Any:
    """A copy of the optimizer, without state, hooks or a wrapped step."""
    twin = object.__new__(type(optimizer))
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}  # not copied
    for key, value in vars(optimizer).items():
        if key not in ("step", "state", "state_dict", "load_state_dict", "add_param_group", "_whole"):
            twin.__dict__[key] = OrderedDict() if key.endswith("_hooks") else copy.deepcopy(value, dict(parameters))
    twin.state = defaultdict(dict)
    return twin


def splits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one step per tensor equals one step for all: no step counter outside of the tensors' states."""
    if own_steps.hooked(optimizer):
        return False
    if division(optimizer) == SLICES:
        return True
    if len(each := members(optimizer)) > 1:
        return all(map(splits, each))
    generator = torch.Generator().manual_seed(0)
    some = [_some(group["params"]) for group in optimizer.param_groups]
    small = [torch.randn([min(n, 4) for n in p.shape], generator=generator).to(p.dtype) for each in some for p in each]
    grads = [torch.randn(value.shape, generator=generator).to(value.dtype) for value in small]

    def train(together: bool) -> list[Tensor]:
        twin, parts, start = _twin(optimizer), [torch.nn.Parameter(value.clone()) for value in small], 0
        for group, each in zip(twin.param_groups, some, strict=True):
            group["params"], start = parts[start : start + len(each)], start + len(each)
        for _ in range(3):
            for stage in [parts] if together else [[part] for part in parts]:
                for part, grad in zip(parts, grads, strict=True):
                    part.grad = grad.clone() if any(part is each for each in stage) else None
                twin.step()
        return [part.detach() for part in parts]

    try:
        return all(torch.equal(one, other) for one, other in zip(train(True), train(False), strict=True))
    except Exception:
        return False  # it cannot step on small tensors: all in one step


def _some(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The first two, and one of each other type."""
    types = {parameter.dtype: parameter for parameter in reversed(parameters)}
    known = {parameter.dtype for parameter in parameters[:2]}
    return [*parameters[:2], *(parameter for dtype, parameter in types.items() if dtype not in known)]
