"""What is sent arrives whole or not at all, once, and nowhere else; a run starts in it as it would here."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.launch import receive, snapshot
from paceline.launch.hosts import Way, parse
from paceline.launch.send import send
from sshd import Sshd, unavailable

needs_sshd = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "sshd is here")
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="there is no git on this machine")


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


def base_of(sshd):
    return sshd.folder / "paceline" / "sent"


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("import package.words\nprint(package.words.SAID)\n")
    (folder / "package" / "words.py").write_text("SAID = 'as sent'\n")
    (folder / "package" / "empty").touch()
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "short").symlink_to("package/words.py")
    return folder


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            (folder / name / f"{i}.jpg").write_bytes(f"{name} {i}".encode() * 1000)
    return folder


def begin(sshd, *words, cwd, hosts="one,two", **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, words)],
        env={**os.environ, "PACELINE_SSH": sshd.ssh, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


def finish(process, code=0):
    try:
        output, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, output + errors
    return output, errors


@needs_sshd
def test_a_run_starts_in_the_snapshot_and_a_second_sends_only_what_changed(sshd, work):
    output, errors = finish(begin(sshd, "run", "-H", "one", "--send", "train.py", cwd=work))
    assert output == "[one] as sent\n"
    assert "sent to one: 4 files" in errors
    (work / "package" / "words.py").write_text("SAID = 'changed'\n")
    (work / "more.py").write_text(
        "import os, package.words\n"
        "print(package.words.SAID, os.access('tool', os.X_OK), os.readlink('short'), os.stat('package/empty').st_size)"
    )
    output, errors = finish(begin(sshd, "run", "-H", "one,two", "--send", work / "more.py", cwd=work))
    assert sorted(output.splitlines()) == [f"[{name}] changed True package/words.py 0" for name in ("one", "two")]
    # both names are this machine: whoever comes second finds everything there
    counts = sorted(line.partition(": ")[2].split(",")[0] for line in errors.splitlines() if line.startswith("sent"))
    assert counts == ["0 files", "2 files"]
    folders = [path for path in (base_of(sshd) / "trees").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert base_of(sshd).stat().st_mode & 0o777 == 0o700


@needs_sshd
def test_training_goes_on_data_that_were_sent(sshd, work, tmp_path):
    """Real images, packed; the run's folder is below the home folder there, or where an absolute path says."""
    from PIL import Image

    for name, shade in (("dark", 20), ("light", 220)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (32, 32), (shade, shade, 10 * i)).save(tmp_path / "images" / name / f"{i}.jpg")
    (work / "net.py").write_text(
        "from torch import nn\n\n\ndef build(classes):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))\n"
    )
    words = [
        "--model",
        "net:build",
        "--epochs",
        1,
        "--batch-size",
        12,
        "--plan",
        "threads:1",
        "--out",
        tmp_path / "run",
    ]
    started = begin(sshd, "train", "-H", "one,two", "--send", "--data", tmp_path / "images", "--json", *words, cwd=work)
    output, errors = finish(started)
    said = json.loads(output)
    assert said["run"] == str(tmp_path / "run")
    assert said["epochs"] == 1
    assert "sent to one" in errors
    assert list((tmp_path / "run").glob("checkpoint-*"))


@needs_sshd
def test_data_lie_where_they_lay_and_are_there_once(sshd, work, photos):
    (work / "photos").symlink_to(photos)
    for changed, whole in ((False, 30_000), (True, 25_001)):
        if changed:
            (photos / "cat" / "0.jpg").write_bytes(b"x")
        trees, place = snapshot.take(work, Path("photos"))
        (host,), (went,) = send(parse("one"), Way(sshd.ssh), trees)
        assert went.files + went.there == 10
        assert went.files == 1 or not changed
        assert place == "photos"
        found = list(Path(host.folder, "photos").glob("*/*.jpg"))
        assert sum(path.stat().st_size for path in found) == whole
        assert {path.stat().st_nlink for path in found} == {2 + changed} | ({2} if changed else set())
        assert {path.stat().st_mode & 0o777 for path in found} == {0o444}


