"""After a loss all processes of a node send in the forms that the exchange has then, and know who is left."""

import queue
from types import SimpleNamespace

import pytest

import ranks
from paceline import transport
from paceline.engine.node.local_control import FollowerControl, LeaderControl
from paceline.engine.node.local_exchange import LocalFollower, LocalLeader
from paceline.messages import DENSE, FACTORS
from paceline.report.activity import Activity
from paceline.transport import ViewChange


class Crew:
    """Two processes of a node as threads."""

    def __init__(self, rank, lines):
        self.rank, self.size, self.lines = rank, 2, {1 - rank: None}
        self._out, self._in = lines[rank], lines[1 - rank]
        self.failure_detector = SimpleNamespace(activity=Activity(), reports=False)

    def send(self, peer, kind, words):
        self._out.put((kind, words))

    def expect(self, peer, kind, what):
        got, words = self._in.get(timeout=20)
        assert got == kind
        return words

    def all_gather_bytes(self, mine, what):
        self.send(1 - self.rank, b"w", mine)
        its = self.expect(1 - self.rank, b"w", what)
        return [mine, its] if self.rank == 0 else [its, mine]

    gather = all_gather_bytes

    def barrier(self, what):
        self.all_gather_bytes(b"", what)


class Control(transport.Control):
    """Its next operation finds a node lost, and then the exchange has other forms."""

    tolerates_loss, rank, size, generation = True, 0, 3, 0

    def __init__(self, exchange):
        self.exchange = exchange

    def _lose(self):
        self.exchange.forms = lambda: [DENSE, FACTORS]
        self.size, self.generation = 2, 1
        self.on_view_change(ViewChange(1, (0, 1), (4, 4), ("gone",), 0.1, "a test", ()))

    def all_gather(self, *words):
        self._lose()
        return list(words)

    def broadcast(self, tensors):
        self._lose()

    def all_reduce(self, values):
        self._lose()
        return values


@pytest.mark.parametrize("operation", ["all_gather", "broadcast", "all_reduce"])
def test_whatever_finds_a_node_lost_tells_the_forms(operation):
    lines, given = (
        [queue.Queue(), queue.Queue()],
        {"all_gather": b"word", "broadcast": [], "all_reduce": [1.0]}[operation],
    )
    places = SimpleNamespace(hold=lambda tensor: True)

    def work(link):
        exchange = SimpleNamespace(fidelity="exact", consensus="step", forms=lambda: [FACTORS, DENSE])
        local_group, own = Crew(link.rank, lines), Control(exchange)
        relay = (LocalLeader, LocalFollower)[link.rank](
            exchange, local_group, places, [None, None], alone=False, keeps=True
        )
        control = (LeaderControl, FollowerControl)[link.rank](own, relay)
        before, heard = list(relay.forms()), []
        control.on_view_change = heard.append
        getattr(control, operation)(given)
        return before, list(relay.forms()), [news.lost for news in heard], control.size, control.generation

    assert ranks.run(2, work) == [([FACTORS, DENSE], [DENSE, FACTORS], [("gone",)], 2, 1)] * 2
