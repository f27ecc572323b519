"""`diagnose` derives findings from reports and measurements: the most severe first, each with a remedy."""

from __future__ import annotations

import copy
import itertools
import os
import re

import pytest

from paceline.launch.doctor import host_facts, host_probe, preflight
from paceline.launch.doctor.examine import rounds
from paceline.launch.doctor.findings import IN_THE_WAY, NOTED, SLOW, diagnose
from paceline.launch.hosts import Host, Way

WAY = Way()
GIB = 1 << 30


@pytest.fixture(scope="module")
def healthy():
    """The report of this machine, as the reports of two hosts without problems."""
    own = host_facts.collect(os.getcwd(), [])
    report = {**own, **host_probe.collect(os.getcwd()), "skew_s": 0.0, "skew_error_s": 0.001}
    report |= {"shared_bytes": 8 * GIB, "disk_bytes": 99 * GIB, "free_memory_bytes": 9 * GIB, "open_files": 4096}
    report |= {
        "gpus": 0,
        "infiniband": False,
        "ports": [32768, 60999],
        "free_ports": 28000,
        "own_name": {"name": "me", "address": "10.0.0.1"},
    }
    report["software"] = {
        "torch": "2",
        "instructions": "AVX2",
        "blas": "mkl",
        "mkl": "1",
        "onednn": "1",
        "gpus": [],
        "cuda": "",
    }
    hosts = {}
    for i, name in enumerate(("one", "two"), 1):
        address = f"10.0.0.{i}"
        card = {"addresses": [address], "mtu": 1500, "speed_mbit": 1000, "half_duplex": False, "wireless": False}
        place = {"meeting": "10.0.0.1", "address": address, "port": 40000 + i, "asked": "", "asked_port": 0}
        hosts[name] = copy.deepcopy({**report, "address": address, "cards": {"eth0": card}, "place": place})
    return own, hosts


PAIRS = [
    {"from": "one", "to": "two", "why": "", "latency_s": 1e-4, "bytes_per_s": 1.1e8},
    {"from": "two", "to": "one", "why": "", "latency_s": 1e-4, "bytes_per_s": 1.1e8},
]


def test_healthy_hosts_have_no_findings(healthy):
    assert diagnose(*healthy, PAIRS, WAY) == []


@pytest.mark.parametrize(
    ("changes", "weight", "expected"),
    [
        ({"skew_s": -3.0}, SLOW, r"clock is -3\.0 s from this one.*timedatectl set-ntp true"),
        ({"shared_bytes": GIB >> 4}, SLOW, r"0\.06 GiB free in /dev/shm.*--shm-size"),
        ({"shared_bytes": None}, SLOW, "no /dev/shm"),
        ({"disk_bytes": GIB}, SLOW, "1.00 GiB free on the disk"),
        ({"writable": False}, SLOW, "there is not writable"),
        ({"free_memory_bytes": GIB >> 1}, SLOW, "0.50 GiB of memory free"),
        ({"open_files": 256}, SLOW, "ulimit -n is 256"),
        ({"free_ports": 100}, SLOW, "only 100 ephemeral ports"),
        ({"infiniband": True, "locked_bytes": 65536}, NOTED, "ulimit -l is 64 KiB, with InfiniBand"),
        ({"gpus": 2}, SLOW, r"2 NVIDIA GPUs, and torch there \(no CUDA\) sees none"),
        (
            {"own_name": {"name": "box", "address": "127.0.1.1"}},
            SLOW,
            r"'box' resolves to loopback \(127\.0\.1\.1\).*as 10\.0\.0\.2,",
        ),
        ({"own_name": {"name": "box", "error": "unknown"}}, SLOW, r"'box' does not resolve \(unknown\)"),
        ({"software": {"late": 8.0}}, SLOW, "importing torch took more than 8 s"),
        ({"software": {"error": "ImportError: x"}}, IN_THE_WAY, "fails there: ImportError: x; reinstall"),
        ({"folder": False}, IN_THE_WAY, "the working directory .* is not there"),
        ({"cores": 99}, NOTED, r"numbers of cores differ \(one \d+, two 99\): batch sizes follow"),
        ({"fault": "no answer"}, IN_THE_WAY, "no answer"),
    ],
)
def test_a_fault_of_one_host_is_its_only_finding(healthy, changes, weight, expected):
    own, hosts = copy.deepcopy(healthy)
    hosts["two"] |= changes
    (finding,) = diagnose(own, hosts, PAIRS if "fault" not in changes else [], WAY)
    assert finding.weight == weight
    assert finding.who == ("all" if "differ" in expected else "two")
    assert re.search(expected, finding.what), finding.what


