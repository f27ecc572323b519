"""Laws of an engine: weights equal plain PyTorch; an aborted step leaves no trace; a wrong option is one error."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import registry
from paceline.contract import Engine
from paceline.messages import Vote
from paceline.session import join
from paceline.testing.codecs import equal
from paceline.testing.exchanges import gap
from paceline.testing.law import Law

Make = Callable[[], Engine]
Data = tuple[Tensor, Tensor]
EXACT = 1e-12  # float64, a few steps: only the order of additions differs
BATCH, WIDTH, HIDDEN, CLASSES, SEED = 24, 96, 128, 3, 5  # the hidden layer's gradient may be two factors
SIZES = {"uneven": (24, 24, 7), "few": (5, 1, 2)}  # few: fewer samples than micro-batches
RAISES, NO_LOSS, NO_GRADIENT = -1, -2, -3  # labels of samples that end a step
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1),
}


class Aborted(Exception):
    pass


class Noise(nn.Module):
    """Random in a function and in a method."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training) + 0.1 * torch.randn_like(x) + torch.empty_like(x).normal_(std=0.1)


def model(random: bool = False, norm: bool = False) -> nn.Sequential:
    """In float64, of fixed weights. ``random``: each forward pass draws numbers and changes buffers, too."""
    layers = [nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    layers[3:3] = [nn.BatchNorm1d(HIDDEN)] * (norm or random) + [nn.Dropout(0.5), Noise()] * random
    made, generator = nn.Sequential(*layers).double(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.1)
    return made


def batches(sizes: Sequence[int] = (BATCH,) * 3) -> list[Data]:
    generator = torch.Generator().manual_seed(SEED)
    inputs = [torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
    return [(x, torch.randint(0, CLASSES, (len(x),), generator=generator)) for x in inputs]


def state(made: nn.Module) -> dict[str, Tensor]:
    """Weights and running statistics."""
    return {name: value for name, value in made.state_dict().items() if value.is_floating_point()}


def marked(batch: Data, label: int, sample: int) -> Data:
    labels = batch[1].clone()
    labels[sample] = label
    return batch[0], labels


def loss(output: Tensor, target: Tensor) -> Tensor:
    if (target == RAISES).any():
        raise Aborted
    value = F.cross_entropy(output, target.clamp(min=0))
    if (target == NO_LOSS).any():
        value = value * torch.nan
    if (target == NO_GRADIENT).any():  # the square root of 0 is finite, and its slope is not
        value = value + (output.sum() * 0).abs().sqrt()
    return value


def plain(made: nn.Module, data: Sequence[Data], optimizer: str, clip: float | None = None) -> list[float]:
    """Trains with PyTorch alone. Returns the losses."""
    stepper, losses = OPTIMIZERS[optimizer](made.parameters()), []
    for x, y in data:
        stepper.zero_grad()
        value = loss(made(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(made.parameters(), clip)
            assert norm > clip, "nothing was clipped"
        stepper.step()
        losses.append(float(value.detach()))
    return losses


class Training:
    """A model that an engine trains. ``refuses``: the steps that this process votes down once."""

    def __init__(self, make: Make, made: nn.Module, optimizer: str, refuses: Sequence[int], **options: Any):
        self.model, self.optimizer = made, OPTIMIZERS[optimizer](made.parameters())
        exchange = registry.find("exchange", registry.EXCHANGE)
        self.refuses, self._collect, exchange.collect = list(refuses), exchange.collect, self._vote
        self.pace = join(made, self.optimizer, loss, batch_size=BATCH, engine=make(), exchange=exchange, **options)

    def _vote(self, vote: Vote) -> Vote:
        if self.pace.run.num_steps in self.refuses:
            self.refuses.remove(self.pace.run.num_steps)
            vote.ok = False
        return self._collect(vote)  # type: ignore[no-any-return]

    def everything(self) -> Any:
        """Weights, buffers, the optimizer's state and the random state."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()))


@contextmanager
def training(
    make: Make,
    made: nn.Module,
    optimizer: str = "momentum",
    refuses: Sequence[int] = (),
    seed: int = SEED,
    **options: Any,
) -> Iterator[Training]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = Training(make, made, optimizer, refuses, **options)
        try:
            yield found
        finally:
            found.pace.close()


def undisturbed(make: Make, seed: int = SEED) -> Any:
    with training(make, model(random=True), seed=seed) as found:
        losses = [found.pace.step(batch) for batch in batches()]
        return losses, found.everything()


def refused(make: Make, **options: Any) -> str:
    """The error by which a training cannot begin with these options; empty where it can."""
    try:
        with training(make, model(norm=True), **options):
            return ""
    except ValueError as error:
        return str(error)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def weights_equal_plain_pytorch(
    make: Make, sizes: Sequence[int], optimizer: str, clip: float | None, accumulate: int
) -> None:
    """Per parameter, for any number of samples. `open` may refuse to accumulate."""
    if accumulate > 1 and (said := refused(make, accumulate=accumulate)):
        assert "accumulat" in said, said
        return
    data, want, found = batches(sizes), model(), model()
    losses = plain(want, data, optimizer, clip)
    with training(make, found, optimizer, clip=clip, accumulate=accumulate) as one:
        got = [one.pace.step(batch) for batch in data]
    assert all(abs(mine - its) <= EXACT * abs(its) for mine, its in zip(got, losses, strict=True)), (got, losses)
    assert gap(state(found), state(want)) < EXACT
    assert gap(state(found), state(model())) > 1e-3, "nothing was trained"


def equal_seeds_give_equal_bits(make: Make) -> None:
    first, second, other = (undisturbed(make, seed) for seed in (SEED, SEED, SEED + 1))
    assert equal(first, second)
    assert first[0] != other[0], "nothing was drawn"


def a_refused_step_is_computed_again_with_the_same_bits(make: Make) -> None:
    """Its second attempt draws the numbers of the first. But the first step may be one of measurement."""
    with training(make, model(random=True), refuses=(1, 2)) as one:
        found = [one.pace.step(batch) for batch in batches()], one.everything()
        assert not one.refuses, "no step was refused"
    assert equal(found, undisturbed(make))


def an_aborted_step_leaves_no_trace(make: Make, sample: int) -> None:
    """Neither in weights, buffers, the optimizer and the random state, nor in the steps after it."""
    losses = list[float]()
    with training(make, model(random=True)) as one:
        for batch in batches():
            for label in (RAISES, NO_LOSS, NO_GRADIENT) if losses else ():
                before = one.everything()
                with suppress(Aborted, FloatingPointError):
                    one.pace.step(marked(batch, label, sample))
                    raise AssertionError(f"a step with label {label} was applied")
                assert equal(one.everything(), before), label
            losses.append(one.pace.step(batch))
        assert equal((losses, one.everything()), undisturbed(make))


def closing_ends_the_engines_threads(make: Make) -> None:
    before = set(threading.enumerate())
    undisturbed(make)
    assert set(threading.enumerate()) <= before


def batch_norm_over_all_samples_equals_plain_pytorch(make: Make) -> None:
    """`sync_norm` may refuse it."""
    if said := refused(make, batch_norm="sync"):
        assert "batch_norm" in said, said
        return
    want, found = model(norm=True), model(norm=True)
    plain(want, batches(), "momentum")
    with training(make, found, batch_norm="sync") as one:
        for batch in batches():
            one.pace.step(batch)
    assert gap(state(found), state(want)) < EXACT


def a_wrong_count_is_refused(make: Make, count: Any) -> None:
    """If the k of NAME:k counts something. The error contains what was given."""
    kind = type(make())
    if kind.counts:
        said = refusal(lambda: kind(count))  # type: ignore[call-arg]
        assert repr(count) in said, said


def a_frozen_parameter_stays_and_is_refused_by_name_when_it_unfreezes(make: Make) -> None:
    """Unfrozen after `open`, it would not be trained, or not be sent to other nodes."""
    want, found = model(), model()
    for made in (want, found):
        made[2].requires_grad_(False)
    data = batches()
    plain(want, data, "momentum")
    with training(make, found) as one:
        for batch in data:
            one.pace.step(batch)
        assert gap(state(found), state(want)) < EXACT
        found[2].requires_grad_(True)
        before = one.everything()
        assert "2.weight" in refusal(lambda: one.pace.step(data[0]))
        assert equal(one.everything(), before)


def laws() -> list[Law]:
    return list(_laws())


def _laws() -> Iterator[Law]:
    sizes = [(name, {"sizes": sizes}) for name, sizes in SIZES.items()]
    updates = [
        (f"{optimizer}-{clip}", {"optimizer": optimizer, "clip": clip})
        for optimizer, clip in (("momentum", None), ("momentum", 0.05), ("adamw", 0.05))
    ]
    accumulate = [(str(count), {"accumulate": count}) for count in (1, 3)]
    samples = [(str(sample), {"sample": sample}) for sample in (0, BATCH - 1)]
    counts = [(str(count), {"count": count}) for count in (0, -1, 1.5, "two")]
    over: list[tuple[Callable[..., None], list[list[tuple[str, dict[str, Any]]]]]] = [
        (weights_equal_plain_pytorch, [sizes, updates, accumulate]),
        (equal_seeds_give_equal_bits, []),
        (a_refused_step_is_computed_again_with_the_same_bits, []),
        (an_aborted_step_leaves_no_trace, [samples]),
        (closing_ends_the_engines_threads, []),
        (batch_norm_over_all_samples_equals_plain_pytorch, []),
        (a_wrong_count_is_refused, [counts]),
        (a_frozen_parameter_stays_and_is_refused_by_name_when_it_unfreezes, []),
    ]
    for check, axes in over:
        for values in itertools.product(*axes):
            merged = {key: value for _, each in values for key, value in each.items()}
            yield Law(check, merged, tuple(name for name, _ in values))
