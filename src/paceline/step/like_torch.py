"""What loops written for torch do with a loss, what to write instead of names that other libraries' handles have.

The loss of a step is a number, since backward and the update are done. It has the methods by which loops read a tensor.
Alone on a GPU it is read where it is used, as a tensor would be.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn, cast

import torch

INSTEAD = {
    "module": "the model is your own object: use it, as in model.state_dict()",
    "no_sync": "give join(accumulate=k), or call pace.backward several times before pace.update",
    "torch.distributed": "give pace.batches the dataset, or its loader without DistributedSampler; collectives are "
    "pace.all_reduce and pace.gather, rank 0 is pace.leader",
    "torch.save": "write torch.save(model.state_dict(), path), or pace.export(path)",
    "state_dict": "pace.save() saves all state; the weights alone are model.state_dict()",
    "load_state_dict": "pace.restore() restores all state; for weights alone use model.load_state_dict before join()",
    "parameters": "the model is your own object: use model.parameters()",
    "train": "the model is your own object: use model.train()",
    "eval": "use pace.evaluate(dataset, metric), or model.eval() for what one process computes",
    "zero_grad": "every step begins without gradients; leave it out",
    "prepare": "join(model, optimizer, loss, batch_size=...) takes them, and pace.batches(dataset) the data",
    "set_epoch": "pace.batches shuffles every epoch anew; leave it out",
    "barrier": "pace.once(work) lets one process of each node work while the others wait",
    "register_for_checkpointing": "use pace.keep(name=object)",
    "print": "use: if pace.leader: print(...)",
    "is_main_process": "use pace.leader",
    "is_local_main_process": "use pace.once()",
    "wait_for_everyone": "pace.once(work) lets one process of each node work while the others wait",
    "unwrap_model": "the model is your own object, and is not wrapped",
    "clip_grad_norm_": "give join(clip=norm), or call pace.clip(norm) before pace.update",
    "rank": "use pace.world.rank",
    "local_rank": "use pace.world.local_rank",
    "world_size": "use pace.world.world_size",
    "size": "use pace.world.world_size",
    "accumulate": "give join(accumulate=k)",
    "autocast": "give join(precision='bf16') or 'fp16'",
    "scaler": "join(precision='fp16') scales the loss itself",
    "optimizer": "the optimizer is your own object; pace.step steps it",
    "model": "the model is your own object: use it",
    "scheduler": "give join(scheduler=...), which pace.step steps",
    "save_state": "use pace.save(), or pace.save(folder)",
    "load_state": "use pace.restore(), or pace.restore(folder)",
    "save_checkpoint": "use pace.save(), or pace.save(folder)",
    "load_checkpoint": "use pace.restore(), or pace.restore(folder)",
    "save_model": "use pace.export(path), or pace.save() for all state",
    "gather_for_metrics": "pace.evaluate(dataset, metric) counts each sample once; pace.gather(tensor) gives all",
    "all_gather": "use pace.gather(tensor)",
    "reduce": "use pace.all_reduce(tensor, 'sum')",
    "num_processes": "use pace.world.world_size",
    "process_index": "use pace.world.rank",
    "local_process_index": "use pace.world.local_rank",
    "global_rank": "use pace.world.rank",
    "is_global_zero": "use pace.leader",
    "main_process_first": "pace.once(work) lets one process of each node work while the others wait",
    "setup": "join(model, optimizer, loss, batch_size=...) takes them, and pace.batches(dataset) the data",
    "setup_dataloaders": "pace.batches(dataset) takes a DataLoader, too, and divides each batch",
    "sampler": "pace.batches(dataset) divides the samples among the processes",
    "clip_gradients": "give join(clip=norm), or call pace.clip(norm) before pace.update",
    "sync_gradients": "every pace.step and pace.update synchronises; give join(accumulate=k) for micro-batches",
    "fit": "call pace.step(batch) for each batch of pace.batches(dataset, epochs=n)",
    "train_batch": "use pace.step(batch)",
    "end_training": "use pace.close(), or leave the `with` block",
    "device": "the model's own, next(model.parameters()).device; pace.rows and pace.step move samples there",
}


def missing(name: str, known: Iterable[str]) -> str:
    """The text of the error for an attribute that `Pace` has not."""
    close = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1)
    hint = INSTEAD.get(name) or (f"did you mean {close[0]!r}?" if close else "")
    return f"what join() returned has no attribute {name!r}" + (f"; {hint}" if hint else "")


def hint_for(error: BaseException, models: Sequence[torch.nn.Module]) -> str:
    """What to write instead of ``model.module``, ``model.no_sync()``, ``torch.save(model)`` and what needs a process
    group, where the error is that the model of `join` has none, or cannot be pickled, or that there is no group. Code
    asks models by hasattr whether they are wrapped, so they must not have these."""
    if models and "Default process group has not been initialized" in str(error):
        return f"join() makes no process group of torch.distributed: {INSTEAD['torch.distributed']}"
    if any(name in str(error) for name in _hooks(models)):
        return f"join() has hooks in the model, which cannot be pickled: {INSTEAD['torch.save']}"
    name, owner = getattr(error, "name", None), getattr(error, "obj", None)
    if not isinstance(error, AttributeError) or name not in ("module", "no_sync"):
        return ""
    return f"join() does not wrap the model: {INSTEAD[name]}" if any(owner is each for each in models) else ""


def _hooks(models: Iterable[torch.nn.Module]) -> Iterator[str]:
    """The names by which pickle knows our functions inside of functions, in its error."""
    for module in chain.from_iterable(model.modules() for model in models):
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if "<locals>" in getattr(hook, "__qualname__", "") and hook.__module__.startswith("paceline."):
                yield hook.__qualname__


def _scaled(_: Any) -> NoReturn:
    """The `iter` of a loss, which torch.amp.GradScaler asks for what is no tensor."""
    raise TypeError(
        "the loss of pace.step is one number, whose gradient is applied already: it cannot be iterated over or scaled; "
        "leave torch.amp.GradScaler out, and give join(precision='fp16'), which scales the loss itself"
    )


def _seen(self: Any, name: str) -> Any:
    """Others ask by the name whether there is anything to iterate over, as pandas of what it is to keep."""
    if name == "__iter__":
        raise AttributeError(name)
    return object.__getattribute__(self, name)


class LossValue(float):
    """The mean loss of a step over the global batch. Pickled, as by torch.save, it is a tensor: torch.load accepts no
    class that it does not know."""

    def item(self) -> float:
        return float(self)

    def detach(self) -> LossValue:
        return self

    def cpu(self) -> LossValue:
        return self

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "pace.step has computed the gradient and applied it: leave loss.backward() and optimizer.step() out; in a "
            "loop of your own use rows = pace.rows(batch), pace.backward(loss), pace.update()"
        )

    __iter__, __getattribute__ = _scaled, _seen

    def __copy__(self) -> LossValue:
        return self

    def __deepcopy__(self, _: Any) -> LossValue:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.tensor(float(self), dtype=torch.float64).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _read_first(name: str) -> Callable[..., Any]:
    def method(self: UnreadLoss, *others: Any) -> Any:
        return getattr(self.item(), name)(*map(_value, others))

    return method


def _value(argument: Any) -> Any:
    return argument.item() if isinstance(argument, UnreadLoss) else argument


class UnreadLoss:
    """The mean loss of a step that a GPU still computes. It is waited for where it is used as a number: `LossValue`."""

    def __init__(self, read: Callable[[], float]):
        self._read: Callable[[], float] | None = read
        self._value = 0.0

    def item(self) -> float:
        if self._read is not None:
            self._value, self._read = self._read(), None
        return self._value

    def detach(self) -> UnreadLoss:
        return self

    def cpu(self) -> LossValue:
        return LossValue(self.item())

    def __float__(self) -> float:
        return self.item()

    backward = LossValue.backward
    __iter__, __getattribute__ = _scaled, _seen

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Among the arguments of torch's functions it is a number, too."""
        return func(*map(_value, args), **{name: _value(each) for name, each in (kwargs or {}).items()})

    def __copy__(self) -> UnreadLoss:
        return self

    def __deepcopy__(self, _: Any) -> UnreadLoss:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)


READ = "abs add bool ceil divmod eq floor floordiv format ge gt hash int le lt mod mul ne neg pos pow radd repr "
READ += "rdivmod rfloordiv rmod rmul round rpow rsub rtruediv str sub truediv trunc"
for each in (f"__{name}__" for name in READ.split()):
    setattr(UnreadLoss, each, _read_first(each))
numbers.Real.register(UnreadLoss)


def as_loss(loss: float | UnreadLoss) -> LossValue:
    """What a step returns."""
    return cast(LossValue, loss) if isinstance(loss, UnreadLoss) else LossValue(loss)


def logged(name: str, value: Any) -> float:
    """The value as a float. Raises ValueError for what is not one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"log({name!r}, ...) takes one number, got {value!r:.100}; log parts by their own names"
        ) from None
