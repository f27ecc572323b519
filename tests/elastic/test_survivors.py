"""Reconfiguration after a failure: all survivors agree on the members, and two parts of a run never both continue."""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial

import pytest

from paceline.elastic import reconfigure
from paceline.elastic.membership import alone
from paceline.elastic.quorum import ALIVE, UNREACHABLE, MemberStatus, decide
from paceline.elastic.reconfigure import REFUSED, MemberAddress, Reconfiguration
from paceline.errors import LinkError
from paceline.link.net.store_server import RendezvousStore
from paceline.report.activity import BACK_S

SECRET = b"of this run"
WITHOUT = decide([MemberStatus.AHEAD]).why


@pytest.fixture
def team():
    """Makes members on this machine, and closes their stores."""
    points = []

    def make(size, least=1, generations=()):
        mine = [RendezvousStore("127.0.0.1", 0, SECRET) for _ in range(size)]
        points.extend(mine)
        addresses = [
            MemberAddress(f"name{rank}", f"host{rank}", "127.0.0.1", point.port) for rank, point in enumerate(mine)
        ]
        numbers = generations or [0] * size
        return [Reconfiguration(rank, addresses, numbers[rank], mine[rank], SECRET, least) for rank in range(size)]

    yield make
    for point in points:
        point.close()


def reconfigure_all(members, ranks, late=()):
    """The result of each of ``ranks``: (generation, ranks), or the error text. ``late``: they begin a second later."""
    found = {}

    def one(rank):
        if rank in late:
            time.sleep(1.0)
        try:
            store, generation, others = members[rank].reconfigure()
            store.close()
            found[rank] = generation, others
        except LinkError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize("dead", [dead for n in range(3) for dead in itertools.combinations(range(3), n)], ids=str)
def test_all_who_are_left_agree(team, dead):
    members = team(3)
    for rank in dead:
        members[rank].store.close()
    left = [rank for rank in range(3) if rank not in dead]
    assert reconfigure_all(members, left) == dict.fromkeys(left, (1, left))


def test_they_wait_for_one_that_is_alive_and_comes_later(team):
    members = team(3)
    members[0].store.close()
    assert reconfigure_all(members, [1, 2], late=[1]) == dict.fromkeys([1, 2], (1, [1, 2]))


def test_the_lowest_waits_for_those_who_may_still_come(team):
    members = team(3)
    assert reconfigure_all(members, [0, 1, 2], late=[1, 2]) == dict.fromkeys(range(3), (1, [0, 1, 2]))


def test_people_are_told_for_whom_a_meeting_waits(team, monkeypatch):
    monkeypatch.setattr(reconfigure, "NOTICE_S", 0.3)
    members, notices = team(2), []
    members[0].notice = notices.append
    assert reconfigure_all(members, [0, 1], late=[1]) == dict.fromkeys(range(2), (1, [0, 1]))
    (words,) = notices
    assert "waits for rank 1 on host1: alive, and has not arrived yet" in words


def test_the_lowest_that_has_stood_still_is_told_that_the_others_went_on(team):
    """Story: they were alive in another generation, so it waited for them, for five minutes."""
    members = team(3)
    successors = [members[rank].successor([1, 2], 1) for rank in (1, 2)]
    start = time.monotonic()
    assert reconfigure_all(members, [0]) == {0: f"rank 0 of 3 on host0: {WITHOUT}"}
    assert time.monotonic() - start < 5.0
    assert reconfigure_all(successors, [0, 1]) == dict.fromkeys(range(2), (2, [0, 1]))


def test_another_whom_they_went_on_without_is_told_by_any_of_them(team):
    """Story: it could not reach the one that had decided, and asked the next for five minutes."""
    members = team(3)
    for rank in (0, 1):
        members[rank].successor([0, 1], 1)
    first = members[0].members[0]
    members[2].members[0] = Apart(first.name, first.host, first.address, first.port)
    start = time.monotonic()
    assert reconfigure_all(members, [2]) == {2: f"rank 2 of 3 on host2: {WITHOUT}"}
    assert time.monotonic() - start < 5.0


@pytest.mark.dear
def test_the_one_that_decided_dies_before_they_have_come(team):
    members, heard, dead = team(3), threading.Semaphore(0), threading.Event()

    def die(place, decided):
        assert all(heard.acquire(timeout=20.0) for _ in range(2))
        members[0].store.close()
        dead.set()
        raise LinkError("it died")

    def later(join, place, decided):
        heard.release()
        assert dead.wait(20.0)
        return join(place, decided)

    members[0]._join = die
    for rank in (1, 2):
        members[rank]._join = partial(later, members[rank]._join)
    found = reconfigure_all(members, [0, 1, 2])
    assert [found[rank] for rank in (1, 2)] == [(2, [1, 2])] * 2


def test_one_that_dies_once_it_was_met_is_not_waited_for(team):
    members, found = team(2), {}

    def wait():
        store, *_ = members[0].reconfigure()
        start = time.monotonic()
        try:
            store.get("what the dead would say")
        except LinkError as error:
            found[str(error)] = time.monotonic() - start
        store.close()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    store, *_ = members[1].reconfigure()
    store.close()
    members[1].store.close()
    thread.join(30.0)
    ((words, seconds),) = found.items()
    assert words == "host1 answered and then failed"
    assert seconds < 5.0


def test_a_number_is_never_used_again(team):
    """Rank 2 does not know of a generation that failed while it was formed."""
    members = team(3, generations=[4, 4, 3])
    members[1].store.close()
    assert reconfigure_all(members, [0, 2]) == dict.fromkeys([0, 2], (5, [0, 2]))
    assert members[0].generation == members[2].generation == 5


