"""Rows are assigned whole and in proportion; measured shares follow a node's speed, and ignore noise."""

import itertools
import random

import pytest

from paceline.data.load_balance import LoadBalancer, fair_shares, parse_shares
from paceline.data.sampler import Assignment, apportion
from paceline.messages import Vote
from paceline.train.settings import Settings

DICE = random.Random(5)
SHARES = [tuple(DICE.choice((0, 1, 2, 5, 0.1, 1 / 3, 40)) for _ in range(n)) for n in (1, 2, 3, 5, 8) for _ in range(6)]
SHARES = [shares for shares in SHARES if any(shares)]
COUNTS = (0, 1, 2, 7, 31, 32, 97)


@pytest.mark.parametrize("shares", SHARES)
def test_no_row_is_lost_and_a_larger_share_has_no_fewer_rows(shares):
    for count in COUNTS:
        rows = apportion(count, shares)
        assert sum(rows) == count
        for (a, mine), (b, other) in itertools.permutations(zip(shares, rows, strict=True), 2):
            assert mine >= other or a < b or (a == b and mine == other - 1), "a smaller share has more"
        assert all(abs(each - count * share / sum(shares)) < 1 for each, share in zip(rows, shares, strict=True))
        assert all(share or not each for each, share in zip(rows, shares, strict=True))


@pytest.mark.parametrize("shares", SHARES)
def test_who_is_given_a_larger_share_does_not_get_fewer_rows(shares):
    for node, count in itertools.product(range(len(shares)), COUNTS):
        more = tuple(share + 0.7 * (at == node) for at, share in enumerate(shares))
        assert apportion(count, more)[node] >= apportion(count, shares)[node]


def test_shares_that_are_rows_are_dealt_as_they_are_and_what_is_left_over_goes_to_the_first_of_equals():
    assert apportion(32, (24, 8)) == Assignment(0, 2, shares=(24, 8)).rows_per_node(32) == (24, 8)
    assert apportion(32, (19, 0, 13)) == (19, 0, 13)
    assert apportion(10, (1, 1, 1, 1)) == (3, 3, 2, 2)
    with pytest.raises(ValueError, match=r"not 0, got \(0, 0\)"):
        apportion(3, (0, 0))


# The best rows.


