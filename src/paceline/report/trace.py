"""Timeline trace of a few steps: what each node computed, communicated and waited for.

``PACELINE_TRACE=5`` draws steps 5 to 7, ``PACELINE_TRACE=5-9`` those, of all nodes, into ``trace.json`` in the run's
folder (or the current one). The value on rank 0 counts for all. Other steps are left as they are; a run that ends
before the last of them draws nothing.

    compute    the step; in it forward, layer by layer, backward, bucket by bucket as they are ready, and the update
    wire       each lane's operations: what, how many bytes, from when the wire was free for it to its arrival
    waiting    for input; for the other nodes after backward (exposed communication); for what holds replicas together

A timeline in the format of Chrome's tracing, which ui.perfetto.dev and chrome://tracing open.

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
POLL_S = 0.0005  # how exactly an arrival is known
TIMEOUT_S = 10.0  # for what is still on the wire after the last step
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
    """A link that tells of every operation."""

    watch: Callable[[Any], None] | None


class Run(Protocol):
    """Of a training (`step.run_state.RunState`)."""

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
    """Steps ``first`` to ``last`` are drawn."""

    def __init__(self, run: Run, metered: Metered, first: int, last: int):
        self.run, self.metered = run, metered
        self.first, self.last = first, last
        self._generation = run.control.generation
        self._tracks: dict[str, list[Row]] = {COMPUTE: [], WAITING: []}
        self._sent: list[_OnTheWire] = []
        self._zero: float | None = None
        self._over = threading.Event()
        self._eyes = threading.Thread(target=self._look, name="paceline trace", daemon=True)
        self._draws = False  # this step
        self._begin_s = self._gradient_s = 0.0
        self._passes: _Passes | None = None
        self._ready: list[tuple[float, Gradient]] = []
        self._forms: Sequence[str] = ()

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        if self._draws:  # the step before did not end
            self._stop()
            self.last = -1
            self._over.set()
        number = self.run.num_steps
        if not self.first <= number <= self.last or self._changed():
            return batch
        if self._zero is None:
            self.run.control.all_reduce([0.0])  # ends everywhere at about the same moment: there all clocks begin
            self._zero = now()
            self._eyes.start()
        self._draws, self._begin_s = True, now()
        self.metered.watch = lambda sending: self._sent.append(_OnTheWire(sending))
        self.run.activity.watch = self._spent
        return batch

    def offering(self, offer: Callable[[Gradient], None]) -> Callable[[Gradient], None]:
        if not self._draws:
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
        if not self._draws:
            return
        self._stop()
        self._add(COMPUTE, f"step {summary.step}", self._begin_s, now(), verdict=summary.outcome.decision.value)
        if summary.step == self.last and not self._changed():
            self._write()

    def _stop(self) -> None:
        self._draws, self.metered.watch, self.run.activity.watch = False, None, None
        if self._passes:
            self._passes.close()
            self._passes = None

    def _changed(self) -> bool:
        """Whether others are here than began, which all know alike between two steps: who came does not draw."""
        if self.run.control.generation == self._generation:
            return False
        self.last = -1
        self._over.set()
        text = "nodes were lost or came since training began, so no step is drawn"
        self.run.record.write("hint", text=text)
        if self.run.record.folder and not self.run.world.local_rank:
            log.warning(text)
        return True

    def _spent(self, doing: str, begin_s: float, end_s: float) -> None:
        if doing in PARTS:
            self._add(*PARTS[doing], begin_s, end_s)

    def _add(self, track: str, name: str, begin_s: float, end_s: float, **known: Any) -> None:
        self._tracks[track].append((name, begin_s, end_s, known))

    def _look(self) -> None:
        """Sees what arrives, until all has."""
        end_s = float("inf")
        while not self._over.wait(POLL_S) or (now() < end_s and not all(sent.arrived_s for sent in self._sent)):
            for sent in self._sent:
                sent.look()
            if self._over.is_set():
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
            return  # nothing leaves early, so it does not matter when a bucket is ready
        last_s = passes.whole[-1][1] if passes.whole else self._gradient_s
        for ready_s, gradient in sorted(self._ready, key=lambda pair: pair[0]):
            names, index = gradient.bucket.names, gradient.bucket.index
            what = f"{', '.join(names[:2])}{' ...' if len(names) > 2 else ''}"
            until_s = max(last_s, ready_s)
            self._add(COMPUTE, what, last_s, until_s, form=self._forms[index], bucket=index)
            last_s = until_s

    def _write(self) -> None:
        """Everyone's events in one file, by one process."""
        assert self._zero is not None
        self._over.set()
        self._eyes.join()
        zero, lanes = self._zero, dict[str, list[Row]]()
        for sent in self._sent:
            lanes.setdefault(f"wire, {sent.sending.lane}", []).append(sent.row())
        tracks = {COMPUTE: self._tracks[COMPUTE], **{lane: queued(rows) for lane, rows in lanes.items()}}
        tracks[WAITING] = self._tracks[WAITING]
        shifted = {
            name: [(what, begin_s - zero, end_s - zero, known) for what, begin_s, end_s, known in rows]
            for name, rows in tracks.items()
        }
        self._tracks, self._sent = {COMPUTE: [], WAITING: []}, []
        host = os.environ.get("PACELINE_HOST", socket.gethostname())
        part = f", process {self.run.world.local_rank}" if self.run.world.local_size > 1 else ""
        everyone = self.run.control.all_gather(json.dumps([self.run.world.node, f"{host}{part}", shifted]).encode())
        if self.run.world.node or self.run.world.local_rank:
            return
        path = (self.run.folder or Path()) / NAME
        whole = document((json.loads(words) for words in everyone), first_step=self.first, last_step=self.last)
        steps = f"steps {self.first} to {self.last}"
        try:
            write_whole(path, json.dumps(whole))
        except OSError as error:
            log.warning(f"{steps} could not be drawn in {path} ({error})")
            return
        self.run.record.write("trace", first_step=self.first, last_step=self.last, path=str(path))
        log.info(f"{steps} are drawn in {path}; open it in ui.perfetto.dev or chrome://tracing")


