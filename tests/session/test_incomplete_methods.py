"""A method that is not what its interface says is refused by name: at join, or where it shows."""

import sys

import pytest
import torch
from torch.nn import functional as F

import paceline
import ranks
from nodes import OPTIMIZERS, Rank, build, rows
from paceline.contract import Codec, Engine, Exchange
from paceline.messages import ALL_GATHER, SUM, Coded, Collective, Round
from paceline.registry import parse
from paceline.testing import laws
from paceline.transport import Link

MODULE = """
from paceline import contract, messages, transport


class Engine(contract.Engine):
    pass


class Exchange(contract.Exchange):
    def forms(self):
        return []


class Codec(contract.Codec):
    def rounds(self, bucket, size, dtype):
        return []


class Link(transport.Link):
    pass
"""
INTERFACES = {"engine": Engine, "exchange": Exchange, "codec": Codec, "link": Link}
DEFINED = {"exchange": "forms", "codec": "rounds"}


@pytest.fixture
def half_done(tmp_path, monkeypatch):
    (tmp_path / "half_done.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "half_done", raising=False)


@pytest.mark.parametrize("kind", INTERFACES)
def test_a_class_without_a_required_function_is_refused_with_its_name(kind, half_done):
    text = f"half_done:{kind.title()}"
    with pytest.raises(ValueError, match=f"{kind} '{text}' does not define ") as caught:
        parse(kind, text)
    named = set(str(caught.value).partition("define ")[2].partition(", which")[0].split(", "))
    assert named == INTERFACES[kind].__abstractmethods__ - {DEFINED.get(kind)}


@pytest.mark.parametrize("kind", ["engine", "exchange", "codec"])
def test_join_refuses_it_before_anything_starts(kind, half_done):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = {"engine": "sequential", kind: f"half_done:{kind.title()}"}
    with pytest.raises(ValueError, match=f"join: {kind} 'half_done:{kind.title()}' does not define "):
        paceline.join(model, optimizer, F.cross_entropy, batch_size=8, **words)


class Whole(Codec):
    """As `none`, where nothing is overwritten."""

    def rounds(self, bucket, size, dtype):
        return [Round(SUM, bucket.numel * dtype.itemsize)]

    def run(self, bucket, values, state, context):
        return Coded((yield Collective(SUM, values)))


class NoGenerator(Whole):
    def run(self, bucket, values, state, context):
        return Coded(values)


class NoResult(Whole):
    def run(self, bucket, values, state, context):
        yield Collective(SUM, values)


class Early(Whole):
    def rounds(self, bucket, size, dtype):
        return [*super().rounds(bucket, size, dtype), Round(SUM, 8)]


class More(Whole):
    def run(self, bucket, values, state, context):
        yield Collective(SUM, values)
        return Coded((yield Collective(SUM, values)))


class Larger(Whole):
    def rounds(self, bucket, size, dtype):
        return [Round(SUM, 8)]


class Another(Whole):
    def rounds(self, bucket, size, dtype):
        return [Round(ALL_GATHER, bucket.numel * dtype.itemsize)]


class Doubled(Whole):
    def run(self, bucket, values, state, context):
        return Coded((yield Collective(SUM, values)).repeat(2))


class Shorter(Whole):
    def run(self, bucket, values, state, context):
        return Coded((yield Collective(SUM, values)).abs().half())


BROKEN = {
    NoGenerator: "run() is a generator",
    NoResult: "run() returns a Coded; it returned <class 'NoneType'>",
    Early: "run() ended before collective 2 of 2",
    More: "run() yields more collectives than the 1",
    Larger: "of at most 8 bytes, and run() yields 'sum', even=True, of",
    Another: "collective 1 in rounds() is 'all-gather'",
    Doubled: "the total of values",
    Shorter: "float16",
}


@pytest.mark.parametrize("exchange", ["allreduce", "diloco:1"])
@pytest.mark.parametrize("codec", BROKEN, ids=lambda each: each.__name__)
def test_a_codec_that_is_not_as_it_declares_ends_the_step_with_its_name(codec, exchange):
    def work(link):
        rank = Rank(link, build(), OPTIMIZERS["sgd"], exchange=exchange)
        rank.exchange.open(rank.engine, link, codec())
        rank.train([rows(24, 0)])

    with pytest.raises(TypeError) as caught:
        ranks.run(2, work)
    assert str(caught.value).startswith(f"codec {__name__}:{codec.__name__} is not as paceline.contract.Codec: ")
    assert BROKEN[codec] in str(caught.value)


@pytest.mark.parametrize("codec", [*BROKEN, Whole], ids=lambda each: each.__name__)
def test_the_laws_find_it_too(codec):
    broken = []
    for law in laws("codec"):
        try:
            law(codec)
        except (AssertionError, TypeError) as error:
            broken.append(error)
    assert bool(broken) == (codec is not Whole)
    assert all(str(error) for error in broken), "an error without a word"


@pytest.mark.parametrize(
    ("kind", "text", "others"),
    [
        ("codec", "half/lowrank", "feedback, lossless"),
        ("engine", "pipeline:2/processes:2", "processes"),
        ("exchange", "diloco:2/none", "none"),
    ],
)
def test_a_method_that_contains_none_is_not_given_one(kind, text, others):
    with pytest.raises(ValueError, match=f"{kind} '{text}': .* contains no other {kind}; of ours these do: {others}$"):
        parse(kind, text)