@needs_sshd
def test_a_package_that_is_missing_is_told_before_anything_is_sent(sshd, work, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    bare = tmp_path / "bare" / "bin" / "python"
    (work / "big").write_bytes(os.urandom(100))
    words = ["run", "-H", "one", "--python", bare, "--send", "train.py"]
    _, errors = finish(begin(sshd, *words, cwd=work), code=2)
    assert "- one: torch is not installed for" in errors
    assert not (base_of(sshd) / "files" / hashlib.sha256((work / "big").read_bytes()).hexdigest()).exists()


@needs_sshd
def test_a_connection_that_breaks_is_told_and_the_next_time_goes_on(sshd, work):
    for i in range(4):
        (work / f"part{i}").write_bytes(os.urandom(8 << 20))
    trees, _ = snapshot.take(work)
    seen = []

    def cut(doing):
        done = float(doing.split()[1])
        if done > 12 and not seen:
            seen.append(done)
            find = ["pgrep", "-f", f"{sshd.folder}/config .* one exec"]
            for pid in subprocess.run(find, capture_output=True, text=True, check=True).stdout.split():
                os.kill(int(pid), 9)

    slow = Way(f"{sys.executable} {write_slow(work.parent, sshd)}")
    with pytest.raises(ValueError, match=r"- one: the connection was lost after .* start again: what has arrived"):
        send(parse("one"), slow, trees, cut)
    assert seen
    hosts, (went,) = send(parse("one"), Way(sshd.ssh), trees)
    assert 0 < went.files < 4, "the first has arrived, the last has not"
    for i in range(4):
        assert (Path(hosts[0].folder) / f"part{i}").read_bytes() == (work / f"part{i}").read_bytes()
    assert not list((base_of(sshd) / "files").glob(".part*"))


def write_slow(folder, sshd):
    """An ssh that takes 30 MB/s, so that there is something to break."""
    path = folder / "slow.py"
    path.write_text(
        "import subprocess, sys, time, os\n"
        f"p = subprocess.Popen([*{sshd.ssh.split()!r}, *sys.argv[1:]], stdin=subprocess.PIPE)\n"
        "while data := os.read(0, 1 << 16):\n    p.stdin.write(data); p.stdin.flush(); time.sleep(0.002)\n"
        "p.stdin.close()\nsys.exit(p.wait())\n"
    )
    return path


@needs_sshd
def test_a_full_disk_there_is_one_line(sshd, work, tmp_path):
    """A file system of 1 MB, where this may be mounted."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", small]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        (work / "big").write_bytes(os.urandom(3 << 20))
        told = ask(small, [snapshot.take(work)[0][0].said()])
        assert told[-1]["error"].startswith("6.3 MB are needed in")
        receive.SPARE_BYTES, spare = -(100 << 20), receive.SPARE_BYTES
        try:
            told = ask(small, [snapshot.take(work)[0][0].said()], contents(work))
        finally:
            receive.SPARE_BYTES = spare
        assert "no space is left for" in told[-1]["error"]
    finally:
        subprocess.run(["umount", small], check=True)


def contents(folder):
    """Every content of the folder's snapshot, in the order in which the far end asks."""
    tree = snapshot.take(folder)[0][0]
    names = dict.fromkeys(row[1] for row in tree.said()["files"])
    return b"".join(tree.sources[name].read_bytes() for name in names)


def ask(base, trees, rest=b""):
    """What the far end says."""
    Path(base).mkdir(parents=True, exist_ok=True)
    sink = io.BytesIO()
    receive.receive(io.BytesIO(json.dumps({"trees": trees}).encode() + b"\n" + rest), sink, str(base))
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def tree(files=(), links=(), mounts=()):
    return {"linked": False, "files": list(files), "links": list(links), "mounts": list(mounts)}


SHA = hashlib.sha256(b"x").hexdigest()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (tree([["../out", SHA, 1, False]]), "'../out' leads out"),
        (tree([["/out", SHA, 1, False]]), "'/out' leads out"),
        (tree([["a//b", SHA, 1, False]]), "'a//b' leads out"),
        (tree([["a/./b", SHA, 1, False]]), "leads out"),
        (tree([["a\0b", SHA, 1, False]]), "leads out"),
        (tree([["a", "../../x", 1, False]]), "a hash is none"),
        (tree(links=[["a", "/etc"]]), "the link 'a' leads out of the folder, to '/etc'"),
        (tree(links=[["a/b", "../../c"]]), "the link 'a/b' leads out"),
        (tree(links=[["../b", "c"]]), "'../b' leads out"),
        (tree(mounts=[["../b", SHA]]), "'../b' leads out"),
        (tree(mounts=[["b", "../../.."]]), "a hash is none"),
        (tree([["a/b", SHA, 1, False]], [["a", "c"]]), "a there is not the link that was sent"),
    ],
)
def test_nothing_leads_out_of_the_folder(given, said, tmp_path):
    assert said in ask(tmp_path / "sent", [given], b"x")[-1]["error"]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"lock", SHA, "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["sent"]


def test_a_content_that_is_not_what_was_announced_is_refused(tmp_path):
    assert "other than it was announced" in ask(tmp_path, [tree([["a", SHA, 1, False]])], b"y")[-1]["error"]
    assert "ended before everything" in ask(tmp_path, [tree([["a", SHA, 1, False]])])[-1]["error"]
    assert not list((tmp_path / "files").glob("[!.]*"))
    assert [list(said) for said in ask(tmp_path, [tree([["a", SHA, 1, False]])], b"x")] == [
        ["missing"],
        ["folders", "home"],
    ]