def asked(control: Control) -> tuple[int, int] | None:
    """The first and last step that rank 0 was asked to draw. Every process must call it. Raises ValueError alike."""
    text = control.all_gather(os.environ.get(VARIABLE, "").encode())[0].decode()
    return parse(text) if text else None


def parse(text: str) -> tuple[int, int]:
    """(first, last) of "5" or "5-9"."""
    first, dash, last = text.partition("-")
    if first.isdigit() and (last.isdigit() if dash else True) and (not dash or int(last) >= int(first)):
        return int(first), int(last) if dash else int(first) + NUM_STEPS - 1
    raise ValueError(
        f"{VARIABLE}={text!r} on rank 0 is no step; give the first step to draw, as 5, or the first and the last, "
        f"as 5-9, or unset it"
    )


class _Passes:
    """When the model's forward passes began and ended, and when each of its layers did in them."""

    def __init__(self, model: nn.Module, watch: bool):
        self.whole: list[tuple[float, float]] = []
        self.layers: list[tuple[str, float, float]] = []
        self._begun: list[float] = []
        self._thread: int | None = None
        self._hooks: list[Any] = []
        if not watch:
            return  # hooks would be compiled, too
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
        if threading.get_ident() == self._thread:  # layers computed again in backward belong to no forward pass
            self._begun.append(now())

    def _leave_layer(self, label: str) -> None:
        if threading.get_ident() == self._thread and len(self._begun) > 1:
            self.layers.append((label, self._begun.pop(), now()))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _OnTheWire:
    """An operation that has begun, and when it was seen to have arrived."""

    def __init__(self, sending: Transfer):
        self.sending, self.arrived_s = sending, 0.0

    def look(self) -> None:
        if not self.arrived_s and self.sending.handle.done():
            self.arrived_s = now()

    def row(self) -> Row:
        sending = self.sending
        end_s = self.arrived_s or now()
        return sending.what, sending.begin_s, end_s, {"operation": sending.operation, "bytes": sending.num_bytes}


Row = Sequence[Any]  # name, begin and end in seconds, and what else is to be known of it, a mapping


def document(processes: Iterable[tuple[int, str, Mapping[str, Sequence[Row]]]], **about: Any) -> dict[str, Any]:
    """``processes``: for each its node, what it is called, and its tracks by name, in the order to be shown in.

    *Laws*: a track's events nest or follow one another; times are whole nanoseconds, so none overlap by rounding.
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
            for what, begin_s, end_s, known in rows:
                begin, end = round(begin_s * 1e9), round(end_s * 1e9)
                event = {"ph": "X", "name": what, "cat": track, "pid": node, "tid": number}
                events.append({**event, "ts": begin / 1000, "dur": (end - begin) / 1000, "args": dict(known)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(kind: str, node: int, number: int, **what: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": node, "tid": number, "args": what}


def queued(rows: Iterable[Row]) -> list[Row]:
    """What went over a wire that takes one thing after another: each begins when the one before has arrived."""
    found: list[Row] = []
    free_s = float("-inf")
    for what, begin_s, end_s, known in sorted(rows, key=lambda row: (row[1], row[2])):
        start_s = max(begin_s, free_s)
        free_s = max(start_s, end_s)
        found.append((what, start_s, free_s, {**known, "waited_ms": round(1000 * (start_s - begin_s), 3)}))
    return found
