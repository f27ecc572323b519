"""A subclass of torch's DistributedDataParallel: the same results in fewer bytes, where layers allow it.

Everything that torch's class does, it still does: buckets, buffers, unused parameters, `no_sync`, `join`, graphs. What
is ours is how a bucket's gradients are summed over the ranks (`paceline.ddp.sums`): as factors of fully-connected
layers that pay; on one machine in memory that its ranks share; and between machines, where the network is slow, in
buckets that are smaller and begin sooner, of two ranks also compressed. Any other model has torch's class to the last
bit. A hook that a script registers takes our place.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel as Base

from paceline.ddp import exit_report, fused, handshake, import_hook, stopwatch
from paceline.ddp.lost_ranks import watch
from paceline.ddp.sums import hierarchical
from paceline.ddp.sums.bucket_sums import UNLIKE, BucketSums
from paceline.ddp.sums.factors import Factors
from paceline.ddp.sums.lane import Lane
from paceline.ddp.sums.packed_sums import PackedSums
from paceline.report.log import log

dist: Any = torch.distributed  # its stubs leave out what we use

BUCKET_BYTES = 2 << 20  # 17 ms at 1 Gbit/s: many round trips of a local network, and little is left after backward
SLOW_SUM_S, PROBES = 6e-3, 3  # of a bucket's sum, as at 3 Gbit/s: of faster ones many cost more than they hide


class _InPlace(type(Base)):  # type: ignore[misc]
    """Whoever asks for torch's class by its name is given ours, and asks of instances that were made before, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Base) if cls.__dict__.get("_in_place") else super().__instancecheck__(instance)


