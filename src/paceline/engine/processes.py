"""k processes of the same script on one node: weights once in shared memory, one link for all.

    each process    forward, backward on its rows; its pieces go to its own place in shared memory
    local rank 0    adds them up (or lines the factors up) as they become complete, offers the sum to
                    the exchange, and puts what was agreed where all can read it
    each process    multiplies, clips and updates its own rows of every weight

so optimizer state exists once per node, and the local sum costs memory bandwidth, not sockets.

*Laws*: as sequential on the node's whole share; killing any process ends the others and leaves nothing.
*Cost*: two messages per process and step on a local socket, and one more with clipping.
"""

from __future__ import annotations

import os
import selectors
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import DENSE, FACTORS, Agreement, Ballot, Piece, Rule, Spec, Verdict
from paceline.engine import sequential
from paceline.engine.crew import PATIENCE_S, Crew, CrewError, Layout
from paceline.engine.update import Factored, finish

# each element's update depends on that element alone: any slice of a weight may be updated by itself
ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "ASGD",
    "Rprop",
)


class Engine(sequential.Engine):
    """One of k. Reads LOCAL_RANK and LOCAL_WORLD_SIZE, as launchers set them."""

    def __init__(self, num_processes: int = 2):
        super().__init__()
        local_rank, local_size = (
            int(os.environ.get("LOCAL_RANK", "0")),
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        if num_processes != local_size:
            raise ValueError(
                f"engine 'processes:{num_processes}' needs {num_processes} processes on this node, LOCAL_WORLD_SIZE "
                f"says {local_size}; start the script with: paceline run --engine processes:{num_processes} SCRIPT"
            )
        self.seat = (local_rank, local_size)

    def open(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any],
        metric: Callable[..., Any] | None = None,
    ) -> None:
        rank, size = self.seat
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= size:
            cores = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
            os.sched_setaffinity(0, cores)
            self.num_threads = len(cores)
        super().open(model, optimizer, loss, metric)
        group = os.environ.get("GROUP_RANK", str(int(os.environ.get("RANK", rank)) // size))
        self.crew = Crew(rank, size, f"{os.environ.get('MASTER_PORT', '0')}-{group}")
        self._lay_out()
        self.mine = self._divide()
        self.agreed: list[Any] = []
        self.alone = False

    def _lay_out(self) -> None:
        """Weights and buffers move into shared memory; each process gets a place for its gradient."""
        layout = Layout()
        parameters = self.backward.parameters
        for name in self.names:
            layout.add(f"weight {name}", tuple(parameters[name].shape), parameters[name].dtype)
        for i, buffer in enumerate(self.buffers):
            layout.add(f"buffer {i}", tuple(buffer.shape), buffer.dtype)
        for spec in self.specs:
            dtype = parameters[spec.names[0]].dtype
            for local_rank in range(self.seat[1]):
                layout.add(f"grad {spec.index} {local_rank}", (spec.numel,), dtype)
            if spec.linear:
                layout.add(f"rows {spec.index}", (spec.numel,), dtype)
        sizes = {tuple(row) for row in self.crew.gather([float(layout.num_bytes), float(len(self.specs))], "joining")}
        if len(sizes) > 1:
            raise ValueError(f"the processes of this node built different models (bytes, specs: {sorted(sizes)})")
        at = layout.on(self.crew.share(layout.num_bytes))
        self.place = at
        for name in self.names:
            shared = at(f"weight {name}")
            if self.seat[0] == 0:
                shared.copy_(parameters[name].data)
            parameters[name].data = shared
        self.weights = [parameters[name].data for name in self.names]
        self.crew.barrier("joining")

    def _divide(self) -> list[tuple[str, slice, torch.nn.Parameter]]:
        """The slices that this process updates. They take the parameters' place in the optimizer."""
        rank, size = self.seat
        elementwise = type(self.optimizer).__name__ in ELEMENTWISE and type(self.optimizer).__module__.startswith(
            "torch.optim"
        )
        name_of = {id(parameter): name for name, parameter in self.backward.parameters.items()}
        load, mine = [0] * size, []
        for group in self.optimizer.param_groups:
            kept = []
            for parameter in group["params"]:
                if id(parameter) not in name_of:
                    kept.append(parameter)
                    continue
                rows = len(parameter) if parameter.dim() else 0
                if elementwise and rows >= size:
                    own = slice(rank * rows // size, (rank + 1) * rows // size)
                else:
                    owner = load.index(min(load))
                    load[owner] += parameter.numel()
                    own = slice(None) if owner == rank else slice(0, 0)
                if own == slice(0, 0):
                    self.optimizer.state.pop(parameter, None)
                    continue
                part = torch.nn.Parameter(parameter.data[own] if own != slice(None) else parameter.data)
                if parameter in self.optimizer.state:
                    self.optimizer.state[part] = {
                        key: value[own].clone()
                        if isinstance(value, Tensor) and value.shape == parameter.shape and own != slice(None)
                        else value
                        for key, value in self.optimizer.state.pop(parameter).items()
                    }
                kept.append(part)
                mine.append((name_of[id(parameter)], own, part))
            group["params"] = kept
        return mine

    # -- forward and backward

    def relay(self, exchange: contract.Exchange) -> contract.Exchange:
        self.alone = exchange.link.size == 1
        return Leader(self, exchange) if self.seat[0] == 0 else Follower(self, exchange)

    def put(self, piece: Piece) -> None:
        """This process's piece into its place: flat, or the rows of left and then those of right."""
        place = self.place(f"grad {piece.spec.index} {self.seat[0]}")
        if piece.flat is not None:
            place.copy_(piece.flat)
        elif piece.left is not None and piece.right is not None:
            left, right = factors(piece.spec, place, len(piece.left))
            left.copy_(piece.left)
            right.copy_(piece.right)

    def get(self, spec: Spec, local_rank: int, num_rows: int | None) -> Piece:
        place = self.place(f"grad {spec.index} {local_rank}")
        if num_rows is None:
            return Piece(spec, flat=place)
        left, right = factors(spec, place, num_rows)
        return Piece(spec, left=left, right=right)

    # -- update

    def update(self, agreement: Agreement, rule: Rule) -> None:
        used = dict(zip(self.names, agreement.ballot.used, strict=True))
        pieces = {name: (piece, i) for piece in agreement.pieces for i, name in enumerate(piece.spec.names)}
        dense: list[Tensor] = []
        factored: list[Factored] = []
        for name, own, part in self.mine:
            piece, i = pieces[name]
            part.grad = None
            if not used[name]:
                continue
            if piece.left is not None and piece.right is not None:
                self._by_factors(part, piece.left[:, own], piece.right, dense, factored)
            else:
                part.grad = self._sum(piece, i, own)
                dense.append(part)

        def whole(squares: float) -> float:
            return sum(row[0] for row in self.crew.gather([squares], "clipping"))

        finish(dense, factored, self.optimizer, rule, whole)
        self.crew.barrier("updating")

    def _sum(self, piece: Piece, i: int, own: slice) -> Tensor:
        """This process's slice of the piece's i-th parameter: agreed, or still to be added up over the crew."""
        start = sum(piece.spec.numels[:i])
        places = range(self.seat[1]) if self.alone else range(1)
        parts = [
            self.place(f"grad {piece.spec.index} {r}")[start : start + piece.spec.numels[i]].view(piece.spec.shapes[i])[
                own
            ]
            for r in places
        ]
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def close(self) -> None:
        super().close()
        self.crew.close()


def factors(spec: Spec, place: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Left (rows, out) and right (rows, in) as they lie in a place."""
    out_features, in_features = spec.shapes[0]
    middle, end = num_rows * out_features, num_rows * (out_features + in_features)
    return place[:middle].view(num_rows, out_features), place[middle:end].view(num_rows, in_features)


def fits(spec: Spec, num_rows: int) -> bool:
    return num_rows * sum(spec.shapes[0]) <= spec.numel


class _Relay(contract.Exchange):
    """What both kinds share: the forms, and places for what was agreed."""

    def __init__(self, engine: Engine, exchange: contract.Exchange):
        self.engine, self.exchange, self.crew, self.link = engine, exchange, engine.crew, exchange.link
        self.fidelity, self.consensus = exchange.fidelity, exchange.consensus
        self._forms: list[str] = []
        self._overflow: set[int] = set()

    def forms(self) -> Sequence[str]:
        return self._forms

    def _put(self, piece: Piece) -> int:
        """Into this process's place; the number of rows, or -1. Rows that do not fit are voted dense."""
        if piece.left is None:
            self.engine.put(piece)
            return -1
        if not fits(piece.spec, len(piece.left)):
            self._overflow.add(piece.spec.index)
            return 0
        self.engine.put(piece)
        return len(piece.left)

    def _vote(self, ballot: Ballot) -> Ballot:
        ballot.dense = bytes(d or i in self._overflow for i, d in enumerate(ballot.dense))
        self._overflow = set()
        return ballot

    def cost(self, specs: Sequence[Spec], rows: int, size: int) -> contract.Cost:
        return self.exchange.cost(specs, rows, size)


class Leader(_Relay):
    """Local rank 0's exchange: collects the crew's pieces, holds the link, and passes verdicts on."""

    def __init__(self, engine: Engine, exchange: contract.Exchange):
        super().__init__(engine, exchange)
        if engine.alone:
            self._forms = [FACTORS if spec.linear else DENSE for spec in engine.specs]
        else:
            self._forms = list(exchange.forms())
        self._share_forms()
        self._inbox: _Inbox | None = None

    def _share_forms(self) -> None:
        for peer in self.crew.lines:
            self.crew.send(peer, b"f", "".join(form[0] for form in self._forms).encode())

    def before(self, weights: Sequence[Tensor]) -> None:
        self.exchange.before(weights)
        self._inbox = _Inbox(self)

    def offer(self, piece: Piece) -> None:
        assert self._inbox
        num_rows = self._put(piece)
        if not self.engine.alone:
            self._inbox.mark(0, piece.spec.index, num_rows)

    def node_piece(self, spec: Spec, rows: Sequence[int]) -> Piece:
        """The sum over the crew, in local rank order; factors are lined up, not added."""
        size = self.engine.seat[1]
        if self._forms[spec.index] == DENSE:
            whole = self.engine.get(spec, 0, None)
            for local_rank in range(1, size):
                whole.flat += self.engine.get(spec, local_rank, None).flat  # type: ignore[operator]
            return whole
        parts = [self.engine.get(spec, local_rank, rows[local_rank]) for local_rank in range(size)]
        left = torch.cat([part.left for part in parts if part.left is not None])
        right = torch.cat([part.right for part in parts if part.right is not None])
        return Piece(spec, left=left, right=right)

    def agree(self, ballot: Ballot) -> Agreement:
        assert self._inbox
        try:
            ballots = [self._vote(ballot), *self._inbox.finish()]
            agreement = self._alone(ballots) if self.engine.alone else self.exchange.agree(Ballot.merge(ballots))
        except contract.LinkError as error:
            self.crew.say_why(error)
            raise
        self._pass_on(agreement)
        return agreement

    def _alone(self, ballots: Sequence[Ballot]) -> Agreement:
        """No other node: factors wherever all rows fit in place of the gradient, else dense."""
        merged = Ballot.merge(ballots)
        lost = [
            self._forms[spec.index] == FACTORS
            and (bool(merged.dense[spec.index]) or not fits(spec, merged.rows[spec.index]))
            for spec in self.engine.specs
        ]
        self._forms = [DENSE if dense else form for dense, form in zip(lost, self._forms, strict=True)]
        if not merged.ok or any(lost):
            return Agreement(Verdict.REDO, ballot=merged)
        pieces = [
            self.engine.get(spec, 0, None)
            if self._forms[spec.index] == DENSE
            else self.node_piece(spec, [ballot.rows[spec.index] for ballot in ballots])
            for spec in self.engine.specs
        ]
        return Agreement(Verdict.APPLY, pieces, merged)

    def _pass_on(self, agreement: Agreement) -> None:
        """Pieces to where the crew can read them; then the verdict, the forms and the row counts."""
        rows = []
        for piece in agreement.pieces:
            if piece.left is not None and piece.right is not None:
                left, right = factors(piece.spec, self.engine.place(f"rows {piece.spec.index}"), len(piece.left))
                left.copy_(piece.left)
                right.copy_(piece.right)
                piece.left, piece.right = left, right
                rows.append(len(left))
            else:
                place = self.engine.place(f"grad {piece.spec.index} 0")
                if piece.flat is not None and piece.flat.data_ptr() != place.data_ptr():
                    place.copy_(piece.flat)
                piece.flat = place
                rows.append(-1)
        if not self.engine.alone:
            self._forms = list(self.exchange.forms())
        counts = struct.pack(f"<I{len(rows)}i", len(rows), *rows)
        word = agreement.verdict.value.encode()
        body = bytes([len(word)]) + word + counts + agreement.ballot.pack()
        for peer in self.crew.lines:
            self.crew.send(peer, b"v", body)
        self._share_forms()

    def reconcile(self, weights: Sequence[Tensor]) -> None:
        if self.consensus != "step":
            self.exchange.reconcile(weights)
            self.crew.barrier("reconciling")

    def total(self, values: Sequence[float]) -> list[float]:
        node = [sum(column) for column in zip(*self.crew.gather(values, "adding up"), strict=True)]
        whole = self.exchange.total(node)
        return self.crew.gather(whole, "adding up")[0]

    def spread(self, tensors: Sequence[Tensor]) -> None:
        self.exchange.spread(tensors)
        for i, tensor in enumerate(tensors):
            if (place := _shared(self.engine, i, tensor)) is not None:
                place.copy_(tensor)
        self.crew.barrier("spreading")
        self.crew.barrier("spreading")

    def rebuild(self, link: contract.Link) -> None:
        self.exchange.rebuild(link)
        self.link = link

    def state(self) -> dict[str, Any]:
        return self.exchange.state()

    def close(self) -> None:
        self.exchange.close()


class Follower(_Relay):
    """Another local rank's exchange: all it knows comes from local rank 0."""

    def __init__(self, engine: Engine, exchange: contract.Exchange):
        super().__init__(engine, exchange)
        self._hear_forms()

    def _hear_forms(self) -> None:
        word = self.crew.expect(0, b"f", "learning the forms").decode()
        self._forms = [FACTORS if letter == "f" else DENSE for letter in word]

    def offer(self, piece: Piece) -> None:
        num_rows = self._put(piece)
        if not self.engine.alone:
            self.crew.send(0, b"p", struct.pack("<Ii", piece.spec.index, num_rows))

    def agree(self, ballot: Ballot) -> Agreement:
        self.crew.send(0, b"v", self._vote(ballot).pack())
        body = self.crew.expect(0, b"v", "agreeing on the step")
        length = body[0]
        verdict = Verdict(body[1 : 1 + length].decode())
        (count,) = struct.unpack_from("<I", body, 1 + length)
        rows = struct.unpack_from(f"<{count}i", body, 5 + length)
        merged = Ballot.unpack(body[5 + length + 4 * count :])
        self._hear_forms()
        pieces = []
        for spec, num_rows in zip(self.engine.specs, rows, strict=False):
            if num_rows < 0:
                pieces.append(Piece(spec, flat=self.engine.place(f"grad {spec.index} 0")))
            else:
                left, right = factors(spec, self.engine.place(f"rows {spec.index}"), num_rows)
                pieces.append(Piece(spec, left=left, right=right))
        return Agreement(verdict, pieces, merged)

    def reconcile(self, weights: Sequence[Tensor]) -> None:
        if self.consensus != "step":
            self.crew.barrier("reconciling")

    def total(self, values: Sequence[float]) -> list[float]:
        self.crew.gather(values, "adding up")
        return self.crew.gather([0.0] * len(values), "adding up")[0]

    def spread(self, tensors: Sequence[Tensor]) -> None:
        self.crew.barrier("spreading")
        for i, tensor in enumerate(tensors):
            if (place := _shared(self.engine, i, tensor)) is not None:
                tensor.copy_(place)
        self.crew.barrier("spreading")

    def rebuild(self, link: contract.Link) -> None:
        self.link = link


def _shared(engine: Engine, i: int, tensor: Tensor) -> Tensor | None:
    """The shared place of the i-th buffer; weights are shared as they are."""
    if any(tensor is buffer for buffer in engine.buffers):
        return engine.place(f"buffer {i}")
    return None


class _Inbox:
    """Collects the crew's messages of one step, and offers each node piece once all have theirs."""

    def __init__(self, leader: Leader):
        self.leader = leader
        engine = leader.engine
        self.specs, self.size = engine.specs, engine.seat[1]
        self.rows: dict[int, dict[int, int]] = {spec.index: {} for spec in engine.specs}
        self.ballots: dict[int, Ballot] = {}
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        if not engine.alone:
            self.thread = threading.Thread(target=self._run, name="paceline inbox", daemon=True)
            self.thread.start()

    def mark(self, local_rank: int, index: int, num_rows: int) -> None:
        with self.lock:
            self.rows[index][local_rank] = num_rows
            if len(self.rows[index]) == self.size:
                rows = [self.rows[index][r] for r in range(self.size)]
                self.leader.exchange.offer(self.leader.node_piece(self.specs[index], rows))

    def _run(self) -> None:
        try:
            self._collect()
        except BaseException as error:
            self.error = error

    def _collect(self) -> None:
        crew = self.leader.crew
        with selectors.DefaultSelector() as eyes:
            for peer, line in crew.lines.items():
                eyes.register(line, selectors.EVENT_READ, peer)
            while len(self.ballots) < self.size - 1:
                for key, _ in eyes.select(PATIENCE_S) or self._in_vain():
                    kind, body = crew.recv(key.data, "computing the step")
                    if kind == b"p":
                        self.mark(key.data, *struct.unpack("<Ii", body))
                    else:
                        assert kind == b"v", kind
                        self.ballots[key.data] = Ballot.unpack(body)
                        eyes.unregister(key.fileobj)

    def _in_vain(self) -> NoReturn:
        missing = sorted(set(self.leader.crew.lines) - set(self.ballots))
        raise CrewError(f"local ranks {missing} of this node said nothing for {PATIENCE_S:.0f} s")

    def finish(self) -> list[Ballot]:
        """The others' ballots, in local rank order."""
        if self.thread:
            self.thread.join()
        else:
            self._run()
        if self.error:
            raise self.error
        return [self.ballots[peer] for peer in sorted(self.ballots)]
