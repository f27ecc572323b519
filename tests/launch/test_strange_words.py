"""Whatever a host sends, commands end in time, report it in a line, and keep control sequences from the terminal."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from near import ON, Near
from paceline import cli
from paceline.launch import ssh
from paceline.launch.child_processes import MAX_BYTES, kill, received
from paceline.launch.deploy import snapshot
from paceline.launch.deploy.send import send
from paceline.launch.doctor import examine
from paceline.launch.doctor import preflight as checking
from paceline.launch.doctor.preflight import check
from paceline.launch.doctor.remote_session import RemoteSession
from paceline.launch.hosts import parse
from paceline.launch.node_agent import STARTED
from paceline.launch.output import Lines, shown

ENDLESS = {"lines": "yes", "one line": "cat /dev/zero", "complaints": "yes >&2"}


@pytest.fixture
def near(tmp_path):
    return Near(tmp_path)


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs `paceline` with these arguments here; returns its exit code, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capfd.readouterr()

    return call


@pytest.mark.parametrize("login", ENDLESS.values(), ids=ENDLESS)
def test_a_host_that_writes_without_end_has_a_time_limit(near, login, monkeypatch):
    """Story: the deadline was checked only while a host was silent, so that the doctor read without end."""
    monkeypatch.setattr(checking, "LIMIT_S", 0.5)
    way = near(login)
    with pytest.raises(ValueError, match=r"- a: no answer within 0\.5 s; is it on"):
        check(parse("a"), way)
    visit = RemoteSession(*parse("a"), way)
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s; is it on"):
            visit.query("clock", 0.5)
        assert len(visit._received) <= MAX_BYTES
    finally:
        visit.close(1.0)


def test_the_last_bytes_of_an_output_are_kept():
    words = ["sh", "-c", "head -c 5000000 /dev/zero; echo end; echo oh >&2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, **pipes) as process:
        try:
            output, errors = received(process, 30.0)
        finally:
            kill(process)
    assert (len(output), output[-5:], errors) == (MAX_BYTES, "\0end\n", "oh\n")


@pytest.mark.parametrize("answer", ["", "{}", "5", "[1]", "hello", "[" * 100_000, '{"folder": 1}'])
def test_an_invalid_answer_is_reported(near, answer, work):
    way = near(f"cat <<'X'\npaceline doctor: {answer}\nX\ncat > /dev/null")
    visit = RemoteSession(*parse("a"), way)
    try:
        if answer not in ("{}", '{"folder": 1}'):
            with pytest.raises(ConnectionError, match=r"it answered .*, which is no answer of paceline"):
                visit.query("tell", 10.0)
    finally:
        visit.close(1.0)
    way = near(f"cat <<'X'\n{answer}\nX\ncat > /dev/null")
    with pytest.raises(ValueError, match=r"- a: .* answered .*, which is no answer of Python; name another "):
        check(parse("a"), way)
    way = near(f"cat <<'X'\n{answer}\nX")
    with pytest.raises(ValueError, match="- a: the connection failed after"):
        send(parse("a"), way, snapshot.take(work)[0])


@pytest.fixture
def work(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("import json, os\nprint(json.__file__ != 'mine', os.getcwd())")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(folder)
    return folder


def test_a_host_that_requests_files_it_was_not_offered_gets_nothing(near, work):
    way = near("""echo '{"missing": [0, 7]}'; cat > got""")
    with pytest.raises(ValueError, match="- a: it requests files that it was not offered"):
        send(parse("a"), way, snapshot.take(work)[0])
    assert b"os.getcwd" not in (near.home / "got").read_bytes()


def test_a_login_may_greet_and_its_home_may_hold_files_named_as_pythons(near, work, run):
    """Story: with output from .bashrc --send reported a failed connection; json.py in the home folder was imported."""
    for name in ("json", "socket", "hashlib", "paceline"):
        (near.home / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    way = near(f"echo welcome\n{ON}")
    code, output, errors = run("run", "-H", "a", "--ssh", way.ssh, "--send", "train.py")
    assert code == 0, errors
    assert f"[a] True {near.home}/paceline/sent/trees/" in output
    visit = RemoteSession(*parse("a"), way)
    try:
        assert visit.query("clock", 20.0) > 1e9
    finally:
        visit.close(1.0)


def test_text_of_a_host_does_not_control_the_terminal(near, work, run):
    """The script's own output is unchanged; messages about a host contain no control sequences."""
    way = near("printf '\\033]0;mine\\007\\033[2Jnot \\302\\233today\\r\\n' >&2\nexit 255")
    code, _, errors = run("run", "-H", "a", "--ssh", way.ssh, "train.py")
    assert code == 2
    assert errors.endswith("\n- a: ssh could not reach it: not today\n")
    (work / "train.py").write_text("import sys\nprint('\\033[31moh', file=sys.stderr)\nsys.exit(3)")
    code, _, errors = run("run", "-H", "a", "--ssh", near().ssh, "train.py")
    assert (code, errors) == (3, "[a] \x1b[31moh\npaceline: a failed first, with exit code 3: oh\n")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain\ttext\nand \u00e9", "plain\ttext\nand \u00e9"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]52;c;aGk=\x1b\\clip", "clip"),
        ("\x1b]0;title", ""),
        ("a\x1bcb\x9b2Jd\x00\x08\r\x7f", "acb2Jd"),
    ],
)
def test_what_is_shown_is_text(text, left):
    assert shown(text) == left


