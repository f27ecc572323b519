"""Timeline trace of a few steps: what each node computed, communicated and waited for.

``PACELINE_TRACE=5`` traces steps 5 to 7, ``PACELINE_TRACE=5-9`` steps 5 to 9, of all nodes, into ``trace.json`` in the
run's folder (or the current one). The value on rank 0 counts for all. Other steps are not affected. A run that ends
before the last of these steps writes no trace.

    compute    the step; in it forward by layer, backward by bucket as each is ready, and the update
    wire       the operations of each channel: name, bytes, from the time the channel was free to the arrival
    waiting    for input; for the other nodes after backward (exposed communication); for the replica re-broadcast

The file is in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

*Source*: Trace Event Format: complete events ("X") on tracks (a process and a thread), and metadata ("M") naming them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from paceline.contract import Engine, Exchange, GlobalBatch
from paceline.environment import LaunchEnvironment
from paceline.job import Job
from paceline.messages import Gradient, Vote
from paceline.report.activity import AVERAGE, DATA, REPAIR, UPDATE, VOTE, Activity
from paceline.report.log import log
from paceline.report.record import Record, write_whole
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.transport import Control, Handle

VARIABLE, NAME = "PACELINE_TRACE", "trace.json"
NUM_STEPS = 3
POLL_S = 0.0005  # the resolution of arrival times
TIMEOUT_S = 10.0  # for operations that are not complete after the last step
COMPUTE, WAITING = "compute", "waiting"
PARTS = {
    DATA: (WAITING, "input"),
    VOTE: (WAITING, "exchange, not hidden"),
    UPDATE: (COMPUTE, "update"),
    AVERAGE: (WAITING, "reconcile"),
    REPAIR: (WAITING, "hold replicas together"),
}

now = time.perf_counter


class Transfer(Protocol):
    """An operation that has begun (`link.net.metered`)."""

    @property
    def lane(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def begin_s(self) -> float: ...
    @property
    def handle(self) -> Handle: ...


class Metered(Protocol):
    """A link that calls ``watch`` with every operation."""

    watch: Callable[[Any], None] | None


class Run(Protocol):
    """The parts of `step.run_state.RunState` that a tracer reads."""

    job: Job
    engine: Engine
    exchange: Exchange
    control: Control
    world: LaunchEnvironment
    record: Record
    activity: Activity
    folder: Path | None
    num_steps: int


class Tracer(StepObserver):
    """Traces steps ``first`` to ``last``."""

    def __init__(self, run: Run, metered: Metered, first: int, last: int):
        self.run, self.metered = run, metered
        self.first, self.last = first, last
        self._generation = run.control.generation
        self._tracks: dict[str, list[Event]] = {COMPUTE: [], WAITING: []}
        self._operations: list[_Operation] = []
        self._zero: float | None = None
        self._finished = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="paceline trace", daemon=True)
        self._drawing = False  # this step
        self._begin_s = self._gradient_s = 0.0
        self._passes: _Passes | None = None
        self._ready: list[tuple[float, Gradient]] = []
        self._forms: Sequence[str] = ()

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        if self._drawing:  # the previous step did not end
            self._stop()
            self.last = -1
            self._finished.set()
        number = self.run.num_steps
        if not self.first <= number <= self.last or self._changed():
            return batch
        if self._zero is None:
            self.run.control.all_reduce([0.0])  # ends everywhere at about the same time: the zero of all clocks
            self._zero = now()
            self._watcher.start()
        self._drawing, self._begin_s = True, now()
        self.metered.watch = lambda transfer: self._operations.append(_Operation(transfer))
        self.run.activity.watch = self._on_activity
        return batch

    def offering(self, offer: Callable[[Gradient], None]) -> Callable[[Gradient], None]:
        if not self._drawing:
            return offer
        if self._passes:
            self._passes.close()
        ready = self._ready = []
        compiled = getattr(getattr(self.run.engine, "numerics", None), "compile", False)
        self._passes, self._forms = _Passes(self.run.job.model, not compiled), self.run.exchange.forms()
        self._gradient_s = now()

        def offered(gradient: Gradient) -> None:
            ready.append((now(), gradient))
            offer(gradient)

        return offered

    def votes(self, vote: Vote) -> None:
        if self._passes:
            self._passes.close()
            self._draw(now(), self._passes)
            self._passes, self._ready = None, []

    def ends(self, summary: StepSummary) -> None:
        if not self._drawing:
            return
        self._stop()
        self._add(COMPUTE, f"step {summary.step}", self._begin_s, now(), verdict=summary.outcome.decision.value)
        if summary.step == self.last and not self._changed():
            self._write()

    def _stop(self) -> None:
        self._drawing, self.metered.watch, self.run.activity.watch = False, None, None
        if self._passes:
            self._passes.close()
            self._passes = None

    def _changed(self) -> bool:
        """Whether the members have changed since training began; between two steps all members know this alike."""
        if self.run.control.generation == self._generation:
            return False
        self.last = -1
        self._finished.set()
        text = "nodes failed or joined since training began, so no step is traced"
        self.run.record.write("hint", text=text)
        if self.run.record.folder and not self.run.world.local_rank:
            log.warning(text)
        return True

    def _on_activity(self, doing: str, begin_s: float, end_s: float) -> None:
        if doing in PARTS:
            self._add(*PARTS[doing], begin_s, end_s)

    def _add(self, track: str, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        self._tracks[track].append((name, begin_s, end_s, args))

    def _watch(self) -> None:
        """Notes the arrival time of each operation, until all have arrived."""
        end_s = float("inf")
        while not self._finished.wait(POLL_S) or (now() < end_s and not all(op.arrived_s for op in self._operations)):
            for operation in self._operations:
                operation.check()
            if self._finished.is_set():
                end_s = min(end_s, now() + TIMEOUT_S)
                time.sleep(POLL_S)

    def _draw(self, end_s: float, passes: _Passes) -> None:
        self._add(COMPUTE, "gradient", self._gradient_s, end_s)
        for i, (first_s, last_s) in enumerate(passes.whole):
            next_s = passes.whole[i + 1][0] if i + 1 < len(passes.whole) else end_s
            self._add(COMPUTE, "forward", first_s, last_s)
            self._add(COMPUTE, "backward", last_s, next_s)
        for name, first_s, last_s in passes.layers:
            self._add(COMPUTE, name, first_s, last_s)
        if self.run.control.size == 1:
            return  # no communication: the time at which a bucket is ready does not matter
        last_s = passes.whole[-1][1] if passes.whole else self._gradient_s
        for ready_s, gradient in sorted(self._ready, key=lambda pair: pair[0]):
            names, index = gradient.bucket.names, gradient.bucket.index
            name = f"{', '.join(names[:2])}{' ...' if len(names) > 2 else ''}"
            until_s = max(last_s, ready_s)
            self._add(COMPUTE, name, last_s, until_s, form=self._forms[index], bucket=index)
            last_s = until_s

    def _write(self) -> None:
        """Gathers the events of all processes; one process writes them to one file."""
        assert self._zero is not None
        self._finished.set()
        self._watcher.join()
        zero, lanes = self._zero, dict[str, list[Event]]()
        for operation in self._operations:
            lanes.setdefault(f"wire, {operation.transfer.lane}", []).append(operation.event())
        tracks = {COMPUTE: self._tracks[COMPUTE], **{lane: in_order(rows) for lane, rows in lanes.items()}}
        tracks[WAITING] = self._tracks[WAITING]
        shifted = {
            track: [(name, begin_s - zero, end_s - zero, args) for name, begin_s, end_s, args in rows]
            for track, rows in tracks.items()
        }
        self._tracks, self._operations = {COMPUTE: [], WAITING: []}, []
        host = os.environ.get("PACELINE_HOST", socket.gethostname())
        part = f", process {self.run.world.local_rank}" if self.run.world.local_size > 1 else ""
        own = json.dumps([self.run.world.node, f"{host}{part}", shifted]).encode()
        processes = [json.loads(message) for message in self.run.control.all_gather(own)]
        if self.run.world.node or self.run.world.local_rank:
            return
        path = (self.run.folder or Path()) / NAME
        timeline = document(processes, first_step=self.first, last_step=self.last)
        steps = f"steps {self.first} to {self.last}"
        try:
            write_whole(path, json.dumps(timeline))
        except OSError as error:
            log.warning(f"the trace of {steps} could not be written to {path} ({error})")
            return
        self.run.record.write("trace", first_step=self.first, last_step=self.last, path=str(path))
        log.info(f"the trace of {steps} is in {path}; open it in ui.perfetto.dev or chrome://tracing")


def requested(control: Control) -> tuple[int, int] | None:
    """The first and last step that rank 0 is to trace. Collective. Raises the same ValueError in all processes."""
    text = control.all_gather(os.environ.get(VARIABLE, "").encode())[0].decode()
    return parse(text) if text else None


def parse(text: str) -> tuple[int, int]:
    """The (first, last) step of "5" or "5-9"."""
    first, dash, last = text.partition("-")
    if first.isdigit() and (last.isdigit() if dash else True) and (not dash or int(last) >= int(first)):
        return int(first), int(last) if dash else int(first) + NUM_STEPS - 1
    raise ValueError(
        f"{VARIABLE}={text!r} on rank 0 is no step; give the first step to trace, as 5, or the first and the last, "
        f"as 5-9, or unset it"
    )


class _Passes:
    """Begin and end of the model's forward passes, and of each layer in them."""

    def __init__(self, model: nn.Module, watch: bool):
        self.whole: list[tuple[float, float]] = []
        self.layers: list[tuple[str, float, float]] = []
        self._begun: list[float] = []
        self._thread: int | None = None
        self._hooks: list[Any] = []
        if not watch:
            return  # torch.compile would compile the hooks, too
        self._hooks.append(model.register_forward_pre_hook(self._enter, prepend=True))
        self._hooks.append(model.register_forward_hook(self._leave, always_call=True))
        leaves = [(name, m) for name, m in model.named_modules() if name and not list(m.children())]
        for name, module in leaves:
            label = f"{name} ({type(module).__name__})"
            self._hooks.append(module.register_forward_pre_hook(self._enter_layer, prepend=True))
            self._hooks.append(
                module.register_forward_hook(lambda *_, label=label: self._leave_layer(label), always_call=True)
            )

    def _enter(self, *_: Any) -> None:
        self._thread = threading.get_ident()
        self._begun = [now()]

    def _leave(self, *_: Any) -> None:
        if len(self._begun) == 1:
            self.whole.append((self._begun.pop(), now()))
        self._begun, self._thread = [], None

    def _enter_layer(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:  # layers recomputed in backward belong to no forward pass
            self._begun.append(now())

    def _leave_layer(self, label: str) -> None:
        if threading.get_ident() == self._thread and len(self._begun) > 1:
            self.layers.append((label, self._begun.pop(), now()))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Operation:
    """An operation that has begun, and the time at which its end was seen."""

    def __init__(self, transfer: Transfer):
        self.transfer, self.arrived_s = transfer, 0.0

    def check(self) -> None:
        if not self.arrived_s and self.transfer.handle.done():
            self.arrived_s = now()

    def event(self) -> Event:
        transfer = self.transfer
        end_s = self.arrived_s or now()
        return transfer.what, transfer.begin_s, end_s, {"operation": transfer.operation, "bytes": transfer.num_bytes}


Event = Sequence[Any]  # name, begin and end in seconds, and a mapping of further fields


def document(processes: Iterable[tuple[int, str, Mapping[str, Sequence[Event]]]], **about: Any) -> dict[str, Any]:
    """``processes``: for each its node, its name, and its tracks by name, in the order in which they are shown.

    *Invariants*: a track's events nest or follow one another; times are whole nanoseconds, so none overlap by rounding.
    """
    events: list[dict[str, Any]] = []
    used: dict[int, int] = {}
    for node, name, tracks in processes:
        if node not in used:
            events.append(_named("process_name", node, 0, name=f"node {node}"))
        for track, rows in tracks.items():
            number = used[node] = used.get(node, 0) + 1
            events.append(_named("thread_name", node, number, name=f"{name}: {track}" if name else track))
            events.append(_named("thread_sort_index", node, number, sort_index=number))
            for label, begin_s, end_s, args in rows:
                begin, end = round(begin_s * 1e9), round(end_s * 1e9)
                event = {"ph": "X", "name": label, "cat": track, "pid": node, "tid": number}
                events.append({**event, "ts": begin / 1000, "dur": (end - begin) / 1000, "args": dict(args)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(kind: str, node: int, number: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": node, "tid": number, "args": args}


def in_order(rows: Iterable[Event]) -> list[Event]:
    """The operations of a channel that processes one at a time: each begins when the previous one has arrived."""
    found: list[Event] = []
    idle_s = float("-inf")
    for name, begin_s, end_s, args in sorted(rows, key=lambda event: (event[1], event[2])):
        start_s = max(begin_s, idle_s)
        idle_s = max(start_s, end_s)
        found.append((name, start_s, idle_s, {**args, "waited_ms": round(1000 * (start_s - begin_s), 3)}))
    return found