def test_what_was_changed_there_is_mended_and_links_there_are_not_followed(tmp_path):
    given = tree([["a/b", SHA, 1, False]])
    folder = Path(ask(tmp_path / "sent", [given], b"x")[-1]["folders"][0])
    (folder / "a" / "b").write_text("y")
    assert ask(tmp_path / "sent", [given])[-1]["folders"] == [str(folder)]
    assert (folder / "a" / "b").read_text() == "x"
    shutil.rmtree(folder / "a")
    (tmp_path / "elsewhere").mkdir()
    (folder / "a").symlink_to(tmp_path / "elsewhere")
    assert "is a link that leads elsewhere" in ask(tmp_path / "sent", [given])[-1]["error"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_only_the_last_folders_stay_besides_those_in_use_and_what_runs_wrote(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base, names = receive.root(), []
    for i in range(receive.KEPT + 4):
        content = str(i).encode()
        given = tree([["a", hashlib.sha256(content).hexdigest(), 1, False]] if i < 10 else [])
        if i == 4:
            held = receive.hold(names[1])
            held.__enter__()
        names.append(ask(base, [given], content)[-1]["folders"][0])
        if i == 0:
            (Path(names[0]) / "result").write_text("mine")
        os.utime(names[-1] + ".json", (i, i))
    held.__exit__(None, None, None)
    left = [i for i, name in enumerate(names) if Path(name, "a").exists()]
    assert left == [1, *range(len(names) - receive.KEPT, len(names))]
    assert (Path(names[0]) / "result").read_text() == "mine"
    assert not Path(names[2]).exists()
    kept = {hashlib.sha256(str(i).encode()).hexdigest() for i in left}
    assert set(os.listdir(Path(base) / "files")) == kept


def test_senders_take_turns(tmp_path):
    """The second waits, says so, and then needs nothing."""
    given, told = tree([["a", SHA, 1, False]]), []
    ask(tmp_path, [])
    source, feed = os.pipe()
    with open(source, "rb") as first, open(feed, "wb") as out:
        sink = io.BytesIO()
        one = threading.Thread(target=receive.receive, args=(first, sink, str(tmp_path)), daemon=True)
        out.write(json.dumps({"trees": [given]}).encode() + b"\n")
        out.flush()
        receive_alone = threading.Thread(target=lambda: told.extend(ask(tmp_path, [given])), daemon=True)
        # an alarm belongs to the main thread, and these are none
        alarm, receive.signal.alarm = receive.signal.alarm, lambda seconds: 0
        try:
            one.start()
            end = time.monotonic() + 10
            while b"missing" not in sink.getvalue():
                assert time.monotonic() < end
                time.sleep(0.01)
            receive_alone.start()
            time.sleep(0.3)
            out.write(b"x")
            out.flush()
            one.join(10)
            receive_alone.join(10)
        finally:
            receive.signal.alarm = alarm
    assert told[0] == {"waiting": True}
    assert told[1] == {"missing": []}


@needs_git
def test_along_goes_what_git_sees(work):
    def git(*words):
        subprocess.run(["git", "-C", work, *words], check=True, capture_output=True, timeout=20)

    git("init", "-q")
    (work / ".gitignore").write_text("secret\n*.log\n")
    (work / "runs").mkdir()
    for name in ("secret", "a.log", "runs/weights", ".hidden", "gone"):
        (work / name).write_text(name)
    git("add", "-A")
    git("rm", "-q", "--cached", "runs/weights")
    (work / "gone").unlink()
    (work / "new.py").touch()
    (work / "inner").mkdir()
    subprocess.run(["git", "init", "-q", work / "inner"], check=True, capture_output=True, timeout=20)
    (work / "inner" / "deep.py").touch()
    ((tree,), place) = snapshot.take(work)
    found = {path for path, *_ in tree.files}
    assert found == {".gitignore", ".hidden", "new.py", "inner/deep.py", "tool", "train.py"} | {
        f"package/{name}" for name in ("words.py", "empty")
    }
    assert tree.links == [("short", "package/words.py")]
    assert place is None


def test_without_git_along_goes_what_looks_like_work(work, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(work.parent))
    for name in (".secret/a", "runs/b", "package/__pycache__/c.pyc", "env/pyvenv.cfg", "env/d", ".hidden"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).touch()
    ((tree,), _) = snapshot.take(work)
    assert {path for path, *_ in tree.files} == {"package/empty", "package/words.py", "tool", "train.py"}


def test_what_cannot_go_along_is_named(work, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(work.parent))
    (work / "far").symlink_to("/etc")
    (work / "up").symlink_to("../other")
    os.mkfifo(work / "pipe")
    with pytest.raises(ValueError, match=r"--send: not all of .* can go along: ") as told:
        snapshot.take(work)
    for said in ("the link far leads out of it, to /etc", "the link up leads out", "pipe is neither file nor link"):
        assert said in str(told.value)
    with pytest.raises(ValueError, match="there is no folder absent here to send along"):
        snapshot.take(work, Path("absent"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--send", "train.py"], "--send sends to the hosts of -H, and there is none"),
        (["--data", "x", "train.py"], "--data x goes along with --send alone"),
    ],
)
def test_options_that_do_not_fit_are_told(words, said, work):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", *words],
        **{"cwd": work, "capture_output": True, "text": True, "timeout": 60},
        env={**os.environ, "PACELINE_SSH": "false"},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"paceline: {said}")
