"""Catch-up of a joining node: a copy of the large state, sent while training continues, and every update since.

    leader   copies its weights and optimizer state, a part between two steps, and sends them from a thread of its own;
             from the first part on also the summed gradients of each step, as all members apply them
    joiner   takes part after part, and applies the same sums in the same order. The sums change parts that it has not
             received yet to wrong values; once each part has replaced these, replicas are bit-equal

Once all is sent but the last step, the joining node can be admitted, and only a little state remains to be sent.

*Cost*: host memory for one more copy, and for the steps that are not sent yet; the bytes of both on the leader's
network, beside those of training.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from paceline.elastic import state_transfer
from paceline.engine.compute import state_store
from paceline.engine.compute.batch import mapped
from paceline.errors import LinkError
from paceline.messages import Gradient, StepOutcome, Update, UpdateRule
from paceline.step.run_state import RunState
from paceline.transport import Channel, JoinDesk

MAX_BEHIND = 1  # messages not sent yet, for a joining node that may be admitted
MAX_COPIES = 3  # limit, in sizes of the copy, on what waits to be sent, and on what is sent after the copy itself


class CatchUp:
    """Of one joining node, in the leader. ``failed``: why this node cannot send its state, else empty; ``broken``: the
    connection has failed."""

    def __init__(self, run: RunState, desk: JoinDesk, name: str):
        self._desk, self._name, self.failed = desk, name, ""
        self.channel: Channel | None = None
        self.broken = False
        self._optimizer = run.job.optimizer
        self._copy_bytes, self._state_bytes = state_transfer.copy_bytes(run), 0
        self.num_bytes = self._sent_bytes = 0
        self._messages: queue.Queue[state_transfer.Message | None] = queue.Queue()
        self._num_put = self._num_sent = 0
        self._pending = state_transfer.parts(run)
        # with several processes, the optimizer's state is gathered, which makes a copy
        self._gathered = run.world.local_size > 1
        read = state_transfer.weights_of if self._gathered else state_transfer.state_part
        self._templates = [_tensors(read(run, rows)) for rows in self._pending]
        self._buffers: list[list[Tensor]] = []
        self._allocator = threading.Thread(target=self._allocate, name="paceline catch up", daemon=True)
        self._allocator.start()
        self._thread: threading.Thread | None = None

    def _allocate(self) -> None:
        """The first access to new memory is slow: a thread makes it, so training does not stop for it."""
        templates = self._templates
        try:
            for part in templates:
                self._buffers.append([torch.empty_like(tensor, device="cpu").zero_() for tensor in part])
        except (MemoryError, RuntimeError):  # torch raises the latter
            num_bytes = sum(tensor.nbytes for part in templates for tensor in part)
            self._buffers, self.failed = [], f"the leader has no memory for a copy of {num_bytes} bytes"

    @property
    def _ended(self) -> bool:
        return bool(self.failed) or self.broken

    @property
    def has_buffer(self) -> bool:
        """There is a buffer for the next part, which is still empty."""
        return bool(self._pending) and bool(self._buffers) and not self._ended

    @property
    def next(self) -> list[state_transfer.Rows]:
        return self._pending[0]

    def part(self, state: dict[str, Any]) -> None:
        """Takes what `state_transfer.state_part` gives of the next rows, between two steps."""
        first, buffers = not self._num_put, self._buffers.pop(0)
        self._pending.pop(0)
        alike = [(t.shape, t.dtype) for t in _tensors(state)][: len(buffers)] == [(b.shape, b.dtype) for b in buffers]
        free = iter(buffers if alike else ())

        def copied(tensor: Tensor) -> Tensor:
            if (buffer := next(free, None)) is not None:
                return buffer.copy_(tensor)
            return tensor if alike and self._gathered else tensor.detach().to("cpu", copy=True)

        self._put(state_transfer.Message(mapped(state, copied)))
        self._state_bytes = self.num_bytes
        if first:
            self._templates = []
            self._thread = threading.Thread(target=self._send, name="paceline catch up", daemon=True)
            self._thread.start()

    def _put(self, message: state_transfer.Message) -> None:
        self._num_put += 1
        self.num_bytes += message.num_bytes
        self._messages.put(message)

    def _send(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                # a lost message cannot be sent again on another connection
                self.channel = self.channel or self._desk.channel(self._name)
                self.channel.send(message.parts(), message.num_bytes)
                self._sent_bytes += message.num_bytes
                self._num_sent += 1
        except LinkError:
            self.broken = True
            self.stop()
            if self.channel:
                self.channel.close()  # the joining node notices that

    @property
    def caught_up(self) -> bool:
        return 0 < self._num_sent >= self._num_put - MAX_BEHIND and not self._pending and not self._ended

    @property
    def diverging(self) -> bool:
        """The steps are sent no faster than they are computed: sending the whole state at once takes fewer bytes."""
        waiting, after = self.num_bytes - self._sent_bytes, 0 if self._pending else self.num_bytes - self._state_bytes
        return max(waiting, after) > MAX_COPIES * self._copy_bytes and not self.caught_up

    def before_update(self, outcome: StepOutcome, rule: UpdateRule) -> Callable[[], None]:
        """Copies the step's sums, which an update may change. The result is called once they have been applied."""
        if not self._num_put or self._ended:
            return lambda: None  # each part will include them
        groups = state_transfer.options(self._optimizer)
        gradients = [_copied(gradient) for gradient in outcome.gradients]
        how = {"scale": rule.scale, "clip": rule.clip, "step": rule.step}
        update = {"pieces": gradients, "used": outcome.vote.used, "rule": how, "groups": groups}
        message = state_transfer.Message(update)
        return lambda: self._put(message)

    def stop(self) -> None:
        """Discards the messages that wait to be sent."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._messages.get_nowait()
        self._messages.put(None)

    def end(self, send_all: bool) -> bool:
        """Waits until nothing is being sent any more. Whether everything was sent."""
        if self.channel:
            self.channel.set_deadline_mode()
        if send_all:
            self._messages.put(None)
        else:
            self.stop()
        if self._thread:
            self._thread.join()
        return send_all and not self._ended


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return tensor

    mapped(tree, collect)
    return found


def _copied(gradient: Gradient) -> dict[str, Any]:
    if gradient.output_grad is None or gradient.layer_input is None:
        assert gradient.flat is not None
        return {"flat": gradient.flat.detach().clone()}
    # in the same memory layout: with another one, the product of the same numbers may differ in its last bits
    return {
        "joined": not gradient.output_grad.is_contiguous(),
        "left": gradient.output_grad.detach().clone(),
        "right": gradient.layer_input.detach().clone(),
    }


def apply_update(run: RunState, message: dict[str, Any]) -> None:
    """Applies an update that the members have made."""
    engine, gradients = run.engine, []
    devices = state_store.bucket_devices(engine)
    for bucket, parts in zip(engine.buckets, message["pieces"], strict=True):
        # in separate memory, on the device of the weights
        each = mapped(parts, methodcaller("to", devices[bucket.index], copy=True))
        if "flat" in each:
            gradients.append(Gradient(bucket, flat=each["flat"]))
        elif each["joined"]:
            both, width = torch.cat([each["left"], each["right"]], dim=1), each["left"].shape[1]
            gradients.append(Gradient(bucket, output_grad=both[:, :width], layer_input=both[:, width:]))
        else:
            gradients.append(Gradient(bucket, output_grad=each["left"], layer_input=each["right"]))
    state_transfer.set_options(run.job.optimizer, message["groups"])
    engine.apply(Update(gradients, message["used"], UpdateRule(check=True, **message["rule"])))
