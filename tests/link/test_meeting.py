"""The meeting point keeps what members say, waits with them, and names those who do not come."""

from __future__ import annotations

import re
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.engine.node.local_group import LocalGroup
from paceline.errors import LinkError
from paceline.launch.local import free_port
from paceline.link.net import rendezvous, route
from paceline.link.net.auth import HEADER, MAX_BYTES
from paceline.link.net.store_client import AT_ONCE, StoreClient
from paceline.link.net.store_server import RendezvousStore

SECRET = b"of this run"


@pytest.fixture
def point():
    point = RendezvousStore("127.0.0.1", 0, SECRET)
    yield point
    point.close()


@pytest.fixture
def guest(point):
    guests = []

    def come(rank=0, size=3, patience_s=5.0, secret=SECRET, port=None):
        guests.append(StoreClient("127.0.0.1", port or point.port, secret, rank, size, patience_s, point))
        return guests[-1]

    yield come
    for one in guests:
        one.close()


def conversation(store):
    """All that a store is asked, and what it says."""
    said = []
    store.set("key", "value")
    said.append(store.get("key"))
    store.set("key", "other")
    said.append(store.get("key"))
    said.extend(store.add("count", step) for step in (1, 5, -2))
    said.append(store.get("count"))
    said.extend(store.check(keys) for keys in (["key"], ["key", "missing"], ["missing"]))
    said.append(store.compare_set("fresh", "", "first"))
    said.append(store.compare_set("fresh", "wrong", "second"))
    said.append(store.compare_set("fresh", "first", "third"))
    said.append(store.compare_set("absent", "something", "fourth"))
    said.append(store.check(["absent"]))
    store.wait(["key", "fresh"])
    store.wait(["key"], timedelta(seconds=1))
    store.append("long", "one")
    store.append("long", "two")
    store.multi_set(["a", "b"], ["1", "2"])
    said.append(store.multi_get(["a", "long", "b"]))
    said.append(store.delete_key("a"))
    said.append(store.delete_key("a"))
    said.append(store.num_keys())
    return said


def test_it_speaks_as_torchs_own_store_does(guest):
    assert conversation(guest()) == conversation(dist.HashStore())


def test_it_speaks_so_from_c_too(guest):
    """As gloo calls it: through two prefixes in C++."""

    def within(store):
        return dist.PrefixStore("lane", dist.PrefixStore("paceline/0", store))

    mine, theirs = guest(), dist.HashStore()
    assert conversation(within(mine)) == conversation(within(theirs))
    assert mine.check(["paceline/0/lane/key"])


def test_any_byte_and_the_largest_value_come_through(guest):
    every = bytes(range(256))
    one, other = guest(0), guest(1)
    one.set("bytes", every)
    assert other.get("bytes") == every
    large = bytes(MAX_BYTES - 100)
    one.set("large", large)
    assert other.get("large") == large
    with pytest.raises(ValueError, match=f"at most {MAX_BYTES} bytes"):
        one.set("larger", bytes(MAX_BYTES))
    assert other.get("bytes") == every


def test_who_waits_hears_of_it_at_once(guest):
    one, other = guest(0), guest(1)
    later = threading.Timer(0.7, lambda: other.set("late", "here"))
    later.start()
    start = time.monotonic()
    assert one.get("late") == b"here"
    assert 0.6 < time.monotonic() - start < 1.5
    later.join()


def test_a_wait_in_one_thread_keeps_no_other_from_speaking(guest):
    """Story: one line, and a lock held while waiting for what the same process was about to say."""
    meeting = guest()
    heard = []
    waiting = threading.Thread(target=lambda: heard.append(meeting.get("said")))
    waiting.start()
    time.sleep(0.1)
    meeting.set("said", "by another thread")
    waiting.join(5.0)
    assert heard == [b"by another thread"]


def test_a_lease_goes_with_who_said_it_last(point, guest):
    """Story: the end of a line that had broken long before took with it what its owner had said by a new one."""
    first, second = guest(), guest()
    first.lease("guest/a", "1")
    first.lease("guest/b", "1")
    second.lease("guest/a", "2")
    first.close()
    end = time.monotonic() + 10
    while point.num_leased > 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert point.posted("guest/") == {"a": "2"}
    second.close()
    while point.num_leased:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert point.posted("guest/") == {}


def test_waiting_ends_and_names_the_ranks_and_not_the_keys(guest):
    meeting = guest(0, patience_s=0.8)
    meeting.set("lane/0/1", "here")
    start = time.monotonic()
    with pytest.raises(LinkError, match=r"rank 0 of 3 .*: rank 0, rank 2 did not come to .* within 1 s") as raised:
        meeting.wait(["lane/0/0", "lane/0/1", "lane/0/2"], timedelta(seconds=100))
    assert 0.7 < time.monotonic() - start < 2.0
    assert "lane" not in str(raised.value)


