"""Cost model of a cluster: seconds per step of N nodes, from each node's own step model and the network between them.

    compute   forward, then backward, which completes one bucket after another on each node
    lane      buckets are sent one after another in a fixed order, each when the slowest node has it:
              dense by an all-reduce, on a ring 2 (N - 1) messages and 2 (N - 1) / N n bytes per node;
              factors by an all-gather of (N - 1) rows (in + out) values, after one of the numbers of rows
              on a slow network with lossless compression: factors, and all-reduces of two nodes, which become gathers
              after idle time TCP slow start: ten packets, doubled each round trip
    exposed   from the end of backward (with overlap="forward": of the next forward pass) until the last bucket has
              arrived, and the vote; weight averages (once per period) and batch norm's all-reduces do not overlap
    update    from the summed gradients, or from the multiplied factors of all nodes

*Invariants*: a step is never shorter than its computation, nor than its communication. It grows with latency, and falls
with bandwidth unless the compression changes. One node takes the time of its own step model.
*Source*: wait-free backpropagation: Zhang et al. 2017 (arXiv 1706.03292); affine messages: Hockney 1994 (Parallel
Computing 20:3); slow start after a pause: RFC 5681, section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from paceline.exchange.flow.costs import SLOW_S, CostFunction, clearly_differ, gathered, ring, summed
from paceline.messages import ALL_GATHER, DENSE, FACTORS, SUM, CommCost, ExchangeTraffic
from paceline.planner.step_model import LayerTiming, StepModel

VOTE_BYTES = 1024  # of the status all-reduce that ends a step
PACKING_S = 2e-9  # per byte: what lossless compression costs a core
NORM_BYTES = 8  # of a value in batch norm's all-reduces
TCP_TIMEOUT_S = 0.2  # idle time after which TCP slow start begins again: the minimum time-out of Linux
WINDOW_BYTES = 10 * 1448  # the initial congestion window
FRAME = 0.94  # payload part of a link's rate after Ethernet, IP and TCP headers


@dataclass(frozen=True)
class NetworkModel:
    """The network between any two nodes. *Units*: seconds per message; bytes per second, each way; seconds per byte.

    ``adding_s``: reduction time of a byte in addition to its transfer. ``cpu_s``: time of a core per byte sent and
    received, which computation loses. ``collectives``: their costs among so many nodes. ``assumed``: typical values,
    not measured.
    """

    latency_s: float
    bytes_per_s: float
    adding_s: float = 0.0
    cpu_s: float = 0.0
    collectives: Callable[[int], CostFunction] = field(default=ring, compare=False)
    assumed: bool = False

    def seconds(self, cost: CommCost, adds: bool = False) -> float:
        per_byte = 1 / self.bytes_per_s + (self.adding_s if adds else 0.0)
        return cost.steps * self.latency_s + cost.in_sequence * per_byte

    def slow_start_s(self, num_bytes: float) -> float:
        """Time that TCP slow start adds to ``num_bytes`` after idle time, until a full round trip is in flight."""
        trip_s, window, waited_s = 2 * self.latency_s, float(WINDOW_BYTES), 0.0
        while trip_s and window < min(num_bytes, trip_s * self.bytes_per_s):
            waited_s += trip_s - window / self.bytes_per_s
            num_bytes, window = num_bytes - window, 2 * window
        return waited_s

    @property
    def slow(self) -> bool:
        return 1 / self.bytes_per_s >= SLOW_S

    def with_link(self, bits_per_s: float | None = None, latency_s: float | None = None) -> NetworkModel:
        """The same machines with another bandwidth or latency between them."""
        rate = self.bytes_per_s if bits_per_s is None else bits_per_s * FRAME / 8
        return replace(self, bytes_per_s=rate, latency_s=self.latency_s if latency_s is None else latency_s)


@dataclass(frozen=True)
class Prediction:
    """*Units*: seconds and bytes per step; bytes are those that one node sends. ``forms``: the representation of each
    bucket. ``why``: a line for each fully-connected layer, the largest first."""

    nodes: int
    rows: float
    step_s: float
    compute_s: float
    wire_s: float
    exposed_s: float
    update_s: float
    sent_bytes: float
    forms: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    @property
    def per_s(self) -> float:
        """Samples per second, of all nodes."""
        return self.rows / self.step_s


@dataclass(frozen=True)
class WireFormat:
    """Bytes per value sent, equal on all nodes."""

    dense_bytes: float
    factor_bytes: float
    ways: ExchangeTraffic
    item_bytes: float = 4.0

    @classmethod
    def of(cls, models: Sequence[StepModel]) -> WireFormat:
        """The largest bytes per value of any node."""
        dense = [model.ways.dense_bytes or model.item_bytes for model in models]
        factors = max(model.ways.factor_bytes or model.item_bytes for model in models)
        return cls(max(dense), factors, models[0].ways, max(model.item_bytes for model in models))

    @property
    def fair(self) -> WireFormat:
        """For the choice of representations: a lossy codec's smaller size must not win against exact factors."""
        ways = replace(self.ways, gathers=False, rounds=1.0)
        return replace(self, dense_bytes=self.item_bytes, ways=ways) if self.ways.loses else self


