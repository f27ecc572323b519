"""Every host is checked before anything starts; each that cannot take part is reported with a cause and a remedy."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time

import pytest

from needs import needs
from paceline.launch import output as lines_
from paceline.launch.doctor import host_facts
from paceline.launch.doctor.preflight import check, faults, unreachable
from paceline.launch.hosts import Host, Way, configurations, parse
from paceline.launch.output import Lines
from sshd import Sshd, unavailable

pytestmark = pytest.mark.long

needs_sshd = needs(sshd=unavailable())


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


@needs_sshd
def test_every_host_that_cannot_be_reached_has_its_own_line_within_ten_seconds(sshd, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    hosts = "one,stranger,changed,locked,asking,either,shut,silent,nowhere"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "-H", hosts, "--ssh", sshd.ssh, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )
    took_s = time.monotonic() - start
    head, *lines = done.stderr.splitlines()
    assert head == "paceline: nothing was started, because not every host can take part:"
    wanted = {
        "stranger": r"its host key is not known here; connect once by hand and compare it: ssh stranger",
        "changed": r"its host key is not the one in known_hosts: .*ssh-keygen -R changed",
        "locked": r"it accepts none of your keys \(Permission denied \(publickey\)\.?\); .*ssh-copy-id locked",
        "asking": r"it asks for a password \(Permission denied \(password\)\.?\), and a password cannot be typed, "
        r"since ssh runs without a terminal \(BatchMode\); set PubkeyAuthentication yes .*ssh-copy-id asking",
        "either": r"it accepts none of your keys \(.*\), and a password cannot be typed, .*; .*ssh-copy-id either",
        "shut": r"no ssh server listens there \(.*port \d+: Connection refused\); start sshd",
        "silent": r"no answer.*; is it on, and does its firewall let ssh in\?",
        "nowhere": r"no machine of that name is known here \(.*nowhere\.invalid.*\); check the name",
    }
    assert len(lines) == len(wanted), done.stderr
    for line, (name, expected) in zip(lines, wanted.items(), strict=True):
        assert re.match(rf"- {name}: {expected}", line), line
    assert done.returncode == 2
    assert took_s < 10 + 2, "besides the start of Python"
    assert not (tmp_path / "started").exists()


@needs_sshd
def test_every_host_reports_what_it_lacks(sshd, tmp_path):
    (tmp_path / "here.py").touch()
    with pytest.raises(ValueError, match="not every host") as raised:
        check(parse("one,two"), Way(sshd.ssh, folder=str(tmp_path)), ["here.py", "absent.py"])
    lines = [f"- {name}: absent.py is not in {tmp_path} there; copy it there, or add --send" for name in ("one", "two")]
    assert str(raised.value).splitlines()[1:] == lines
    missing = f"the working directory {tmp_path}/not is not there; make it there"
    with pytest.raises(ValueError, match=f"- one: {missing}.*"):
        check(parse("one"), Way(sshd.ssh, folder=f"{tmp_path}/not"), ["here.py"])


@needs_sshd
def test_another_interpreter_reports_what_it_lacks(sshd, tmp_path):
    with pytest.raises(ValueError, match=r"- one: /no/python did not run there \(exit code 127: .*--python"):
        check(parse("one"), Way(sshd.ssh, python="/no/python"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    bare = Way(sshd.ssh, python=str(tmp_path / "bare" / "bin" / "python"))
    own = host_facts.collect(".", [])["versions"]["torch"].partition("+")[0]
    with pytest.raises(ValueError, match=re.escape(f"- one: torch is not installed for {bare.python} there, and here")):
        check(parse("one"), bare)
    (packages,) = tmp_path.glob("bare/lib/python*/site-packages")
    for name in ("torch", "paceline"):
        (packages / f"{name}-0.0.1.dist-info").mkdir()
        (packages / f"{name}-0.0.1.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 0.0.1\n")
    with pytest.raises(ValueError, match=re.escape(f"- one: torch is 0.0.1 there and {own} here; install it there: ")):
        check(parse("one"), bare)


@needs_sshd
def test_the_rendezvous_is_where_ssh_reached_the_first_host_by_default(sshd):
    assert check(parse("one,two"), Way(sshd.ssh))[0] == "127.0.0.1"
    host, port = check(parse("one"), Way(sshd.ssh), address="10.1.2.3")
    assert host == "10.1.2.3"
    assert 0 < port < 65536


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.1", "10.0.0.2"], None),
        (["127.0.0.1"], None),
        (["127.0.0.1", "127.0.0.1"], None),
        (["10.0.0.1", "127.0.0.1"], None),
        (["127.0.1.1", "10.0.0.2"], r"reached at 127\.0\.1\.1, a loopback address.*--address"),
        (["fe80::1%eth0", "10.0.0.2"], r"reached at fe80::1%eth0, a link-local address.*--address"),
        (["fd77::1", "fd77::2"], None),
        (["", ""], r"the address at which ssh reached it is unknown .*give it with --address"),
        (["::1", "fd77::2"], r"reached at ::1, a loopback address.*--address"),
    ],
)
def test_an_address_that_the_others_cannot_reach_is_reported(addresses, expected):
    problem = unreachable([{"address": address} for address in addresses])
    assert problem is None if expected is None else re.search(expected, problem)


@pytest.mark.parametrize("words", [["train"], ["run", __file__]])
def test_one_process_of_several_does_not_start_hosts(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", words[0], "-H", "one", "--out", str(tmp_path / "run"), *words[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", "PACELINE_SSH": "false"},
    )
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("paceline: -H starts every node from one process, and a launcher started this one")
    assert not (tmp_path / "run").exists()


def test_a_machine_without_ssh_client_is_reported():
    with pytest.raises(ValueError, match="- one: there is no 'no-such-ssh' on this machine; install OpenSSH"):
        check(parse("one"), Way("no-such-ssh -v"))


def test_an_invalid_ssh_command_is_reported():
    with pytest.raises(ValueError, match='--ssh "ssh \'x" cannot be split into arguments: No closing quotation'):
        Way("ssh 'x")
    with pytest.raises(ValueError, match="--ssh needs a command, as in 'ssh -F file', and is empty"):
        Way(" ")


def test_a_script_that_differs_is_reported(tmp_path):
    (tmp_path / "a.py").write_text("1")
    own = host_facts.collect(str(tmp_path), ["a.py"])
    assert faults(own, own, Way()) == []
    (tmp_path / "a.py").write_text("2")
    theirs = host_facts.collect(str(tmp_path), ["a.py"])
    assert faults(own, theirs, Way()) == ["a.py there differs from the one here; copy it there again, or add --send"]


def test_hosts_are_read_with_users_and_slots():
    assert parse("a, me@b.example:2") == [Host("a", "a"), Host("b.example", "me@b.example", 2)]
    ours = [Host("fd00::1", "fd00::1"), Host("::1", "me@::1", 2), Host("fe80::2%eth0", "fe80::2%eth0")]
    assert parse("fd00::1,me@[::1]:2,fe80::2%eth0") == ours
    assert parse(",".join(host.target for host in ours)) == [dataclasses.replace(host, slots=None) for host in ours]
    assert configurations(parse("a,b"), "") == configurations(parse("a:1,b"), "") == ["", ""]
    assert configurations(parse("a:3,b:3"), "") == configurations(parse("a,b"), "processes:3") == ["processes:3"] * 2


def test_every_host_has_the_configuration_of_its_slots_or_the_plan():
    hosts = parse("a:4,b:2,c")
    assert configurations(hosts, "") == ["processes:4", "processes:2", ""]
    assert configurations(hosts, "threads+bf16") == ["threads:4+bf16", "threads:2+bf16", "threads+bf16"]
    planned = {"a": "processes:4/pipeline:2"}
    assert configurations(hosts, "threads:2", planned) == ["processes:4/pipeline:2", "threads:2", "threads:2"]
    hybrid = ["processes:4/pipeline:2+bf16", "processes:2/pipeline:2+bf16", "processes/pipeline:2+bf16"]
    assert configurations(hosts, "processes/pipeline:2+bf16") == hybrid
    assert configurations(parse("a:1"), "threads:4") == ["threads:4"], "one process"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "'' is no host name; accepted: hosts as ssh knows them"),
        ("a,,b", "-H a,,b: '' is no host name"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is no host name"),
        ("a b", "'a b' is no host name"),
        ("a:0,b:x", "'a:0' asks for '0' processes.*'b:x' asks for 'x' processes"),
        ("fe80::2:x,[a]:2,a:b:c", r"'fe80::2:x' is no host name; '\[a\]:2' is no host name; 'a:b:c' is no host name"),
        ("[::1]:0,[::1]x", r"'\[::1\]:0' asks for '0' processes.*'\[::1\]x' is no host name"),
        ("::1,me@[::1]", r"::1 is named twice; a host with two processes is \[::1\]:2"),
        ("a:2222", "'a:2222' asks for '2222' processes; give a whole number .* 1024 .*, and a port in ~/.ssh/config"),
        ("@a,%e@c,a:²", "'@a' is no host name; '%e@c' is no host name; 'a:²' asks for '²' processes"),
        ("a,b,me@a", "a is named twice; a host with two processes is a:2"),
    ],
)
def test_an_invalid_host_is_reported(text, expected):
    with pytest.raises(ValueError, match=expected):
        parse(text)


@pytest.mark.parametrize(
    ("hosts", "requested", "expected"),
    [
        ("a:2,b", "threads:4", "^-H asks for 2 on a, 'threads:4' for another number; leave one out$"),
        ("a:2,b:3", "sequential", "for 2 on a, 'sequential'.*for 3 on b, 'sequential'"),
    ],
)
def test_slots_that_contradict_are_reported(hosts, requested, expected):
    with pytest.raises(ValueError, match=expected):
        configurations(parse(hosts), requested)
    assert configurations(parse("a"), "", {"a": "threads:1", "b": "threads:2"}) == ["threads:1"], "one of the plan"
    with pytest.raises(ValueError, match="plan is for elsewhere, and -H names a, b; name these"):
        configurations(parse("a,b"), "", {"elsewhere": "threads:2"})


NODE = "import sys; from paceline.launch import local, node_agent; local.GRACE_S = 0.5; sys.exit(node_agent.main())"


@pytest.mark.parametrize(("then", "code"), [("0\n", 137), ("15\n0\n", 143), ("", 143)], ids=["failed", "stop", "gone"])
def test_a_node_passes_signals_on_and_kills_processes_that_ignore_them(then, code, tmp_path):
    """After a failure of another node, a signal, or the launcher's end, a script that ignores signals is killed."""
    stubborn = "import os, signal, time; signal.signal(15, signal.SIG_IGN); open('{}', 'w'); time.sleep(60)"
    words = [sys.executable, "-c", stubborn.format(tmp_path / "up")]
    order = {"node": 1, "sizes": [1, 1], "host": "h", "port": 1, "engine": "", "folder": "/", "environment": {}}
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", NODE], **pipes) as process:
        try:
            process.stdin.write(json.dumps({**order, "command": words}) + "\n")
            process.stdin.flush()
            end = time.monotonic() + 20
            while not (tmp_path / "up").exists():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.02)
            start = time.monotonic()
            if then:
                process.stdin.write(then)
                process.stdin.flush()
            else:
                process.stdin.close()
            process.wait(20)
            took_s = time.monotonic() - start
            errors = process.stderr.read()
        finally:
            process.kill()
    assert process.returncode == code, errors
    assert 0.4 < took_s < 5
    assert "1 processes did not end within" in errors


