"""What paceline must reach on several machines: each row of the table as a race, with the figure demanded.

Minutes are of two cores. A slow peer has fewer turns, spread over the phase; the record says how many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from paceline_bench.cluster import peers
from paceline_bench.cluster.race import Entry, Pace, Phase, Race, Result, faster, light, lighter, run, where
from paceline_bench.result import Finding, Show
from paceline_bench.single.paired import Spread

IMAGES = "sequential+channels_last"  # what the plan finds fastest on one core
ROUNDED = "sequential+bf16+channels_last"
FORWARD = {"PACELINE_OVERLAP": "forward"}
BLOCK = 5  # steps of a turn, of all whose steps are quick: one by one they begin cold, and hide what waits for the next

OURS = Entry("paceline")
LIMIT = Entry("none", "none")
DDP = Entry("ddp", "ddp")
OURS_IMAGES = Entry("paceline", row=IMAGES)
LIMIT_IMAGES = Entry("none-channels_last", "none", IMAGES)
OUR_LIMIT = Entry("none-paceline", "none-paceline", IMAGES)
DDP_IMAGES = Entry("ddp-channels_last", "ddp", IMAGES)
AHEAD = Entry("paceline-forward", row=IMAGES, environment=FORWARD)
OURS_ROUNDED = Entry("paceline-bf16", row=ROUNDED, options={"codec": "half"})
LIMIT_ROUNDED = Entry("none-bf16", "none", ROUNDED)
TUNED = Entry("ddp-tuned", "ddp-tuned", ROUNDED)
HOROVOD = Entry("horovod", "horovod")  # in torch's own layout: what channels_last makes, it refuses to send
ENCRYPTED = Entry("paceline-encrypt", options={"encrypt": True})
ELASTIC = Entry("paceline-elastic", row=IMAGES, environment={"PACELINE_NODES": "1:2"})

Task = Callable[[Pace, Show], Iterator[Finding]]


def table(task: str, got: Result) -> Finding:
    """The whole of a race, before what is demanded of it."""
    names = ", ".join(entry.name for entry in got.race.entries)
    what = f"{got.race.model} b{got.race.batch}, {got.race.nodes} nodes: {names}"
    notes = "".join(f"\n\n{note}" for note in got.notes)
    raw = {
        "race": dataclasses.asdict(got.race),
        "laps": [{n: vars(lap) for n, lap in laps.items()} for laps in got.laps],
    }
    return Finding(task, what, "see below", "-", True, got.table() + notes, raw)


def apart(task: str, entry: Entry, ours: Entry, race: Race, pace: Pace, show: Show) -> Iterator[Finding]:
    """A race of these two alone, where ``entry`` can run here: Horovod's thread asks a thousand times a second whether
    there is something to send, in the others' turns too."""
    if why := peers.lacking(entry.way):
        yield Finding(task, f"{entry.name} is not raced: {why}", "-", "-", True)
        return
    got = run(dataclasses.replace(race, entries=(entry, ours)), pace, show)
    yield table(task, got)
    for phase in range(len(race.phases)):
        ratio = str(got.ratio(phase, entry.name, ours.name))
        yield Finding(task, f"{where(got, phase)}: {ours.name} over {entry.name}, apart", ratio, "-", True)


def steady(entry: Entry, most: int = 10**6, block: int = BLOCK) -> Entry:
    return dataclasses.replace(entry, block=block, most=most)


def slow(entry: Entry, most: int) -> Entry:
    return dataclasses.replace(entry, most=most)


def limits(task: str, got: Result, phase: int) -> Iterator[Finding]:
    """Two nodes against each alone: in plain torch of the same layout, and, for information, by paceline itself, whose
    update is faster than torch's."""
    yield faster(task, got, phase, "paceline", "none-channels_last", 1.03)
    own = got.ratio(phase, "none-paceline", "paceline")
    yield Finding(task, f"{where(got, phase)}: paceline over itself without exchange", str(own), "-", True)


