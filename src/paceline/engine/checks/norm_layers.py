"""Which layers normalise over a batch: their output for a sample depends on the other samples of the process."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def over_batches(model: nn.Module) -> dict[str, nn.Module]:
    """By name: torch.nn's batch norm and what is derived from it, and any other layer that keeps a mean and a
    variance, in buffers or in parameters that do not train."""
    return {name: module for name, module in model.named_modules() if _normalises(module)}


def _normalises(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm | _InstanceNorm):
        return isinstance(module, _BatchNorm)
    kept = [name for name, each in module._parameters.items() if each is not None and not each.requires_grad]
    kept += module._buffers
    return all(any(word in name for name in kept) for word in ("mean", "var"))


def own_statistics(model: nn.Module) -> str:
    """One line about layers that normalise each process's own samples, where several have some; or nothing."""
    names = [name for name, module in over_batches(model).items() if module.training]
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"batch norm ({names[0]}{more}) takes the statistics of each process's, replica's or micro-batch's own "
        f"samples, as in DistributedDataParallel: the result depends on how many there are; join(batch_norm='sync') "
        f"takes those of the global batch"
    )
