"""Engines of one process obey the laws of `paceline.testing.engines`; a wrong engine breaks the law of its mistake."""

import dataclasses
import random
import threading
from contextlib import nullcontext

import pytest
import torch

from device import of_cpus
from paceline.engine import replicas, sequential
from paceline.registry import parse
from paceline.testing import laws

LAWS = laws("engine")
pytestmark = of_cpus  # the models of these laws


@pytest.mark.parametrize("engine", ["sequential", "threads:2", "replicas:2", "pipeline:2"])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_every_engine(law, engine):
    law(lambda: parse("engine", engine))


class Scales(sequential.Engine):
    def gradient(self, batch, scale, forms, offer):
        return super().gradient(batch, scale * (1 + 1e-9), forms, offer)


class LosesASample(sequential.Engine):
    """Of batches whose micro-batches are not of one size."""

    def _split(self, batch, parts):
        made = super()._split(batch, parts)
        return made if len({len(part[1]) for part in made}) == 1 else made[1:]


class DoesNotClip(sequential.Engine):
    def apply(self, update):
        return super().apply(dataclasses.replace(update, rule=dataclasses.replace(update.rule, clip=None)))


class AppliesWhatIsNotFinite(sequential.Engine):
    def apply(self, update):
        return super().apply(dataclasses.replace(update, rule=dataclasses.replace(update.rule, check=False)))


class KeepsBuffers(sequential.Engine):
    def rollback(self, kept):
        super().rollback(([], *kept[1:]))


class KeepsRandomState(sequential.Engine):
    def rollback(self, kept):
        now = torch.get_rng_state()
        super().rollback(kept)
        torch.set_rng_state(now)


class KeepsHalfAStep(sequential.Engine):
    def gradient(self, batch, scale, forms, offer):
        vote = super().gradient(batch, scale, forms, offer)
        with torch.no_grad():
            self.weights[0].add_(0.0 if vote.finite else 1e-9)
        return vote


class DrawsUnseeded(sequential.Engine):
    def gradient(self, batch, scale, forms, offer):
        return super().gradient(batch, scale * (1 + 1e-9 * random.SystemRandom().random()), forms, offer)


class LeavesAThread(sequential.Engine):
    end = threading.Event()

    def close(self):
        super().close()
        threading.Thread(target=self.end.wait, daemon=True).start()


class NormsEachReplica(replicas.Engine):
    def sync_norm(self, link):
        super().sync_norm(link)
        for one, (layers, _) in zip((self, *self.twins), self._norms, strict=True):
            one._sync_norms = nullcontext
            layers.restore()


class TakesAnyCount(replicas.Engine):
    def __init__(self, num_replicas=2):
        super().__init__()
        self.num_replicas = num_replicas


class DoesNotLook(sequential.Engine):
    def _check_parameters(self):
        pass


REFUSED, ABORTED = "a_refused_step_is_computed_again_with_the_same_bits", "an_aborted_step_leaves_no_trace"
BROKEN = {
    Scales: "weights_equal_plain_pytorch",
    LosesASample: "weights_equal_plain_pytorch",
    DoesNotClip: "weights_equal_plain_pytorch",
    AppliesWhatIsNotFinite: ABORTED,
    KeepsHalfAStep: ABORTED,
    KeepsBuffers: REFUSED,
    KeepsRandomState: REFUSED,
    DrawsUnseeded: "equal_seeds_give_equal_bits",
    LeavesAThread: "closing_ends_the_engines_threads",
    NormsEachReplica: "batch_norm_over_all_samples_equals_plain_pytorch",
    TakesAnyCount: "a_wrong_count_is_refused",
    DoesNotLook: "a_frozen_parameter_stays_and_is_refused_by_name_when_it_unfreezes",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_wrong_engine_breaks_the_law_of_its_mistake(kind):
    def breaks(law):
        try:
            law(kind)
        except (AssertionError, ValueError):  # some mistakes are found by paceline itself
            return True
        return False

    assert any(breaks(law) for law in LAWS if law.check.__name__ == BROKEN[kind])
    if kind is LeavesAThread:
        kind.end.set()


def test_each_law_has_a_mistake_that_breaks_it():
    assert {law.check.__name__ for law in LAWS} == set(BROKEN.values())