def traffic(
    part: LayerTiming,
    form: str,
    nodes: int,
    rows: float,
    wire_format: WireFormat,
    collectives: Callable[[int], CostFunction] = ring,
) -> CommCost:
    """The cost of sending one bucket. ``rows``: the largest number of factor rows of any node."""
    if form == FACTORS:
        return gathered(round(rows * part.sides * wire_format.factor_bytes), nodes)
    num_bytes = round(part.numel * wire_format.dense_bytes)
    gathers = wire_format.ways.gathers
    cost = gathered(num_bytes, nodes) if gathers else summed(num_bytes, nodes, collectives(nodes))
    cost = replace(cost, steps=cost.steps * wire_format.ways.rounds)
    copy_bytes = part.numel / nodes * wire_format.ways.copy_bytes if nodes > 2 else 0.0
    return replace(cost, steps=cost.steps + 1, bytes=cost.bytes + copy_bytes) if copy_bytes else cost


def packed(part: LayerTiming, form: str, nodes: int, ways: ExchangeTraffic) -> float:
    """The ratio of lossless compression on a slow network."""
    if form != FACTORS and (ways.gathers or ways.copy_bytes or ways.loses):
        return 1.0
    return part.packed_factors if form == FACTORS else part.packed_dense if nodes == 2 else 1.0


def choose(models: Sequence[StepModel], network: NetworkModel) -> list[str]:
    """The representation of each bucket, chosen as an exchange does: factors where they fit and are smaller, unless the
    other one takes clearly less time for transfer and multiplication."""
    nodes = len(models)
    if nodes == 1:
        return models[0].alone()
    wire_format = WireFormat.of(models)
    return [_form([model.parts[i] for model in models], network, wire_format) for i in range(len(models[0].parts))]


def _form(per_node: Sequence[LayerTiming], network: NetworkModel, wire_format: WireFormat) -> str:
    """``per_node``: one bucket, with each node's times."""
    if not (wire_format.ways.factors and _factors_fit(per_node)):
        return DENSE
    num_bytes, seconds = _costs(per_node, network, wire_format.fair)
    fewest_bytes, fastest = (min(each, key=lambda form: each[form]) for each in (num_bytes, seconds))
    return fastest if clearly_differ(seconds[DENSE], seconds[FACTORS]) else fewest_bytes


def _factors_fit(per_node: Sequence[LayerTiming]) -> bool:
    return per_node[0].fits(sum(one.rows for one in per_node)) and all(one.rows for one in per_node)