@pytest.mark.parametrize(
    ("changes", "weight", "expected"),
    [
        (
            {"why": "no answer within 2 s"},
            IN_THE_WAY,
            r"one does not reach two at 10\.0\.0\.2:40002 .*a one-way firewall",
        ),
        ({"bytes_per_s": 3e7}, SLOW, "240 Mbit/s, and its interface says 1000"),
        ({"stalled": "nothing more"}, IN_THE_WAY, r"do MTUs differ .*\(eth0 1500, eth0 1500\)"),
    ],
)
def test_a_fault_between_two_hosts_is_its_only_finding(healthy, changes, weight, expected):
    pairs = copy.deepcopy(PAIRS)
    pairs[0] |= changes
    (finding,) = diagnose(*healthy, pairs, WAY)
    assert finding.weight == weight
    assert re.search(expected, finding.what), finding.what


def test_cards_that_differ_are_noted(healthy):
    own, hosts = copy.deepcopy(healthy)
    hosts["two"]["cards"]["eth0"] |= {"mtu": 9000, "speed_mbit": 100, "wireless": True}
    found = diagnose(own, hosts, [], WAY)
    assert [finding.weight for finding in found] == [SLOW, NOTED, NOTED]
    assert "two: eth0 is wireless" in str(found[0])
    assert "MTUs differ (one 1500, two 9000)" in str(found[1])
    assert "speeds of interfaces, in Mbit/s, differ (one 1000, two 100)" in str(found[2])


def test_a_first_host_with_a_loopback_address_prevents_a_run(healthy):
    own, hosts = copy.deepcopy(healthy)
    hosts["one"]["address"] = "127.0.1.1"
    (finding,) = diagnose(own, hosts, PAIRS, WAY)
    assert finding.weight == IN_THE_WAY
    assert str(finding).startswith("one: it was reached at 127.0.1.1, a loopback address")


def test_the_most_severe_finding_comes_first(healthy):
    own, hosts = copy.deepcopy(healthy)
    hosts["one"] |= {"cores": 99, "open_files": 10}
    hosts["two"] |= {"folder": False}
    assert [finding.weight for finding in diagnose(own, hosts, PAIRS, WAY)] == [IN_THE_WAY, SLOW, NOTED]


def test_a_python_that_is_too_old_is_reported():
    words = preflight.ended(Host("one", "one"), Way(python="python3"), 1, "Python 3.6\n")
    assert words == "python3 there is Python 3.6, and 3.10 or newer is needed; name another with --python"


@pytest.mark.parametrize("count", range(9))
def test_rounds_hold_every_pair_once_and_no_host_twice_at_a_time(count):
    names = [str(i) for i in range(count)]
    turns = rounds(names)
    assert sorted(tuple(sorted(pair)) for turn in turns for pair in turn) == list(itertools.combinations(names, 2))
    for turn in turns:
        assert len({name for pair in turn for name in pair}) == 2 * len(turn)
    assert len(turns) == max(0, count - 1 + count % 2)


def test_a_connection_that_fails_in_both_directions_is_one_finding(healthy):
    pairs = [{**pair, "why": "no answer within 2 s"} for pair in PAIRS]
    (finding,) = diagnose(*healthy, pairs, WAY)
    assert finding.weight == IN_THE_WAY
    assert str(finding).startswith("one and two: one and two do not reach each other (no answer within 2 s); let TCP")
