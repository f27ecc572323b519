"""`paceline doctor` reports each problem of real hosts in a line within ten seconds, and leaves no processes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from machines import Machines, needs_machines, refuse_calls
from needs import needs
from paceline.cli.doctor import TITLES
from paceline.launch.doctor import host_probe
from paceline.launch.doctor.examine import examine
from paceline.launch.doctor.findings import IN_THE_WAY, SLOW
from paceline.launch.hosts import Way, parse
from paceline_bench.chaos.hosts import TURN
from sshd import Sshd, unavailable

pytestmark = pytest.mark.long

LIMIT_S = 10.0
HURRIED, BUSY = "no time was left for ", "busy with other tests: no time was left for healthy hosts"
START_S = 5.0  # for the start of Python, and the command line's imports
OUR_HOMES = {os.environ["XDG_CACHE_HOME"]}  # of the processes that this one starts here and on hosts
needs_sshd = needs(sshd=unavailable())


def doctor(*words, code=0, **more):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )
    took_s = time.monotonic() - start
    if HURRIED in done.stdout and is_busy():
        pytest.skip(BUSY)
    assert done.returncode == code, done.stdout + done.stderr
    if not is_busy():  # on a slower machine the start of Python alone may take longer
        assert took_s < LIMIT_S + START_S
    wait_until_nothing_is_left()
    return done.stdout


def wait_until_nothing_is_left(limit_s=5.0):
    """Waits for the processes that these tests start, here or on a host, by a text in their command lines."""
    end = time.monotonic() + limit_s
    while left := [
        pid
        for pid in Path("/proc").glob("[0-9]*")
        if b"exec(source.read(int(source.readline())))" in read(pid, "cmdline")
        and any(home.encode() in read(pid, "environ") for home in OUR_HOMES)
    ]:
        assert time.monotonic() < end, [read(pid, "cmdline") for pid in left]
        time.sleep(0.05)


def read(pid, what):
    try:
        return (pid / what).read_bytes()
    except OSError:
        return b""


def is_busy():
    """Whether the machine seems busy with other tests: then healthy hosts may miss their deadlines as well."""
    return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)


def quiet(_):
    pass


def examined(hosts, way):
    found = examine(parse(hosts), way, show=quiet)
    if is_busy() and any(HURRIED in str(finding) for finding in found.findings):
        pytest.skip(BUSY)
    return found


def in_the_way(found):
    return [str(finding) for finding in found.findings if finding.weight == IN_THE_WAY]


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        OUR_HOMES.add(str(server.folder))
        yield server


def test_this_machine_alone():
    output = json.loads(doctor("--json"))
    assert output["ready"]
    ((name, report),) = output["hosts"].items()
    assert name == socket.gethostname()
    software = report["software"]
    if "late" not in software:  # on a machine that is busy with other tests
        assert report["versions"]["torch"] == software["torch"]
        assert software["instructions"]
    assert 1 <= report["cores"] <= report["cores_of_machine"]
    assert 0 < report["free_ports"] <= report["ports"][1] - report["ports"][0] + 1
    assert report["cards"]["lo"]["addresses"][0] == "127.0.0.1"
    (pair,) = output["pairs"]
    assert pair["from"] == pair["to"] == name
    assert 0 < pair["latency_s"] < 0.1
    assert pair["bytes_per_s"] > 10e6


@pytest.mark.dear
@needs_sshd
def test_every_host_that_cannot_be_reached_has_a_line_and_the_others_are_measured(sshd):
    output = doctor(
        "-H", "one,stranger,two,changed,locked,asking,either,shut,silent,hung,nowhere", "--ssh", sshd.ssh, code=1
    )
    wanted = {
        "stranger": r"its host key is not known here; connect once by hand and compare it: ssh stranger",
        "changed": r"its host key is not the one in known_hosts: .*ssh-keygen -R changed",
        "locked": r"it accepts none of your keys \(Permission denied \(publickey\)\.?\); .*ssh-copy-id locked",
        "asking": r"it asks for a password \(Permission denied \(password\)\.?\), and a password cannot be typed, "
        r"since ssh runs without a terminal \(BatchMode\); set PubkeyAuthentication yes .*ssh-copy-id asking",
        "either": r"it accepts none of your keys \(.*\), and a password cannot be typed, .*; .*ssh-copy-id either",
        "shut": r"no ssh server listens there \(.*port \d+: Connection refused\); start sshd",
        "silent": r"no answer.*; is it on, and does its firewall let ssh in\?",
        "hung": r"no answer within 8\.\d s; is it on, and does its firewall let ssh in\?",
        "nowhere": r"no machine of that name is known here \(.*nowhere\.invalid.*\); check the name",
    }
    head, *lines = output.splitlines()
    assert head == "problems that prevent a run:"
    for line, (name, why) in zip(lines, wanted.items(), strict=False):
        assert re.match(rf"- {name}: {why}", line), line
    for name in ("one", "two"):
        assert re.search(rf"^{name}: Python 3.*, paceline .*, torch .* cores.*, clock [+-]\d+\.\d ms ± ", output, re.M)
        other = "two" if name == "one" else "one"
        assert re.search(rf"^{name} -> {other}: \d+\.\d+ ms, \d+\.\d [MG]bit/s$", output, re.M)
    assert output.splitlines()[-1] == "9 problems prevent a run"


@pytest.mark.dear
@needs_sshd
def test_a_port_in_use_is_reported(sshd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        output = doctor("-H", "one,two", "--ssh", sshd.ssh, "--port", str(port), code=1)
    assert f"- one: port {port} is in use at 127.0.0.1 (`ss -ltnp` names the process); end it, or give" in output
    assert "- two:" not in output.partition(TITLES[SLOW])[0]
    assert output.splitlines()[-1] == "one problem prevents a run"


@needs_sshd
def test_a_host_without_paceline_and_with_another_torch_is_reported(sshd, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    (packages,) = tmp_path.glob("bare/lib/python*/site-packages")
    (packages / "torch-0.0.1.dist-info").mkdir()
    (packages / "torch-0.0.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.0.1\n")
    bare = tmp_path / "bare" / "bin" / "python"
    noisy = tmp_path / "bare" / "bin" / "noisy"  # the output of a login must not matter
    noisy.write_text(f'#!/bin/sh\necho "welcome to this machine"\nunset PYTHONPATH\nexec {bare} "$@"\n')
    noisy.chmod(0o755)
    found = examined("one,two", Way(sshd.ssh, str(noisy), str(tmp_path)))
    lines = in_the_way(found)
    for name in ("one", "two"):
        assert any(line.startswith(f"{name}: paceline is not installed for ") for line in lines), lines
        assert any(line.startswith(f"{name}: torch is 0.0.1 there and ") for line in lines), lines
    assert len(lines) == 4
    assert all(pair["bytes_per_s"] > 10e6 for pair in found.pairs), "links need no paceline there"
    wait_until_nothing_is_left()


@needs_sshd
def test_a_torch_that_cannot_be_imported_is_reported(sshd, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={tmp_path}:$PYTHONPATH\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = examined("one", Way(sshd.ssh, str(python)))
    (line,) = in_the_way(found)
    assert re.match(
        r"one: `import torch, paceline` fails there: ImportError: libtorch\.so: cannot open .*; reinstall", line
    )


@pytest.mark.dear
@needs_sshd
def test_the_examination_continues_without_a_late_host_and_reports_it(sshd, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.launch.doctor.examine.COLLECT_S", 3.0)
    client = tmp_path / "client"
    client.write_text(f'#!/bin/sh\ncase "$*" in *" slow "*) sleep 4;; esac\nexec {sshd.ssh} "$@"\n')
    client.chmod(0o755)
    found = examine(parse("one,two,slow"), Way(str(client)), show=quiet)
    assert found.took_s < LIMIT_S
    assert any("the connections to and from slow, which answered late; ask" in line for line in in_the_way(found))
    assert not any("slow" in (pair["from"], pair["to"]) for pair in found.pairs)
    if not is_busy():
        assert found.hosts["slow"]["cores"] == found.hosts["one"]["cores"]
        assert {(pair["from"], pair["to"]) for pair in found.pairs} == {("one", "two"), ("two", "one")}


@needs_sshd
def test_a_clock_that_is_off_is_reported(sshd, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\nright = time.time\ntime.time = lambda: right() - 7.5")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={tmp_path}:$PYTHONPATH\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = examine(parse("one"), Way(sshd.ssh, str(python)), show=quiet)
    report = found.hosts["one"]
    assert abs(report["skew_s"] + 7.5) <= report["skew_error_s"] + 0.01
    (line,) = (str(finding) for finding in found.findings if "its clock" in finding.what)
    assert re.match(r"one: its clock is -7\.\d s from this one, so records disagree; there: timedatectl set-ntp", line)


@needs_sshd
def test_a_missing_interpreter_is_reported(sshd):
    found = examined("one", Way(sshd.ssh, python="/no/python"))
    assert re.match(r"one: /no/python did not run there \(exit code 127: .*--python", in_the_way(found)[0])


def test_a_missing_ssh_client_is_reported():
    found = examined("one,two", Way("no-such-ssh -v"))
    assert [line.partition(" is no ")[0] for line in in_the_way(found)] == ["one: there", "two: there"]


def test_an_ssh_client_that_cannot_be_started_is_reported(tmp_path):
    (tmp_path / "client").touch()
    found = examined("one,two", Way(str(tmp_path / "client")))
    assert all("client cannot be started here: Permission denied" in line for line in in_the_way(found)[:2])


@pytest.mark.dear
@needs_sshd
def test_an_unknown_interface_is_reported(sshd, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nic7")
    found = examined("one", Way(sshd.ssh))
    assert re.match(
        r"one: GLOO_SOCKET_IFNAME='nic7' is no interface there .* there are: .*\blo\b", in_the_way(found)[0]
    )


def test_nccl_s_interface_is_used_as_in_a_run():
    """Story: the doctor ignored it, and tested another route than the run used."""
    names = "lo", "=lo", "=nosuch", ""
    where = {name: host_probe.find_addresses("127.0.0.1", False, name).get("address") for name in names}
    assert set(where.values()) == {"127.0.0.1"}
    assert "error" in host_probe.find_addresses("127.0.0.1", False, "nosuch")
    away = host_probe.find_addresses("10.255.255.1", False, "=lo")
    assert away == {"meeting": "10.255.255.1", "address": "127.0.0.1"}


@pytest.mark.dear
@needs_sshd
def test_nccl_s_pattern_is_no_interface_that_is_missing(sshd, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=nosuch")
    assert not any("nosuch" in line for line in in_the_way(examined("one", Way(sshd.ssh))))


@pytest.fixture(scope="module")
def two_machines():
    with Machines(2, rate="100mbit") as two:
        OUR_HOMES.add(str(two.folder))
        yield two


@needs_machines
def test_networks_of_machines_are_there_one_at_a_time(two_machines):
    """Story: two test processes each created a network with the same addresses, and reached each other's machines."""
    with open(TURN) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@needs_machines