def test_one_ctrl_c_gives_a_limited_time():
    """Story: there was no limit."""
    start = (
        "import sys; from paceline.launch import local; local.TIMEOUT_S = 0.5; "
        "sys.exit(local.start([sys.executable, '-c', sys.argv[1]], ''))"
    )
    stubborn = "import signal, time; signal.signal(2, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", start, stubborn], **pipes) as process:
        try:
            assert process.stdout.readline() == "up\n"
            process.send_signal(2)
            process.wait(20)
        finally:
            process.kill()
        assert process.returncode == 130
        assert "1 processes did not end within 0 s; killed" in process.stderr.read()


def test_a_line_of_any_length_passes_in_linear_time(tmp_path):
    sent = b"first\n\n" + b"\xff" * 50_000_000 + b"\nlast"
    (tmp_path / "sent").write_bytes(sent)
    start = time.monotonic()
    with open(tmp_path / "sent", "rb") as source, open(tmp_path / "out", "wb") as out:
        lines = Lines("one", source.fileno(), out)
        while lines.pass_on():
            pass
    took_s = time.monotonic() - start
    assert (tmp_path / "out").read_bytes() == b"[one] " + sent.replace(b"\n", b"\n[one] ") + b"\n"
    assert lines.last == "last"
    assert took_s < 5


def test_a_progress_bar_is_shown_now_and_then(tmp_path, monkeypatch):
    """Story: a bar ends its line only when it is complete, and nothing was shown until then."""
    source, sink = os.pipe()
    with open(source, "rb") as source, open(sink, "wb", 0) as sink, open(tmp_path / "out", "wb") as out:
        bars = Lines("one", source.fileno(), out)

        def shown(text):
            sink.write(text)
            bars.pass_on()
            return (tmp_path / "out").read_text()

        assert shown(b"\r 1%\r 2%\r 3%") == "[one]  2%\n"
        assert shown(b"\r 4%\r 5%") == "[one]  2%\n", "once in BAR_S"
        monkeypatch.setattr(lines_, "BAR_S", 0.0)
        assert shown(b"\r 6%") == "[one]  2%\n[one]  5%\n"
        assert shown(b"\n") == "[one]  2%\n[one]  5%\n[one]  6%\n"


def test_a_node_without_orders_reports_which_command_starts_it():
    done = subprocess.run(
        [sys.executable, "-m", "paceline.launch.node_agent"],
        input="",
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: stdin ended before the orders")