def test_waiting_ends_where_it_has_become_pointless(guest):
    meeting = guest(0, patience_s=100.0)

    def lost():
        raise LinkError("rank 2 died")

    meeting.alert = lost
    with pytest.raises(LinkError, match="rank 2 died"):
        dist.PrefixStore("lane", meeting).get("0/2")


def test_a_meeting_point_that_ends_is_told(point, guest):
    meeting = guest(1)
    point.close()
    with pytest.raises(LinkError, match=r"rank 1 of 3 .* lost the meeting point .*rank 0 ended") as raised:
        meeting.set("key", "value")
    assert raised.value.peer == 0


def test_it_listens_on_its_one_address(point):
    where = f"{point.port:04X}"
    listening = [
        line.split()[1].partition(":")[0]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{where}") and line.split()[3] == "0A"
    ]
    assert listening == ["0100007F"]


def test_a_port_that_is_taken_and_an_address_that_is_not_ours(point):
    with pytest.raises(LinkError, match=rf"rank 0 could not serve .*:{point.port} .*another process listens there"):
        RendezvousStore("127.0.0.1", point.port, SECRET)
    with pytest.raises(LinkError, match=r"203\.0\.113\.7.* not an address of this machine; set MASTER_ADDR"):
        RendezvousStore("203.0.113.7", 0, SECRET)