def test_machines_in_a_network_are_measured_and_names_that_resolve_to_loopback_are_reported(two_machines):
    output = doctor("-H", "node0,node1", "--ssh", two_machines.ssh, "--json")
    found = json.loads(output)
    assert found["ready"]
    for node, report in enumerate(found["hosts"].values()):
        assert report["host"] == f"node{node}"
        assert report["place"]["address"] == f"10.77.0.{node + 1}"
        assert report["cards"]["e0"]["mtu"] == 1500
        assert abs(report["skew_s"]) <= report["skew_error_s"] + 0.01, "one clock under both"
        trap = (
            rf"own name 'node{node}' resolves to loopback \(127\.0\.1\.1\): .*as 10\.77\.0\.{node + 1}, in /etc/hosts"
        )
        assert any(f["who"] == f"node{node}" and re.search(trap, f["what"]) for f in found["findings"])
    assert {(pair["from"], pair["to"]) for pair in found["pairs"]} == {("node0", "node1"), ("node1", "node0")}
    for pair in found["pairs"]:
        assert 60e6 < pair["bytes_per_s"] * 8 < 110e6
        assert pair["latency_s"] < 0.05


@pytest.mark.dear
@needs_machines
def test_a_rendezvous_name_that_resolves_to_loopback_prevents_a_run(two_machines):
    output = doctor("-H", "node0,node1", "--ssh", two_machines.ssh, "--address", "node0", code=1)
    line = "- node0: 'node0' resolves to 127.0.1.1 there, a loopback address, which no other machine reaches; give"
    assert line in output
    assert output.splitlines()[-1] == "one problem prevents a run"


