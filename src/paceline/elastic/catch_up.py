"""Catch-up of a joining node: a copy of the large state, sent while training continues, and every update since.

    leader   copies its weights and optimizer state, a part between two steps, and sends them from a thread of its own;
             from the first part on also each step's sums, as everybody applies them
    joiner   takes part after part, and applies the same sums in the same order: replicas are bit-equal once each
             part has replaced what sums have made of the joiner's own

Once all is sent but the last step, the joiner can be taken in, and what is left to be sent then is small.

*Cost*: host memory for one more copy, and for the steps that are not sent yet; the bytes of both on the leader's wire,
beside those of training.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.elastic import state_transfer
from paceline.engine.compute.batch import mapped
from paceline.errors import LinkError
from paceline.messages import Gradient, StepOutcome, Update, UpdateRule
from paceline.step.run_state import RunState
from paceline.transport import Channel, JoinDesk

MAX_BEHIND = 1  # messages that are not sent yet, of who may be taken in
MAX_COPIES = 3  # as much as these may wait to be sent, or be sent after the copy itself


class CatchUp:
    """Of one joiner, in the process that leads. ``lost``: why it cannot be followed, else empty; ``broken``: no
    more."""

    def __init__(self, run: RunState, desk: JoinDesk, name: str):
        self._desk, self._name, self.lost = desk, name, ""
        self.line: Channel | None = None
        self.broken = False
        self._optimizer = run.job.optimizer
        self._copy_bytes, self._parted_bytes = state_transfer.copy_bytes(run), 0
        self.num_bytes = self._sent_bytes = 0
        self._messages: queue.Queue[state_transfer.Message | None] = queue.Queue()
        self._num_put = self._num_sent = 0
        self._left = state_transfer.parts(run)
        # of several processes, the optimizer's state is gathered, and what is gathered is a copy
        self._gathered = run.world.local_size > 1
        look = state_transfer.weights_of if self._gathered else state_transfer.state_part
        self._like = [_tensors(look(run, rows)) for rows in self._left]
        self._places: list[list[Tensor]] = []
        self._maker = threading.Thread(target=self._make_places, name="paceline following", daemon=True)
        self._maker.start()
        self._thread: threading.Thread | None = None

    def _make_places(self) -> None:
        """Memory that nobody has touched yet comes slowly: training need not stand still for it."""
        like = self._like
        try:
            for part in like:
                self._places.append([torch.empty_like(tensor, device="cpu").zero_() for tensor in part])
        except (MemoryError, RuntimeError):  # torch's own is the latter
            num_bytes = sum(tensor.nbytes for part in like for tensor in part)
            self._places, self.lost = [], f"the node that leads has no memory for a copy of {num_bytes} bytes"

    @property
    def _over(self) -> bool:
        return bool(self.lost) or self.broken

    @property
    def placed(self) -> bool:
        """There is a place for the next part, and nothing in it yet."""
        return bool(self._left) and bool(self._places) and not self._over

    @property
    def next(self) -> list[state_transfer.Rows]:
        return self._left[0]

    def part(self, state: dict[str, Any]) -> None:
        """What `state_transfer.part` gives of the rows that come next, between two steps."""
        first, mine = not self._num_put, self._places.pop(0)
        self._left.pop(0)
        alike = [(t.shape, t.dtype) for t in _tensors(state)][: len(mine)] == [(p.shape, p.dtype) for p in mine]
        places = iter(mine if alike else ())

        def kept(tensor: Tensor) -> Tensor:
            if (place := next(places, None)) is not None:
                return place.copy_(tensor)
            return tensor if alike and self._gathered else tensor.detach().to("cpu", copy=True)

        self._put(state_transfer.Message(mapped(state, kept)))
        self._parted_bytes = self.num_bytes
        if first:
            self._like = []
            self._thread = threading.Thread(target=self._send, name="paceline following", daemon=True)
            self._thread.start()

    def _put(self, message: state_transfer.Message) -> None:
        self._num_put += 1
        self.num_bytes += message.num_bytes
        self._messages.put(message)

    def _send(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                # what one line has lost, no other goes on from
                self.line = self.line or self._desk.line(self._name)
                self.line.send(message.parts(), message.num_bytes)
                self._sent_bytes += message.num_bytes
                self._num_sent += 1
        except LinkError:
            self.broken = True
            self.stop()
            if self.line:
                self.line.close()  # for the joiner to hear of it

    @property
    def caught_up(self) -> bool:
        return 0 < self._num_sent >= self._num_put - MAX_BEHIND and not self._left and not self._over

    @property
    def diverging(self) -> bool:
        """The steps are sent no faster than they are made, and everything at once will be less."""
        waiting, after = self.num_bytes - self._sent_bytes, 0 if self._left else self.num_bytes - self._parted_bytes
        return max(waiting, after) > MAX_COPIES * self._copy_bytes and not self.caught_up

    def before(self, outcome: StepOutcome, rule: UpdateRule) -> Callable[[], None]:
        """The step's sums, which an update may change; what this gives is called once they were applied."""
        if not self._num_put or self._over:
            return lambda: None  # they will be in each part
        groups = state_transfer.options(self._optimizer)
        gradients = [_copied(gradient) for gradient in outcome.gradients]
        how = {"scale": rule.scale, "clip": rule.clip, "step": rule.step}
        update = {"pieces": gradients, "used": outcome.vote.used, "rule": how, "groups": groups}
        message = state_transfer.Message(update)
        return lambda: self._put(message)

    def stop(self) -> None:
        """What waits to be sent is not."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._messages.get_nowait()
        self._messages.put(None)

    def end(self, all_of_it: bool) -> bool:
        """Nothing is being sent any more. Whether everything has been."""
        if self.line:
            self.line.set_deadline_mode()
        if all_of_it:
            self._messages.put(None)
        else:
            self.stop()
        if self._thread:
            self._thread.join()
        return all_of_it and not self._over


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return tensor

    mapped(tree, note)
    return found


def _copied(gradient: Gradient) -> dict[str, Any]:
    if gradient.output_grad is None or gradient.layer_input is None:
        assert gradient.flat is not None
        return {"flat": gradient.flat.detach().clone()}
    # as they lie in memory, lest a product of the same numbers be other bits
    return {
        "joined": not gradient.output_grad.is_contiguous(),
        "left": gradient.output_grad.detach().clone(),
        "right": gradient.layer_input.detach().clone(),
    }


def follow(run: RunState, said: dict[str, Any]) -> None:
    """An update of the others, here."""
    engine, gradients = run.engine, []
    for bucket, parts in zip(engine.buckets, said["pieces"], strict=True):
        # in memory of their own, where the weights are
        each = mapped(parts, lambda tensor: tensor.to(engine.weights[0].device, copy=True))
        if "flat" in each:
            gradients.append(Gradient(bucket, flat=each["flat"]))
        elif each["joined"]:
            both, width = torch.cat([each["left"], each["right"]], dim=1), each["left"].shape[1]
            gradients.append(Gradient(bucket, output_grad=both[:, :width], layer_input=both[:, width:]))
        else:
            gradients.append(Gradient(bucket, output_grad=each["left"], layer_input=each["right"]))
    state_transfer.set_options(run.job.optimizer, said["groups"])
    engine.apply(Update(gradients, said["used"], UpdateRule(check=True, **said["rule"])))
