"""After a loss all processes of a node send in the forms that the exchange has then, and know who is left."""

import queue
from types import SimpleNamespace

import pytest

import ranks
from paceline import contract
from paceline.contract import DENSE, FACTORS, Regroup
from paceline.engine.node.local_control import FollowerControl, LeaderControl
from paceline.engine.node.local_exchange import Follower, Leader
from paceline.report.activity import Whereabouts


class Crew:
    """Two processes of a node as threads."""

    def __init__(self, rank, lines):
        self.rank, self.size, self.lines = rank, 2, {1 - rank: None}
        self._out, self._in = lines[rank], lines[1 - rank]
        self.doubts = SimpleNamespace(whereabouts=Whereabouts(), tells=False)

    def send(self, peer, kind, words):
        self._out.put((kind, words))

    def expect(self, peer, kind, what):
        got, words = self._in.get(timeout=20)
        assert got == kind
        return words

    def swap(self, mine, what):
        self.send(1 - self.rank, b"w", mine)
        its = self.expect(1 - self.rank, b"w", what)
        return [mine, its] if self.rank == 0 else [its, mine]

    gather = swap

    def barrier(self, what):
        self.swap(b"", what)


class Control(contract.Control):
    """Its next operation finds a node lost, and then the exchange has other forms."""

    survives, rank, size, generation = True, 0, 3, 0

    def __init__(self, exchange):
        self.exchange = exchange

    def _lose(self):
        self.exchange.forms = lambda: [DENSE, FACTORS]
        self.size, self.generation = 2, 1
        self.regrouped(Regroup(1, (0, 1), (4, 4), ("gone",), 0.1, "a test", ()))

    def gather(self, *words):
        self._lose()
        return list(words)

    def spread(self, tensors):
        self._lose()

    def total(self, values):
        self._lose()
        return values


@pytest.mark.parametrize("operation", ["gather", "spread", "total"])
def test_whatever_finds_a_node_lost_tells_the_forms(operation):
    lines, given = [queue.Queue(), queue.Queue()], {"gather": b"word", "spread": [], "total": [1.0]}[operation]
    places = SimpleNamespace(twins=lambda tensors: [])

    def work(link):
        exchange = SimpleNamespace(fidelity="exact", consensus="step", forms=lambda: [FACTORS, DENSE])
        crew, own = Crew(link.rank, lines), Control(exchange)
        relay = (Leader, Follower)[link.rank](exchange, crew, places, [None, None], alone=False, keeps=True)
        control = (LeaderControl, FollowerControl)[link.rank](own, relay)
        before, heard = list(relay.forms()), []
        control.regrouped = heard.append
        getattr(control, operation)(given)
        return before, list(relay.forms()), [news.lost for news in heard], control.size, control.generation

    assert ranks.run(2, work) == [([FACTORS, DENSE], [DENSE, FACTORS], [("gone",)], 2, 1)] * 2