@pytest.mark.dear
@needs_machines
@pytest.mark.parametrize("named", ["lo", "=lo"])
def test_nccl_s_interface_is_sent_to_every_host(two_machines, monkeypatch, named):
    """A run would use it: here no connection is tested, since all names resolve to loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", named)
    found = json.loads(doctor("-H", "node0,node1", "--ssh", two_machines.ssh, "--json", code=1))
    assert [report["place"]["address"] for report in found["hosts"].values()] == ["127.0.0.1"] * 2


@needs_machines
def test_a_one_way_firewall_is_reported_with_names_and_direction(two_machines):
    with refuse_calls(two_machines.cluster, 0, caller=1):
        output = doctor("-H", "node0,node1", "--ssh", two_machines.ssh, code=1)
        line = (
            r"^- node0: node1 does not reach node0 at 10\.77\.0\.1:\d+ \(no answer within 2 s\), and node0 reaches "
            r"node1: a one-way firewall; let TCP ports \d+ to \d+ and MASTER_PORT in from 10\.77\.0\.2: "
        )
        assert re.search(line, output, re.M), output
        assert output.splitlines()[-1] == "one problem prevents a run"


@pytest.mark.dear
@needs_machines
def test_a_silent_host_a_hung_login_and_a_firewall_together_are_reported_in_time(two_machines, tmp_path):
    """Story: the timeouts were added up, to fifteen seconds and more."""
    hung = tmp_path / "hung"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", hung], check=True, timeout=20)
    known = two_machines.folder / "authorized"
    known.write_text(f'{known.read_text()}command="exec cat > /dev/null" {hung.with_suffix(".pub").read_text()}')
    with socket.create_server(("127.0.0.1", 0)) as silent, refuse_calls(two_machines.cluster, 0, caller=1):
        (tmp_path / "config").write_text(
            f"Host silent\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n"
            f"Host hung\n  HostName {two_machines.cluster.address(1)}\n  IdentityFile {hung}\n"
            f"{(two_machines.folder / 'config').read_text()}"
        )
        way = Way(f"ssh -F {tmp_path / 'config'}")
        found = examine(parse("node0,silent,hung,node1"), way, show=quiet)
    assert found.took_s < LIMIT_S
    wait_until_nothing_is_left()
    lines = in_the_way(found)
    wanted = [
        "silent: no answer",
        "hung: no answer within 8",
        "node0: node1 does not reach node0 at .* one-way firewall",
    ]
    if any(HURRIED in line for line in lines) and is_busy():
        wanted, lines = wanted[:2], [line for line in lines if HURRIED not in line]
    assert len(lines) == len(wanted), lines
    for line, expected in zip(lines, wanted, strict=True):
        assert re.match(expected, line), lines