def test_a_folder_may_be_called_as_markup_is(work, run):
    (work / "train.py").write_text("pass")
    code, output, errors = run("run", "--plan", "sequential", "--out", "x[/b]", "train.py")
    assert (code, output) == (0, "run: x[/b]\n"), errors
    assert os.path.isdir("x[/b]")


def test_arguments_of_every_kind_arrive_unchanged(near, work, run):
    words = ["a b", "it's", '"', "$HOME `id` \\", "line\nline", "*", "", "-x", "\u00e9\u4e2d", ";exit 1", "\udcff"]
    folder = work / 'it\'s a "folder" $HOME é'
    folder.mkdir()
    os.chdir(folder)
    (folder / "a script.py").write_text("import sys, os\nprint(ascii(sys.argv[1:]), ascii(os.getcwd()))")

    code, output, errors = run("run", "-H", "a", "--ssh", near().ssh, "a script.py", *words)
    assert (code, output) == (0, f"[a] {words!a} {str(folder)!a}\n"), errors


def test_a_terminated_doctor_leaves_no_processes(near):
    """Story: SIGTERM ended it before it had ended the processes that it had started."""
    way = near("echo $$ > pid.part\nmv pid.part pid\nsleep 60")
    words = [sys.executable, "-m", "paceline", "doctor", "-H", "a", "--ssh", way.ssh]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while not (near.home / "pid").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 143
    assert not os.path.exists(f"/proc/{(near.home / 'pid').read_text().strip()}")


def test_a_session_that_opens_while_the_doctor_ends_is_closed(near, monkeypatch):
    """Story: a process that was starting at SIGTERM stayed, since the doctor ended only those that had started."""
    exam, begun, ended = examine._HostExam(parse("a"), near("echo $$ > pid\nexec sleep 60")), threading.Event(), []

    def slow(*given):
        begun.set()
        assert closing.wait(60)
        ended.append(visit := RemoteSession(*given))
        return visit

    closing, shutdown = threading.Event(), exam._pool.shutdown
    monkeypatch.setattr(examine, "RemoteSession", slow)
    # by then it has closed the sessions that were open
    monkeypatch.setattr(exam._pool, "shutdown", lambda: (closing.set(), shutdown()))
    coming = threading.Thread(target=exam.collect)
    coming.start()
    assert begun.wait(60)
    exam.close()
    coming.join(60)
    assert ended[0]._process.returncode is not None
    assert "ended" in exam.reports["a"]["fault"]


def test_the_output_of_a_login_is_separated_from_the_mark_of_the_start(tmp_path):
    (tmp_path / "sent").write_bytes(b"welcome\nno end" + STARTED + b"\nfirst\n" + STARTED + b"\n")
    with open(tmp_path / "sent", "rb") as source, open(tmp_path / "out", "wb") as out:
        lines = Lines("a", source.fileno(), out, mark=STARTED)
        assert not lines.marked
        while lines.pass_on():
            pass
    assert lines.marked
    assert (tmp_path / "out").read_bytes() == b"[a] welcome\n[a] no end\n[a] first\n[a] " + STARTED + b"\n"


def test_a_node_whose_output_is_closed_can_save(near, monkeypatch, tmp_path):
    """`tee` ends at the Ctrl-C that ends the run. The request to the node is longer than a pipe's buffer."""
    saved, script = tmp_path / "saved", tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        f"def save(*_):\n    print('saving', flush=True)\n    Path({str(saved)!r}).write_text(os.environ['LONG'])\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\nwhile True:\n    print('line', flush=True)\n    time.sleep(0.01)"
    )
    source, sink = os.pipe()
    os.close(source)
    with open(sink, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        code = ssh.start(parse("a"), ssh.Orders([str(script)], [""], near(), {"LONG": "x" * 120_000}), ("127.0.0.1", 9))
    assert code == 143
    assert len(saved.read_text()) == 120_000


def test_ctrl_c_does_not_wait_for_a_host_that_reads_no_orders(near, monkeypatch):
    monkeypatch.setattr(ssh, "START_S", 0.2)
    way, up = near("touch up\nexec sleep 5"), near.home / "up"

    def press():
        while not up.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    start = time.monotonic()
    assert ssh.start(parse("a"), ssh.Orders(["x"], [""], way, {"LONG": "x" * 120_000}), ("127.0.0.1", 9)) == 130
    assert time.monotonic() - start < 4


def test_ctrl_c_does_not_wait_for_a_host_that_has_started_nothing(near, run, monkeypatch, tmp_path):
    """Story: if a login hung after the check, Ctrl-C waited the five minutes that are meant for saving."""
    monkeypatch.setattr(ssh, "START_S", 0.3)
    hung, up, script = tmp_path / "hung", tmp_path / "up", tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit('heard'))\n"
        f"Path({str(up)!r}).touch()\ntime.sleep(60)"
    )
    way = near(f'case "$*" in *" b exec "*"launch import node"*) touch {hung}; exec sleep 60;; *) {ON};; esac')

    def press():
        end = time.monotonic() + 60
        while not (hung.exists() and up.exists()) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    start = time.monotonic()
    code, _, errors = run("run", "-H", "a", "-H", "b", "--ssh", way.ssh, script)
    assert code == 130, errors
    assert "paceline: ended the connection to b, which had started nothing yet\n" in errors
    assert "[a] heard\n" in errors
    assert time.monotonic() - start < 100