class DistributedDataParallel(Base, metaclass=_InPlace):
    """As torch's, with its arguments, in every process of ``process_group``. Raises what torch's raises."""

    _in_place = True
    # of the class, since a pickle of torch's own has none of them
    _sums: BucketSums | None = None
    _theirs: tuple[Any, Callable[..., Any]] | None = None
    _stopwatch: stopwatch.Stopwatch | None = None
    _fused: fused.Fused | None = None
    _small_buckets = False
    _slow_network = False  # between ranks on several machines
    _hooked = False  # by the script

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any):
        kept = fused.wanted(module, _compiled(module))
        with kept.kept_out(module) if kept else contextlib.nullcontext():
            super().__init__(module, *arguments, **options)
        self._fused = kept
        self._stopwatch = stopwatch.made(self.process_group, alone=not kept)
        gloo = dist.get_backend(self.process_group) == "gloo"
        if gloo and dist.get_world_size(self.process_group) > 1:
            self._sums = self._made(module)
        if self._slow_network and not (self._small_buckets or self.mixed_precision or self._left_to_torch(module)):
            self._remake_reducer()
        if self._sums and not self._left_to_torch(module):
            _install(self, self._sums)
        elif gloo and not _asked_for_torchs() and Factors(module, dist.get_world_size(self.process_group)).of:
            self._say_why(self._why_torchs(module))
        exit_report.of_process.install()
        if kept:
            kept.begin(self.process_group, self._sums.lane if self._sums else None, on_cpus=gloo)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        exit_report.of_process.steps += torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._stopwatch and torch.is_grad_enabled():
            self._stopwatch.forward((*inputs, *options.values()), self.require_backward_grad_sync)
            if self._stopwatch.alone:
                with self.no_sync():
                    return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]
        return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]

    def _ddp_init_helper(self, *arguments: Any, **options: Any) -> None:
        """Makes torch's reducer: the cap of its buckets counts from the second backward pass on."""
        usual = self.bucket_bytes_cap
        default = getattr(self, "bucket_bytes_cap_default", False) and not getattr(self, "bucket_bytes_cap_list", None)
        self._small_buckets = (
            default and not self._hooked and _small_buckets_pay(self.module, self.process_group, self._slow_network)
        )
        self.bucket_bytes_cap = BUCKET_BYTES if self._small_buckets else usual
        try:
            super()._ddp_init_helper(*arguments, **options)  # type: ignore[no-untyped-call]
        finally:
            self.bucket_bytes_cap = usual  # by which torch's compiler cuts graphs

    def _made(self, module: nn.Module) -> BucketSums | None:
        """None where torch's own sums are as good, or are needed. Every rank comes here; each may know a reason."""
        group = self.process_group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        store = dist.distributed_c10d._get_process_group_store(group)
        factors = Factors(None if self._fused or self._left_to_torch(module) else module, size)
        number = store.add(f"paceline/ddp/made/{rank}", 1)  # of those that all ranks have made
        messages = handshake.exchange(store, number, rank, size, self._message(module, factors))
        sums, machines = None, handshake.machines(messages)
        self._slow_network = len(set(machines)) > 1 and all(one["cpu"] for one in messages) and _slow(group)
        if factors.of and not handshake.alike(messages):
            factors = Factors(None, size)
            if rank == 0:
                log.info(UNLIKE)
        shares = len(set(machines)) < len(machines) and all(one["shares"] for one in messages)
        packs = self._slow_network and size == 2 and not factors.of and all(one["sums"] for one in messages)
        if self._fused or factors.of or shares or packs:
            lane = Lane(group, store, str(number), _timeout(group), machines or [0] * size, shares)
            sums = BucketSums(factors, group, lane, PackedSums(lane) if packs else None)
        watch(group, store, {address for one in messages for address in one["addresses"]})
        return sums

    def _message(self, module: nn.Module, factors: Factors) -> dict[str, Any]:
        cpu, large = self.device_type == "cpu", _num_bytes(self._module_parameters) >= hierarchical.MIN_BYTES
        on_linux = sys.platform == "linux"  # its memory files, and sockets without a name on disk
        own, names = cpu and not self._left_to_torch(module), self._fused.names if self._fused else []
        may = {"cpu": cpu, "shares": own and large and on_linux, "sums": own and not self._fused}
        return handshake.message(list(factors.of.values()), names, **may)

    def _left_to_torch(self, module: nn.Module) -> bool:
        return bool(self._why_torchs(module)) or _asked_for_torchs()

    def _why_torchs(self, module: nn.Module) -> str:
        """What of this model has torch's sums; empty where ours serve it."""
        if self._delay_all_reduce_all_params:
            return "delay_all_reduce_named_params"
        if self._use_python_reducer:
            return "torch's Python reducer (compiled autograd)"
        if self._comm_hooks:
            return "a communication hook"
        return _why_no_factors(module)

    def _say_why(self, why: str) -> None:
        if why and dist.get_rank(self.process_group) == 0:
            log.info(f"DistributedDataParallel: gradients are summed as torch sums them, because of {why}")

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        fused.refuse_hooks(self._fused)
        self._take_usual_buckets()
        if not self._sums:
            super().register_comm_hook(state, hook)
            return
        if not self._left_to_torch(self.module):
            self._say_why("a communication hook")
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        if self._theirs:
            raise RuntimeError("register_comm_hook can only be called once")
        self.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
        self._comm_hooks.append((hook, state))
        self._theirs = state, hook

    def _take_usual_buckets(self) -> None:
        """A hook may depend on their size."""
        self._hooked = True
        if self._small_buckets:
            self._remake_reducer()
            if self._sums:
                _install(self, self._sums)

    def _remake_reducer(self) -> None:
        parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, sparse, names, self.static_graph)
        if self.static_graph:
            self.reducer._set_static_graph()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """C++ of torch's, by what is the same in Python where our hook is registered already."""
        fused.refuse_hooks(self._fused)
        self._take_usual_buckets()
        if not self._sums:
            super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]
            return
        half = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook
        self.register_comm_hook(self.process_group, hook)

    def _update_process_group(self, new_process_group: Any) -> None:
        fused.refuse_hooks(self._fused)
        super()._update_process_group(new_process_group)  # type: ignore[no-untyped-call]
        if self._sums:  # its connections are those of the ranks before
            self._theirs = new_process_group, default_hooks.allreduce_hook

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        with super()._inside_ddp_forward(), self._rows_kept():
            if self._sums and self.require_backward_grad_sync:
                self._sums.begin_forward()
            looks = self._sums and self._sums.factors.of and not self._theirs and torch.is_grad_enabled()
            if self._sums and looks and not _compiling() and not _compiled(self.module):
                with self._sums.factors.looking():
                    yield
            else:
                yield

    def _rows_kept(self) -> contextlib.AbstractContextManager[None]:
        if not self._fused:
            return contextlib.nullcontext()
        if _compiling():
            raise ValueError(f"{fused.ASKED} is not for a compiled model; {fused.WITHOUT}")
        return self._fused.forward(self._join_config.enable, whole=bool(self.require_backward_grad_sync))

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Of a rank that has joined: its part of every sum is nothing."""
        if not self._sums:
            super()._match_all_reduce_for_bwd_pass()  # type: ignore[no-untyped-call]
            return
        self._sums.active = False
        self._sums.between_passes()
        try:
            super()._match_all_reduce_for_bwd_pass()  # type: ignore[no-untyped-call]
        finally:
            self._sums.active = True

    def __getstate__(self) -> Any:
        if self._fused:
            raise ValueError(f"{fused.ASKED} is not for copies of a wrapper, but of its .module")
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_sums": None, "_theirs": None, "_stopwatch": None, "_fused": None}


def _install(module: DistributedDataParallel, sums: BucketSums) -> None:
    owner = weakref.ref(module)

    def paceline_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the types of a hook's arguments
        now = owner()
        if now is not None and now._theirs:
            theirs, hook = now._theirs
            return hook(theirs, bucket)
        joining = now is not None and now._join_config.enable and not now._divide_by_initial_world_size
        return sums.run(bucket, joining)

    dist._register_comm_hook(module.reducer, None, paceline_hook)


def _without_factors(module: nn.Module) -> bool:
    return _asked_for_torchs() or bool(_why_no_factors(module))


def _asked_for_torchs() -> bool:
    return os.environ.get(import_hook.VARIABLE) == import_hook.TORCHS


def _why_no_factors(module: nn.Module) -> str:
    return "a compiled model" if _compiled(module) else "an embedding with sparse gradients" if _sparse(module) else ""


def _compiled(module: nn.Module) -> bool:
    return any(
        each._compiled_call_impl is not None or type(each).__name__ == "OptimizedModule" for each in module.modules()
    )


def _compiling() -> bool:
    """Whether this wrapper itself is compiled: hooks would be traced."""
    eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    return torch.compiler.is_compiling() or bool(eval_frame and eval_frame.get_eval_frame_callback())


def _slow(group: Any) -> bool:
    """Whether a small bucket's sum takes long, by the rank that waits least: the same on all."""
    probe, took_s = torch.zeros(BUCKET_BYTES // 4), list[float]()
    for _ in range(PROBES):
        begin = time.perf_counter()
        dist.all_reduce(probe, group=group)
        took_s.append(time.perf_counter() - begin)
    least = torch.tensor(min(took_s[1:]))  # the first one may connect, or pass a shaped link at once
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    return bool(least > SLOW_SUM_S)


def _small_buckets_pay(module: nn.Module, group: Any, slow: bool) -> bool:
    """Whether sums of several small buckets overlap backward: on a slow network, or beside factors."""
    size = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo" or size == 1 or _without_factors(module):
        return False
    factors = {} if slow else Factors(module, size).of
    others = _num_bytes(each for each in module.parameters() if id(each) not in factors)
    return (slow or bool(factors)) and others > BUCKET_BYTES


def _num_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(each.nbytes for each in parameters if each.requires_grad)


def _sparse(module: nn.Module) -> bool:
    return any(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in module.modules())


def _timeout(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options._timeout