def ends(rows, fixed, per_row):
    return max(f + count * s for count, f, s in zip(rows, fixed, per_row, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_rows_end_earlier(seed):
    dice = random.Random(seed)
    n, count = dice.choice((2, 3)), dice.choice((5, 12, 17))
    fixed, per_row = [dice.uniform(0, 3) for _ in range(n)], [dice.choice((0.1, 0.5, 0.5, 2.0)) for _ in range(n)]
    least, most = [dice.choice((0, 1)) for _ in range(n)], [dice.choice((count, count // 2 + 1)) for _ in range(n)]
    rows = fair_shares(count, fixed, per_row, least, most)
    possible = [
        each
        for each in itertools.product(*(range(low, high + 1) for low, high in zip(least, most, strict=True)))
        if sum(each) == count
    ]
    assert rows in possible
    assert ends(rows, fixed, per_row) == pytest.approx(min(ends(each, fixed, per_row) for each in possible))


def test_large_batches_are_dealt_at_once():
    assert fair_shares(10**7, [0.0, 0.0], [1.0, 3.0], [1, 1], [10**7] * 2) == (7_500_000, 2_500_000)
    assert fair_shares(10**7, [0.0] * 3, [1.0] * 3, [1] * 3, [10**7, 5, 5]) == (10**7 - 10, 5, 5)


# Following speed: nodes whose step is update + hidden + rows x per row, each times noise.


class Nodes:
    def __init__(self, per_row, count=64, update=0.1, hidden=0.0, noise=lambda dice: 1.0, least=1, most=None, seed=0):
        self.per_row, self.update, self.hidden, self.noise = per_row, update, hidden, noise
        n, self.dice = len(per_row), random.Random(seed)
        self.balance = LoadBalancer(count, [least] * n, most or [count] * n)
        self.rows = apportion(count, (1,) * n)
        self.changes = []

    def times(self, slow=lambda node: 1.0):
        return [
            (self.update + self.hidden + rows * each) * slow(node)
            for node, (rows, each) in enumerate(zip(self.rows, self.per_row, strict=True))
        ]

    def steps(self, count, slow=lambda node: 1.0):
        """The number of steps until the shares changed, or None."""
        for step in range(1, count + 1):
            paces = []
            for node, busy in enumerate(self.times(slow)):
                noise = self.noise(self.dice)
                paces.append((busy * noise, self.update * slow(node) * noise))
            if change := self.balance.after(self.rows, paces):
                assert change.old == self.rows
                assert sum(change.new) == sum(self.rows)
                self.changes.append(change)
                self.rows = change.new
                return step
        return None


NOISES = {
    "none": lambda dice: 1.0,
    "little": lambda dice: max(0.1, dice.gauss(1, 0.05)),
    "normal": lambda dice: max(0.1, dice.gauss(1, 0.2)),
    "long tail": lambda dice: dice.lognormvariate(0, 0.2),
    "delays": lambda dice: 1 + (5 * dice.random() if dice.random() < 0.1 else 0.02 * dice.random()),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_equal_nodes_keep_their_shares_whatever_the_noise(n, noise):
    assert Nodes([0.03] * n, noise=NOISES[noise]).steps(1000) is None


@pytest.mark.parametrize("noise", ["none", "little", "delays"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_node_that_slows_down_has_fewer_rows_soon_and_gets_them_back(n, noise):
    nodes = Nodes([0.03] * n, noise=NOISES[noise])
    assert nodes.steps(20) is None
    assert nodes.steps(20 if noise == "none" else 45, lambda node: 2.0 if node == 1 else 1.0) is not None
    slowed = nodes.rows
    assert slowed[1] == min(slowed) < 64 // n * 0.8
    before = max(nodes.times(lambda node: 2.0 if node == 1 else 1.0))
    assert before < 0.85 * 2 * (0.1 + 64 / n * 0.03)
    nodes.steps(40, lambda node: 2.0 if node == 1 else 1.0)
    assert nodes.steps(80) is not None
    nodes.steps(60)
    assert max(nodes.rows) - min(nodes.rows) <= 64 // n * 0.3


def test_without_noise_it_takes_nine_steps_and_four_to_be_sure_and_the_rows_are_the_best():
    nodes = Nodes([0.03, 0.06])
    assert nodes.steps(100) == 2 + 9 + 3
    assert nodes.rows == fair_shares(64, [0.1] * 2, [0.03, 0.06], [1, 1], [64, 64])
    assert nodes.steps(500) is None
    (change,) = nodes.changes
    assert change.expected_s == pytest.approx(max(nodes.times()))
    assert change.per_s == pytest.approx([32 / 1.06, 32 / 2.02])
    assert "node 1 was the slowest with 2.02 s for 32 rows" in change.reason


def test_what_hides_in_the_time_of_rows_makes_changes_too_small_never_too_large():
    """Half of the time does not depend on rows, and no vote reports that."""
    nodes = Nodes([0.02, 0.05], update=0.0, hidden=0.8)
    while nodes.steps(200):
        one, other = nodes.times()
        assert other >= one, "the slower node became the faster"
    assert len(nodes.changes) > 1
    best = max(map(sum, zip([0.8] * 2, (r * s for r, s in zip((50, 14), (0.02, 0.05), strict=True)), strict=True)))
    assert max(nodes.times()) < 1.1 * best


def test_no_node_has_more_or_fewer_rows_than_it_may():
    nodes = Nodes([0.01, 0.1, 0.1], most=[30, 64, 64], least=4)
    while nodes.steps(200):
        pass
    assert nodes.rows[0] == 30
    stuck = Nodes([0.001, 10.0], least=4)
    while stuck.steps(200):
        pass
    assert stuck.rows == (60, 4)


def test_short_batches_and_nodes_without_rows_say_nothing():
    balance = LoadBalancer(8, [1, 1], [8, 8])
    for rows in ((3, 2), (8, 0)):
        assert all(balance.after(rows, [(1.0, 0.0), (9.0, 0.0)]) is None for _ in range(50))
    assert all(balance.after((4, 4), []) is None for _ in range(50))


def test_every_node_comes_to_the_same():
    nodes = [Nodes([0.03, 0.05, 0.03], noise=NOISES["normal"], seed=3) for _ in range(2)]
    for _ in range(5):
        for each in nodes:
            each.steps(60)
    assert nodes[0].changes == nodes[1].changes
    assert nodes[0].changes


# What is asked for, and what is said.


def test_what_shares_may_be():
    assert parse_shares("measured") == "measured"
    assert parse_shares("3,1") == parse_shares((3, 1)) == (3.0, 1.0)
    for wrong in ("fast", "3,-1", "0,0", "", (), (1, float("nan")), (1, float("inf")), None, 3):
        with pytest.raises(ValueError, match=r"'measured', 'equal', or a number >= 0 for each node.*got "):
            parse_shares(wrong)
    assert Settings(shares="3,1").shares == "3,1"
    with pytest.raises(ValueError, match=r"got 'fast'"):
        Settings(shares="fast")


@pytest.mark.parametrize("paces", [(), ((1.5, 0.25), (2.0, 0.5), (0.0, 0.0))])
@pytest.mark.parametrize("terms", [(), (1.0, 2.0)])
def test_a_ballot_carries_the_pace_of_every_node(paces, terms):
    vote = Vote(busy=2.5, fixed=1.25, rows=(3, 4), used=b"\1", dense=b"\0\1", terms=terms, paces=paces, hash=-5)
    assert Vote.unpack(vote.pack()) == vote


def test_ballots_with_and_without_terms_are_of_one_size():
    """A node without rows does not know the names of the loss's parts, and sends as many bytes as the others."""
    assert len(Vote().pack()) == len(Vote(terms=(1.0, 2.0)).pack())