def test_fewer_than_the_minimum_form_a_generation_that_nodes_can_come_to(team):
    """Story: they ended, and the restarted nodes found no member."""
    members = team(3, least=2)
    for rank in (0, 1):
        members[rank].store.close()
    assert reconfigure_all(members, [2]) == {2: (1, [2])}


class Apart(MemberAddress):
    """An address that only members on the same side of a broken cable reach."""

    how = UNREACHABLE

    def probe(self):
        return self.how


class Refused(Apart):
    """As with a firewall that rejects connections."""

    how = REFUSED


@pytest.mark.dear("[]", "[0, 3]", "[1, 2, 3]", "[[0], [1, 2]]")
@pytest.mark.parametrize("apart", [Apart, Refused])
@pytest.mark.parametrize(
    ("sides", "on"),
    [
        ([[0], [1]], [0]),
        ([[0], [1, 2]], [1, 2]),
        ([[0, 2], [1]], [0, 2]),
        ([[0, 3], [1, 2]], [0, 3]),
        ([[1, 2, 3], [0]], [1, 2, 3]),
        ([[0], [1], [2]], []),
    ],
    ids=str,
)
def test_of_two_parts_the_larger_goes_on_and_of_equal_ones_that_with_the_lowest_rank(
    team, sides, on, apart, monkeypatch
):
    monkeypatch.setattr(reconfigure, "SUSPECT_AFTER_S", 0.5)
    monkeypatch.setenv("PACELINE_WAIT", "1")
    size = sum(map(len, sides))
    members = team(size)
    for side in sides:
        for rank in side:
            member = members[rank]
            member.members = [
                place if other in side else apart(place.name, place.host, place.address, place.port)
                for other, place in enumerate(member.members)
            ]
            member.me = member.members[rank]
    found = reconfigure_all(members, range(size))
    for rank in range(size):
        if rank in on:
            assert found[rank] == (1, on)
        else:
            assert "the larger part of a run continues" in found[rank]
            assert found[rank].endswith("it waited 1 s for them (--wait), in vain")


def test_a_link_that_outlives_its_nodes_waits_less_for_who_may_come_back(team):
    members = alone()
    assert members.activity.limit_s > BACK_S
    members.activity.begin(0)
    members.activity.end(0.1, 0.0)
    members._survive(team(1)[0])
    assert members.activity.limit_s == BACK_S


def test_what_can_be_told_of_a_place(team):
    (member,) = team(1)
    assert member.me.probe() == ALIVE
    member.store.close()
    assert member.me.probe() == REFUSED


def cut(members, sides):
    """Members of another side do not answer until the returned function is called."""
    parted = [True]

    class Cut(MemberAddress):
        def probe(self):
            return UNREACHABLE if parted[0] else super().probe()

    for side in sides:
        for rank in side:
            member = members[rank]
            member.members = [
                place if other in side else Cut(place.name, place.host, place.address, place.port)
                for other, place in enumerate(member.members)
            ]
            member.me = member.members[rank]
    return lambda: parted.__setitem__(0, False)


def after(seconds, work):
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def test_parts_of_which_none_may_continue_wait_and_continue_when_they_hear_each_other(team, monkeypatch):
    """Story: each ended as soon as a switch had failed for some seconds."""
    monkeypatch.setattr(reconfigure, "SUSPECT_AFTER_S", 0.5)
    members = team(3)
    notices = []
    for member in members:
        member.notice = notices.append
    after(2.0, cut(members, [[0], [1], [2]]))
    assert reconfigure_all(members, range(3)) == dict.fromkeys(range(3), (1, [0, 1, 2]))
    assert sum("is cut off from" in words and "waits up to 600 s for them (--wait)" in words for words in notices) == 3


def test_one_that_is_cut_off_waits_and_ends_when_it_hears_that_the_others_continued(team, monkeypatch):
    monkeypatch.setattr(reconfigure, "SUSPECT_AFTER_S", 0.5)
    members = team(3)
    heal = cut(members, [[0, 1], [2]])
    found = reconfigure_all(members, range(2))
    assert found == dict.fromkeys(range(2), (1, [0, 1]))
    successors = [members[rank].successor([0, 1], 1) for rank in range(2)]
    after(2.0, heal)
    assert reconfigure_all(members, [2]) == {2: f"rank 2 of 3 on host2: {WITHOUT}"}
    assert [successor.generation for successor in successors] == [1, 1]


@pytest.mark.dear("2")
@pytest.mark.parametrize("alone", [1, 2])
def test_where_those_that_continued_have_ended_the_run_is_resumed_from_a_checkpoint(team, monkeypatch, alone):
    """A and B commit without C, both end, C returns: its weights may be older than theirs."""
    monkeypatch.setattr(reconfigure, "SUSPECT_AFTER_S", 0.5)
    members = team(3)
    others = [rank for rank in range(3) if rank != alone]
    heal = cut(members, [others, [alone]])
    reconfigure_all(members, others)
    for rank in others:
        members[rank].successor(others, 1)

    def end():
        heal()
        for rank in others:
            members[rank].store.close()

    after(2.0, end)
    with pytest.raises(LinkError, match=r"may have continued without this process, which was suspended") as raised:
        members[alone].reconfigure()
    assert raised.value.resumes


def test_a_signal_ends_one_that_is_cut_off(team, monkeypatch):
    monkeypatch.setattr(reconfigure, "SUSPECT_AFTER_S", 0.3)
    members = team(2)
    cut(members, [[0], [1]])

    class Heard(Exception):
        pass

    def heard():
        raise Heard

    after(1.5, lambda: setattr(members[1], "glance", heard))
    with pytest.raises(Heard):
        members[1].reconfigure()
