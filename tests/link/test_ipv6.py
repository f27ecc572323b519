"""A run whose nodes meet at an IPv6 address: meeting point, routes, heartbeats and gloo."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

import launching
from cluster import Cluster
from machines import needs_cluster
from needs import needs
from paceline.link.net.route import ReachabilityServer, complaint, own_address, resolve
from paceline.link.net.store_client import StoreClient
from paceline.link.net.store_server import RendezvousStore

SCRIPT = str(launching.HERE / "scripts" / "meeting.py")


def missing() -> str:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return ""
    return "this machine has no ::1"


needs_ipv6 = needs(ipv6=missing())


@needs_ipv6
def test_a_meeting_point_and_its_members():
    assert resolve("::1") == "::1"
    point = RendezvousStore("::1", 0, b"secret")
    try:
        one, other = (StoreClient("::1", point.port, b"secret", rank, 2, 5.0, point) for rank in range(2))
        one.set("key", "value")
        assert other.get("key") == b"value"
        assert other.address == "::1"
        one.close()
        other.close()
    finally:
        point.close()


@needs_ipv6
def test_routes_are_tried(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    doors = [ReachabilityServer(rank, f"host{rank}", own_address("::1")) for rank in range(3)]
    members = [door.member for door in doors]
    try:
        assert [type(member).read(member.rank, member.write()) for member in members] == members
        assert [complaint(door.member, members) for door in doors] == [""] * 3
        doors[2].close()
        assert complaint(members[0], members).startswith(
            "rank 0 on host0 (::1) does not reach rank 2 on host2 (::1) at"
        )
    finally:
        for door in doors[:2]:
            door.close()


def trained(processes, folder):
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    weights = {(folder / str(rank)).read_text() for rank in range(2)}
    assert len(weights) == 1


@pytest.mark.dear
@needs_ipv6
@needs_cluster
def test_two_machines_train_over_it(tmp_path):
    (tmp_path / "enough").touch()
    where = {"MASTER_ADDR": "fd77::1", "GLOO_SOCKET_IFNAME": "", "PYTHONPATH": launching.python_path()}
    with Cluster(2) as cluster:
        for node in range(2):
            words = ["addr", "add", f"fd77::{node + 1}/64", "dev", "e0", "nodad"]
            subprocess.run(["ip", "-n", cluster.name(node), *words], check=True)
            gone = ["addr", "del", f"{cluster.address(node)}/24", "dev", "e0"]  # nothing can go the other way
            subprocess.run(["ip", "-n", cluster.name(node), *gone], check=True)
        command = [sys.executable, "-W", "error", SCRIPT, str(tmp_path)]
        more = {"stderr": subprocess.PIPE, "text": True}
        trained([cluster.start(node, command, environment=where, **more) for node in range(2)], tmp_path)


@pytest.mark.dear
@needs_ipv6
def test_two_processes_train_over_loopback(tmp_path):
    (tmp_path / "enough").touch()
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "error", SCRIPT, str(tmp_path)]
    processes = [
        subprocess.Popen(command, env=launching.environment(**base, RANK=str(rank)), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        trained(processes, tmp_path)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