def alexnet_fast(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 32 rows per node, no limited rate and 10 Gbit/s: 5 minutes, 8 with Horovod."""
    phases = Phase(None), Phase("10gbit")
    race = Race("alexnet", 32, 2, (LIMIT_IMAGES, OUR_LIMIT, slow(DDP_IMAGES, 6), OURS_IMAGES), phases, 240.0)
    got = run(race, pace, show)
    yield table("alexnet-fast", got)
    for phase in range(2):
        yield from limits("alexnet-fast", got, phase)
        yield light("alexnet-fast", got, phase, "paceline", 13.0)
    yield from apart("alexnet-fast", slow(HOROVOD, 6), OURS_IMAGES, race, pace, show)


def alexnet_1gbit(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 32 rows per node, 1 Gbit/s, DDP in either memory layout: 4 minutes, 5 with Horovod."""
    task = "alexnet-1gbit"
    entries = *map(steady, (LIMIT_IMAGES, OUR_LIMIT, OURS_IMAGES)), steady(DDP, 4), steady(DDP_IMAGES, 4)
    race = Race("alexnet", 32, 2, entries, (Phase("1gbit", 8, 1),), 400.0)
    got = run(race, pace, show)
    yield table(task, got)
    yield from limits(task, got, 0)
    yield faster(task, got, 0, "paceline", "ddp", 2.6)
    yield faster(task, got, 0, "paceline", "ddp-channels_last", 2.6)
    yield light(task, got, 0, "paceline", 13.0)
    yield from apart(task, steady(HOROVOD, 4), steady(OURS_IMAGES), race, pace, show)


def encrypted(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 32 rows per node, 1 Gbit/s, encrypted against not: 3 minutes."""
    entries = LIMIT, OURS, ENCRYPTED
    got = run(Race("alexnet", 32, 2, entries, (Phase("1gbit"),), 150.0), pace, show)
    yield table("encrypted", got)
    yield faster("encrypted", got, 0, "paceline-encrypt", "paceline", 0.95)
    yield light("encrypted", got, 0, "paceline-encrypt", 13.0)


def elastic(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 32 rows per node, 1 Gbit/s, ready to lose nodes against not, of which none is lost: 4 minutes."""
    got = run(Race("alexnet", 32, 2, (OURS_IMAGES, ELASTIC), (Phase("1gbit", 90),), 220.0), pace, show)
    yield table("elastic", got)
    yield faster("elastic", got, 0, "paceline-elastic", "paceline", 0.98)


def alexnet_100mbit(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 32 rows per node, 100 Mbit/s, backward and forward overlapped: 9 minutes, 12 with Horovod."""
    task = "alexnet-100mbit"
    powersgd = Entry("ddp-powersgd", "ddp-powersgd", IMAGES)
    entries = *map(steady, (LIMIT_IMAGES, powersgd, OURS_IMAGES, AHEAD)), slow(DDP_IMAGES, 6)
    race = Race("alexnet", 32, 2, entries, (Phase("100mbit", 8, 1),), 500.0)
    got = run(race, pace, show)
    yield table(task, got)
    best = min(("paceline", "paceline-forward"), key=lambda name: got.laps[0][name].step_s)
    yield faster(task, got, 0, best, "ddp-powersgd", 1.0)
    yield faster(task, got, 0, best, "ddp-channels_last", 17.0)
    yield light(task, got, 0, "paceline", 13.0)
    yield from apart(task, slow(HOROVOD, 3), steady(AHEAD), race, pace, show)


def rounded(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet in bf16 against tuned DDP, 1 Gbit/s and 100 Mbit/s, backward and forward overlapped: 10 minutes."""
    forward = dataclasses.replace(OURS_ROUNDED, name="paceline-bf16-forward", environment=FORWARD)
    entries = *map(steady, (LIMIT_IMAGES, LIMIT_ROUNDED, OURS_ROUNDED, forward)), steady(TUNED, 4)
    got = run(Race("alexnet", 32, 2, entries, (Phase("1gbit", 8, 1), Phase("100mbit", 8, 1)), 560.0), pace, show)
    yield table("rounded", got)
    yield faster("rounded", got, 0, "paceline-bf16", "ddp-tuned", 2.2)
    best = min(("paceline-bf16", "paceline-bf16-forward"), key=lambda name: got.laps[1][name].step_s)
    yield faster("rounded", got, 1, best, "ddp-tuned", 12.0)
    # 95 images/s where no exchange in fp32 gives 71
    yield faster("rounded", got, 1, best, "none-channels_last", 95 / 71)


def vgg16(pace: Pace, show: Show) -> Iterator[Finding]:
    """VGG16, 8 rows per node, 1 Gbit/s and 100 Mbit/s, where DDP needs 48 s for a step: 18 minutes, 21 with Horovod."""
    entries = steady(LIMIT_IMAGES, block=3), slow(DDP_IMAGES, 3), steady(OURS_IMAGES, block=3)
    race = Race("vgg16", 8, 2, entries, (Phase("1gbit", 7, 1),), 400.0)
    got = run(race, pace, show)
    yield table("vgg16", got)
    yield faster("vgg16", got, 0, "paceline", "none-channels_last", 0.93)
    # a training never waits for its last sums but once, a turn does: of 12 steps, so that it is little of each
    entries = steady(LIMIT_IMAGES, block=12), steady(AHEAD, block=12), slow(DDP_IMAGES, 3)
    got = run(Race("vgg16", 8, 2, entries, (Phase("100mbit", 5, 1),), 1000.0), pace, show)
    yield table("vgg16", got)
    yield faster("vgg16", got, 0, "paceline-forward", "none-channels_last", 0.93)
    yield faster("vgg16", got, 0, "paceline-forward", "ddp-channels_last", 7.0)
    yield from apart("vgg16", slow(HOROVOD, 2), OURS_IMAGES, race, pace, show)


def resnet(pace: Pace, show: Show) -> Iterator[Finding]:
    """ResNet50V2, 8 rows of 128x128 per node, nothing to factor, 1 Gbit/s and 100 Mbit/s: 22 minutes."""
    entries = tuple(map(steady, (LIMIT_IMAGES, DDP, DDP_IMAGES, TUNED, OURS_IMAGES, AHEAD, OURS_ROUNDED)))
    phases = Phase("1gbit", 10, 1), Phase("100mbit", 4, 1)
    got = run(Race("resnet50v2@128", 8, 2, entries, phases, 2400.0), pace, show)
    yield table("resnet", got)
    for phase, demanded in ((0, 1.1), (1, 1.0)):
        best = min(("paceline", "paceline-forward"), key=lambda name: got.laps[phase][name].step_s)
        for peer in ("ddp", "ddp-channels_last"):
            yield faster("resnet", got, phase, best, peer, demanded)
    yield faster("resnet", got, 1, "paceline-bf16", "ddp-tuned", 1.1)


def transformer(pace: Pace, show: Show) -> Iterator[Finding]:
    """10 million parameters, 2,048 tokens per node, four rates: 8 minutes."""
    phases = tuple(Phase(rate, 20, 1) for rate in (None, "10gbit", "1gbit", "100mbit"))
    got = run(Race("transformer", 8, 2, (DDP, OURS), phases, 520.0), pace, show)
    yield table("transformer", got)
    for phase in range(len(phases)):
        yield faster("transformer", got, phase, "paceline", "ddp", 1.0)


def lowrank(pace: Pace, show: Show) -> Iterator[Finding]:
    """ResNet50V2@128 and a vision transformer of 5 million parameters, 8 rows per node, 100 Mbit/s: gradients of matrix
    rank 1 by DDP's hook, and as codec with error feedback: 12 minutes."""
    hook = steady(Entry("ddp-powersgd", "ddp-powersgd", IMAGES))
    dense = {"codec": "feedback/lowrank:1", "exchange": "allreduce:forms=dense"}
    ours = steady(Entry("paceline-lowrank", row=IMAGES, options=dense))
    for model in ("resnet50v2@128", "vit"):
        got = run(Race(model, 8, 2, (steady(LIMIT_IMAGES), hook, ours), (Phase("100mbit", 8, 1),), 400.0), pace, show)
        yield table("lowrank", got)
        yield faster("lowrank", got, 0, "paceline-lowrank", "ddp-powersgd", 1.0)
        yield lighter("lowrank", got, 0, "paceline-lowrank", "ddp-powersgd", 1.02)


def nodes4(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 16 rows on each of 4 nodes that share two cores, 1 Gbit/s: 3 minutes."""
    entries = LIMIT_IMAGES, slow(DDP_IMAGES, 6), OURS_IMAGES
    got = run(Race("alexnet", 16, 4, entries, (Phase("1gbit"),), 180.0), pace, show)
    yield table("nodes4", got)
    yield faster("nodes4", got, 0, "paceline", "none-channels_last", 0.85)


def nodes8(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 16 rows on each of 8 nodes that share two cores, 1 Gbit/s: 4 minutes and 14 GiB."""
    got = run(Race("alexnet", 16, 8, (LIMIT_IMAGES, OURS_IMAGES), (Phase("1gbit"),), 180.0), pace, show)
    yield table("nodes8", got)
    yield faster("nodes8", got, 0, "paceline", "none-channels_last", 0.75)


def halfspeed(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, global batch 64, 10 Gbit/s, node 1 held to half speed: measured shares against equal ones, 4 minutes."""
    equal = Entry("equal shares", options={"shares": "equal"}, dealt=True)
    measured = Entry("measured shares", options={"shares": "measured"}, dealt=True)
    phases = (Phase("10gbit", 20, 30),)  # shares follow within the warm-up
    got = run(Race("alexnet", 32, 2, (measured, equal), phases, 260.0, held=(1, 0.5)), pace, show)
    yield table("halfspeed", got)
    yield faster("halfspeed", got, 0, "measured shares", "equal shares", 1.35)


def changing_rate(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet, 1 Gbit/s, 50 Mbit/s, 1 Gbit/s: 20 steps after each change against fixed plans, 5 minutes."""
    factors, dense = ({"exchange": f"allreduce:forms={form}"} for form in ("factors", "dense"))
    fixed = Entry("always factors", options=factors), slow(Entry("always dense", options=dense), 1)
    phases = Phase("1gbit", 10), Phase("50mbit", 20, 0), Phase("1gbit", 20, 0)
    got = run(Race("alexnet", 32, 2, (OURS, *fixed), phases, 300.0), pace, show)
    yield table("changing-rate", got)
    for phase in (1, 2):
        best = min(fixed, key=lambda entry: got.laps[phase][entry.name].step_s).name
        pairs = got.ratio(phase, best, "paceline")
        what = f"AlexNet, 1gbit to {phases[phase].rate}" if phase == 1 else "AlexNet, back to 1gbit"
        yield Finding(
            "changing-rate", f"{what}: the 20 steps after it over {best}", str(pairs), ">= 0.9", pairs.low >= 0.9
        )


def asked(
    model: str,
    batch: int,
    nodes: int,
    rate: str | None,
    against: tuple[str, ...],
    fidelity: str,
    pace: Pace,
    show: Show,
    delay_ms: float = 0.0,
) -> Iterator[Finding]:
    """The race that the command line describes. Raises ValueError."""
    if fidelity not in ("exact", "rounded"):
        raise ValueError(f"fidelity {fidelity!r} is not raced here; use exact or rounded")
    row = ROUNDED if fidelity == "rounded" else "sequential"
    mine = OURS_ROUNDED if fidelity == "rounded" else OURS
    entries = *(Entry(name, name, row) for name in against), mine
    got = run(Race(model, batch, nodes, entries, (Phase(rate),), 1800.0, delay_ms=delay_ms), pace, show)
    if "ddp-tuned" in against and fidelity == "exact":
        got.notes.append("ddp-tuned computes and sends in bf16, in channels_last, whatever the others do")
    yield table("asked", got)
    for name in against:
        ratio: Spread = got.ratio(0, name, mine.name)
        yield Finding("asked", f"{mine.name} over {name}", str(ratio), "-", True)


TASKS: dict[str, Task] = {
    "alexnet-fast": alexnet_fast,
    "alexnet-1gbit": alexnet_1gbit,
    "alexnet-100mbit": alexnet_100mbit,
    "encrypted": encrypted,
    "elastic": elastic,
    "rounded": rounded,
    "vgg16": vgg16,
    "resnet": resnet,
    "transformer": transformer,
    "lowrank": lowrank,
    "nodes4": nodes4,
    "nodes8": nodes8,
    "halfspeed": halfspeed,
    "changing-rate": changing_rate,
}