def _costs(
    per_node: Sequence[LayerTiming], network: NetworkModel, wire_format: WireFormat
) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes, seconds) of each representation; for factors, the time includes their multiplication."""
    part, nodes = per_node[0], len(per_node)
    max_rows, total = max(one.rows for one in per_node), sum(one.rows for one in per_node)
    cost = {form: traffic(part, form, nodes, max_rows, wire_format, network.collectives) for form in (DENSE, FACTORS)}
    seconds = {form: network.seconds(one, adds=form == DENSE) for form, one in cost.items()}
    seconds[FACTORS] += max((total / one.rows - 1) * one.product_s for one in per_node)
    return {form: one.bytes for form, one in cost.items()}, seconds


def reasons(models: Sequence[StepModel], network: NetworkModel, forms: Sequence[str]) -> list[str]:
    """The representation of each fully-connected layer and the cost of both; the largest layer first."""
    found, wire_format = list[str](), WireFormat.of(models)
    linear = [(i, part) for i, part in enumerate(models[0].parts) if part.sides and wire_format.ways.factors]
    for i, part in sorted(linear, key=lambda each: -each[1].numel):
        per_node = [model.parts[i] for model in models]
        if not _factors_fit(per_node):
            total = sum(one.rows for one in per_node)
            found.append(f"{part.name} dense: factors of {total:g} rows would be no smaller")
            continue
        num_bytes, seconds = _costs(per_node, network, wire_format)
        each = {form: f"{num_bytes[form] / 1e6:.2f} MB, {1e3 * seconds[form]:.1f} ms" for form in seconds}
        factors = f"{each[FACTORS]} with multiplying them out"
        found.append(f"{part.name} {forms[i]}: as factors {factors}, dense {each[DENSE]}")
    return found


def predict(models: Sequence[StepModel], network: NetworkModel, forms: Sequence[str] | None = None) -> Prediction:
    """One step of the nodes that ``models`` describe, each with its own number of samples."""
    nodes, forms = len(models), list(choose(models, network) if forms is None else forms)
    ready = [model.ready(forms) for model in models]
    compute_s = max(max(times, default=model.forward_s) for times, model in zip(ready, models, strict=True))
    # a bucket is sent when the slowest node has it and all earlier ones
    ready_times = accumulate((max(times) for times in zip(*ready, strict=True)), max)
    link_free_s = wire_s = sent_bytes = packed_bytes = previous_ready_s = 0.0
    wire_format = WireFormat.of(models)
    ways = wire_format.ways
    for i, ready_s in enumerate(ready_times if nodes > 1 else ()):
        part, max_rows = models[0].parts[i], max(model.parts[i].rows for model in models)
        ratio = packed(part, forms[i], nodes, ways) if network.slow and not ways.every else 1.0
        # with compression an all-reduce of two nodes is a gather, which sends as many bytes as a ring
        sent = traffic(part, forms[i], nodes, max_rows, wire_format, ring if ratio < 1 else network.collectives)
        packed_bytes += sent.bytes if ratio < 1 else 0.0
        if ratio < 1:
            sent = CommCost(sent.steps, sent.bytes * ratio)
        took_s = network.seconds(sent, adds=forms[i] == DENSE)
        start_s = max(link_free_s, ready_s)
        if ready_s - previous_ready_s > TCP_TIMEOUT_S:  # of computation; if the network was busy meanwhile, less
            start_s = max(link_free_s, ready_s + network.slow_start_s(sent.in_sequence))
        wire_s += start_s - max(link_free_s, ready_s) + took_s
        link_free_s, previous_ready_s, sent_bytes = start_s + took_s, ready_s, sent_bytes + sent.bytes
    vote_s = network.seconds(ring(nodes)(ALL_GATHER, VOTE_BYTES)) if nodes > 1 else 0.0
    vote_bytes: float = (nodes - 1) * VOTE_BYTES
    if ways.every:  # weights after an update, without overlap; a status all-reduce accompanies them
        vote_s, wire_s, sent_bytes, vote_bytes = (t / ways.every for t in (vote_s, wire_s, sent_bytes, vote_bytes))
    moving_s = (sent_bytes * network.cpu_s + packed_bytes * PACKING_S) / min(model.cores for model in models)
    if nodes > 1:
        coded = sum(part.numel for part, form in zip(models[0].parts, forms, strict=True) if form != FACTORS)
        moving_s += coded * max(model.ways.coding_s for model in models) / (ways.every or 1)
    norm_s = 0.0
    if nodes > 1 and ways.norm_sums:
        sent = network.collectives(nodes)(SUM, ways.norm_numel * NORM_BYTES)
        # they have all values together
        norm_s = network.seconds(replace(sent, steps=ways.norm_sums * sent.steps), adds=True)
        vote_bytes += sent.bytes
    rows = [model.rows for model in models]
    update_s = max(model.updating_s(forms, sum(rows) / model.rows - 1) for model in models)
    hidden_s = compute_s + moving_s + (min(model.forward_s for model in models) if ways.forward else 0.0)
    exposed_s = (wire_s if ways.every else max(0.0, link_free_s - hidden_s)) + vote_s + norm_s
    return Prediction(
        nodes,
        sum(rows),
        compute_s + moving_s + exposed_s + update_s,
        compute_s + moving_s,
        wire_s + vote_s + norm_s,
        exposed_s,
        update_s,
        sent_bytes + vote_bytes,
        tuple(forms),
        tuple(reasons(models, network, forms)) if nodes > 1 else (),
    )
