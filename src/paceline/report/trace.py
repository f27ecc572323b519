"""A few steps drawn in full: what each node computed, what was on the wire, and what was waited for.

``PACELINE_TRACE=5`` draws steps 5 to 7, ``PACELINE_TRACE=5-9`` those, of all nodes, into ``trace.json`` in the run's
folder (or the current one). What rank 0 was told counts for all. Other steps are left as they are; a run that ends
before the last of them draws nothing.

    compute    the step; in it forward, layer by layer, backward, piece by piece as they are ready, and the update
    wire       each lane's operations: what, how many bytes, from when the wire was free for it to its arrival
    waiting    for input; for the other nodes after backward (exposed communication); for what holds replicas together

A timeline in the format of Chrome's tracing, which ui.perfetto.dev and chrome://tracing open.

*Source*: Trace Event Format: complete events ("X") on tracks (a process and a thread), and metadata ("M") naming them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from paceline.contract import Agreement, Ballot, Piece
from paceline.environment import World
from paceline.link.net.metered import Ledger, Sending
from paceline.step import Gradient, Loop

VARIABLE, NAME = "PACELINE_TRACE", "trace.json"
NUM_STEPS = 3
GLANCE_S = 0.0005  # how exactly an arrival is known
PATIENCE_S = 10.0  # for what is still on the wire after the last step
COMPUTE, WAITING = "compute", "waiting"

now = time.perf_counter


class Tracer:
    """Takes the loop's place for `step`. Steps ``first`` to ``last`` are drawn."""

    def __init__(
        self, loop: Loop, model: nn.Module, world: World, folder: Path | None, ledger: Ledger, first: int, last: int
    ):
        self.loop, self.model, self.world, self.folder, self.ledger = loop, model, world, folder, ledger
        self.first, self.last = first, last
        self._generation = loop.exchange.link.generation
        self._tracks: dict[str, list[Row]] = {COMPUTE: [], WAITING: []}
        self._sent: list[_OnTheWire] = []
        self._zero: float | None = None
        self._over = threading.Event()
        self._eyes = threading.Thread(target=self._look, name="paceline trace", daemon=True)

    @classmethod
    def asked(cls, loop: Loop, model: nn.Module, world: World, folder: Path | None, ledger: Ledger) -> Tracer | None:
        """None where rank 0 was not asked to draw, and for who comes late. Every process must call it.

        Raises ValueError, everywhere.
        """
        if world.late:
            return None
        said = loop.exchange.gather(os.environ.get(VARIABLE, "").encode())[0].decode()
        return cls(loop, model, world, folder, ledger, *parse(said)) if said else None

    def step(self, batch: Any, gradient: Gradient | None = None, /, **facts: Any) -> Agreement:
        number = self.loop.num_steps
        if not self.first <= number <= self.last or self._changed():
            return self.loop.step(batch, gradient, **facts)
        if self._zero is None:
            self._begin()
        with self._watching():
            begin_s = now()
            traced = self._gradient(gradient or self.loop.engine.gradient)
            agreement = self.loop.step(_Timed(batch, {"share": self._note(WAITING, "input")}), traced, **facts)
            self._add(COMPUTE, f"step {number}", begin_s, now(), verdict=agreement.verdict.value)
        if number == self.last and not self._changed():
            self._write()
        return agreement

    def _changed(self) -> bool:
        """Whether others are here than began, which all know alike between two steps: who came does not draw."""
        if self.loop.exchange.link.generation == self._generation:
            return False
        self.last = -1
        self._over.set()
        text = "nodes were lost or came since training began, so no step is drawn"
        self.loop.record.write("hint", text=text)
        if self.loop.record.folder and not self.world.local_rank:
            sys.stderr.write(f"paceline: {text}\n")
        return True

    def _begin(self) -> None:
        self.loop.exchange.total([0.0])  # ends everywhere at about the same moment: there all clocks begin
        self._zero = now()
        self._eyes.start()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Within, the loop's parts tell when they are used."""
        loop: Any = self.loop
        kept = loop.engine, loop.exchange, loop.drift
        loop.engine = _Timed(loop.engine, {"update": self._note(COMPUTE, "update")})
        loop.exchange = _Timed(
            loop.exchange,
            {
                "agree": self._note(WAITING, "exchange, not hidden"),
                "reconcile": self._note(WAITING, "reconcile"),
            },
        )
        loop.drift = loop.drift and _Timed(loop.drift, {"after": self._note(WAITING, "hold replicas together")})
        self.ledger.watch = lambda sending: self._sent.append(_OnTheWire(sending))
        try:
            yield
        except BaseException:
            self.last = -1
            self._over.set()
            raise
        finally:
            loop.engine, loop.exchange, loop.drift = kept
            self.ledger.watch = None

    def _note(self, track: str, name: str) -> Callable[[float, float], None]:
        return lambda begin_s, end_s: self._add(track, name, begin_s, end_s)

    def _add(self, track: str, name: str, begin_s: float, end_s: float, **known: Any) -> None:
        self._tracks[track].append((name, begin_s, end_s, known))

    def _look(self) -> None:
        """Sees what arrives, until all has."""
        end_s = float("inf")
        while not self._over.wait(GLANCE_S) or (now() < end_s and not all(sent.arrived_s for sent in self._sent)):
            for sent in self._sent:
                sent.look()
            if self._over.is_set():
                end_s = min(end_s, now() + PATIENCE_S)
                time.sleep(GLANCE_S)

    def _gradient(self, compute: Gradient) -> Gradient:
        def gradient(share: Any, scale: float, forms: Sequence[str], offer: Callable[[Piece], None]) -> Ballot:
            ready: list[tuple[float, Piece]] = []

            def offered(piece: Piece) -> None:
                ready.append((now(), piece))
                offer(piece)

            compiled = getattr(getattr(self.loop.engine, "numerics", None), "compile", False)
            passes = _Passes(self.model, watch=not compiled)
            begin_s = now()
            try:
                ballot = compute(share, scale, forms, offered)
            finally:
                passes.close()
            self._draw(begin_s, now(), passes, ready, forms)
            return ballot

        return gradient

    def _draw(
        self, begin_s: float, end_s: float, passes: _Passes, ready: Sequence[tuple[float, Piece]], forms: Sequence[str]
    ) -> None:
        self._add(COMPUTE, "gradient", begin_s, end_s)
        for i, (first_s, last_s) in enumerate(passes.whole):
            next_s = passes.whole[i + 1][0] if i + 1 < len(passes.whole) else end_s
            self._add(COMPUTE, "forward", first_s, last_s)
            self._add(COMPUTE, "backward", last_s, next_s)
        for name, first_s, last_s in passes.layers:
            self._add(COMPUTE, name, first_s, last_s)
        if self.loop.exchange.link.size == 1:
            return  # nothing leaves early, so nobody looks when a piece is ready
        last_s = passes.whole[-1][1] if passes.whole else begin_s
        for ready_s, piece in sorted(ready, key=lambda pair: pair[0]):
            names = piece.spec.names
            what = f"{', '.join(names[:2])}{' ...' if len(names) > 2 else ''}"
            until_s = max(last_s, ready_s)
            self._add(COMPUTE, what, last_s, until_s, form=forms[piece.spec.index], bucket=piece.spec.index)
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
        part = f", process {self.world.local_rank}" if self.world.local_size > 1 else ""
        everyone = self.loop.exchange.gather(json.dumps([self.world.node, f"{host}{part}", shifted]).encode())
        if self.world.node or self.world.local_rank:
            return
        path = (self.folder or Path()) / NAME
        whole = document((json.loads(words) for words in everyone), first_step=self.first, last_step=self.last)
        aside = path.with_name(NAME + ".part")
        try:
            aside.write_text(json.dumps(whole))
            aside.replace(path)
        except OSError as error:
            sys.stderr.write(f"paceline: steps {self.first} to {self.last} could not be drawn in {path} ({error})\n")
            return
        self.loop.record.write("trace", first_step=self.first, last_step=self.last, path=str(path))
        print(
            f"paceline: steps {self.first} to {self.last} are drawn in {path}; open it in ui.perfetto.dev or "
            f"chrome://tracing",
            file=sys.stderr,
        )


def parse(said: str) -> tuple[int, int]:
    """(first, last) of "5" or "5-9"."""
    first, dash, last = said.partition("-")
    if first.isdigit() and (last.isdigit() if dash else True) and (not dash or int(last) >= int(first)):
        return int(first), int(last) if dash else int(first) + NUM_STEPS - 1
    raise ValueError(
        f"{VARIABLE}={said!r} on rank 0 is no step; give the first step to draw, as 5, or the first and the last, "
        f"as 5-9, or unset it"
    )


class _Timed:
    """``thing`` as it is, but for the methods whose begin and end are told."""

    def __init__(self, thing: Any, told: Mapping[str, Callable[[float, float], None]]):
        vars(self).update(_thing=thing, _told=told)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._thing, name, value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        tell = self._told.get(name)
        if tell is None:
            return found

        def timed(*args: Any) -> Any:
            begin_s = now()
            result = found(*args)
            tell(begin_s, now())
            return result

        return timed


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

    def __init__(self, sending: Sending):
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
                events.append(
                    {
                        **{"ph": "X", "name": what, "cat": track, "pid": node, "tid": number},
                        **{"ts": begin / 1000, "dur": (end - begin) / 1000, "args": dict(known)},
                    }
                )
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