def test_a_knock_that_tcp_joins_to_itself_neither_meets_itself_nor_keeps_rank_0_out(monkeypatch):
    """Story: the port was one of those that connections leave from; a rank came first, and got it for its own end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # as it is given to any connection: `free_port` would keep it from them
    connect, sources = socket.create_connection, []

    def by_chance(address, timeout):
        source = address if len(sources) < 3 else None
        sources.append(source)
        return connect(address, timeout, source)

    monkeypatch.setattr(socket, "create_connection", by_chance)
    held = connect(("127.0.0.1", port), 1.0, ("127.0.0.1", port))
    assert held.getsockname() == held.getpeername()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    threading.Timer(0.5, held.close).start()
    point = RendezvousStore("127.0.0.1", port, SECRET)
    point.close()
    with pytest.raises(LinkError, match="nothing listens there yet"):
        StoreClient("127.0.0.1", port, SECRET, 1, 2, 0.15)
    assert sources[0]
    late = []
    threading.Timer(0.25, lambda: late.append(RendezvousStore("127.0.0.1", port, SECRET))).start()
    try:
        StoreClient("127.0.0.1", port, SECRET, 1, 2, 5.0).close()
    finally:
        late[0].close()


def test_nobody_there_and_somebody_else_there():
    with pytest.raises(LinkError, match=r"could not reach the meeting point .* within 1 s .*check MASTER_ADDR"):
        StoreClient("127.0.0.1", free_port(), SECRET, 1, 2, 0.6)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            line, _ = server.accept()
            with line:
                line.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(LinkError, match="no rendezvous of paceline; give all ranks another MASTER_PORT"):
            StoreClient("127.0.0.1", server.getsockname()[1], SECRET, 1, 2, 5.0)


def test_ranks_that_never_come_are_named():
    with pytest.raises(LinkError, match=r"rank 0 of 3 .*: rank 1, rank 2 did not come to .* within 1 s"):
        rendezvous.join(0, 3, "127.0.0.1", free_port(), patience_s=1.0)


def test_who_needs_longer_is_told_how_to_be_waited_for(monkeypatch):
    monkeypatch.setenv("PACELINE_RENDEZVOUS_TIMEOUT_S", "0.3")
    for rank, said in ((0, "rank 1 did not come to"), (1, "could not reach")):
        with pytest.raises(
            LinkError, match=rf"{said} .* within 0 s.*longer.*PACELINE_RENDEZVOUS_TIMEOUT_S, in seconds"
        ):
            rendezvous.join(rank, 2, "127.0.0.1", free_port())


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "1e9"])
def test_a_time_to_wait_that_is_none_is_told(given, monkeypatch):
    monkeypatch.setenv("PACELINE_RENDEZVOUS_TIMEOUT_S", given)
    for wait in (lambda: rendezvous.join(0, 2, "127.0.0.1", free_port()), lambda: LocalGroup(1, 2, "nobody")):
        with pytest.raises(ValueError, match=rf"RENDEZVOUS_TIMEOUT_S='{given}' must be a number of seconds above 0"):
            wait()


def test_a_rank_that_comes_twice_is_told():
    port, errors = free_port(), []

    def first():
        try:
            rendezvous.join(0, 2, "127.0.0.1", port, patience_s=2.0)
        except LinkError as error:
            errors.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    time.sleep(0.5)
    with pytest.raises(LinkError, match=r"another process has already come to .* as rank 0; give each its own RANK"):
        rendezvous.join(0, 2, "127.0.0.1", port, patience_s=2.0)
    thread.join(10.0)
    assert "rank 1 did not come" in errors[0]


def test_all_learn_the_same_of_where_all_are():
    port, found = free_port(), {}

    def one(rank):
        meeting, _, members = rendezvous.join(rank, 3, "127.0.0.1", port)
        found[rank] = members
        meeting.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert found[0] == found[1] == found[2]
    assert [(member.rank, member.address) for member in found[0]] == [(rank, "127.0.0.1") for rank in range(3)]


# Routes


@pytest.fixture
def doors():
    doors = [route.ReachabilityServer(rank, f"host{rank}", "127.0.0.1") for rank in range(3)]
    yield doors
    for door in doors:
        door.close()


def test_nobody_complains_where_everyone_reaches_everyone(doors):
    members = [door.member for door in doors]
    assert [route.Member.read(member.rank, member.write()) for member in members] == members
    assert [route.complaint(member, members) for member in members] == ["", "", ""]


def test_the_peer_that_is_not_reached_is_named_with_its_address(doors):
    members = [door.member for door in doors]
    doors[2].close()
    found = route.complaint(members[0], members)
    assert re.match(r"rank 0 on host0 \(127.0.0.1\) does not reach rank 2 on host2 \(127.0.0.1\) at port \d+: ", found)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quiet = route.Member(1, "host1", "127.0.0.1", silent.getsockname()[1], b"t" * route.TOKEN)
        start = time.monotonic()
        assert "does not reach rank 1 on host1 (127.0.0.1)" in route.complaint(members[0], [members[0], quiet], 0.5)
        assert time.monotonic() - start < 2.0
    stranger = route.Member(1, "host1", "127.0.0.1", members[1].port, b"t" * route.TOKEN)
    assert "another process answered" in route.complaint(members[0], [members[0], stranger])


def test_a_name_that_leads_home_is_refused():
    with pytest.raises(LinkError, match=r"MASTER_ADDR='127\.1' is 127\.0\.0\.1 on .*no other machine reaches"):
        route.resolve("127.1")
    with pytest.raises(LinkError, match=r"MASTER_ADDR='0\.0\.0\.0' is every address"):
        route.resolve("0.0.0.0")
    with pytest.raises(LinkError, match=r"MASTER_ADDR='no\.such\.invalid' is no name"):
        route.resolve("no.such.invalid", 0.1)
    assert route.resolve("localhost") in ("127.0.0.1", "::1")
    assert route.resolve("127.0.0.2") == "127.0.0.2"


def test_a_rank_that_others_are_told_to_look_for_at_home_is_refused():
    far = route.Member(0, "a", "10.0.0.1", 1, b"")
    home = route.Member(1, "b", "127.0.0.1", 1, b"")
    assert route.complaint(far, [far, home]).startswith("rank 1 on b (127.0.0.1) published a loopback address")


def test_the_interface_that_was_asked_for(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert route.own_address("10.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(LinkError, match=r"GLOO_SOCKET_IFNAME='nosuch0' is no interface .*there are: .*lo"):
        route.own_address("10.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert route.own_address("10.0.0.1") == "10.0.0.1"


def test_nccls_interface_counts_where_gloos_is_not_named_and_it_is_a_whole_name(monkeypatch):
    for name, want in (("lo", "127.0.0.1"), ("=lo", "127.0.0.1"), ("^docker", "10.0.0.9"), ("eth", "10.0.0.9")):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", name)
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        assert route.own_address("10.0.0.9") == want
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert route.own_address("10.0.0.9") == "127.0.0.1"


@pytest.mark.parametrize(("secret", "loopback"), [(b"", False), (b"", True), (b"word", False)])
def test_a_run_that_anyone_may_join_says_so(monkeypatch, capsys, secret, loopback):
    monkeypatch.setattr(route, "is_loopback", lambda address: loopback)
    monkeypatch.setattr(rendezvous, "_points", {})
    point, address, port = rendezvous._place(0, 2, "127.0.0.1", 0, secret, 5.0)
    point.close()
    told = f"this run has no secret: any process that reaches {address}:{port} may join" in capsys.readouterr().err
    assert told == (not secret and not loopback)


def test_the_header_of_every_version_has_one_length():
    assert HEADER == b"paceline\x01"
