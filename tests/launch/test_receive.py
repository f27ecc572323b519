"""The receiving end of --send: files arrive complete or not at all, in one folder; changed files are replaced."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from needs import want
from paceline.launch.deploy import receive, snapshot
from sending import SHA, ask, lay, tree


@pytest.fixture
def work(tmp_path):
    return lay(tmp_path / "work")


@pytest.mark.dear
def test_a_full_disk_there_is_one_line(work, tmp_path):
    """With a file system of 1 MB, if it can be mounted."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", small]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        want(mounts="file systems cannot be mounted here")
    try:
        (work / "big").write_bytes(os.urandom(3 << 20))
        replies = ask(small, [snapshot.take(work)[0][0].listing()])
        assert replies[-1]["error"].startswith("6.3 MB are needed in")
        receive.SPARE_BYTES, spare = -(100 << 20), receive.SPARE_BYTES
        try:
            replies = ask(small, [snapshot.take(work)[0][0].listing()], contents(work))
        finally:
            receive.SPARE_BYTES = spare
        assert "no space is left for" in replies[-1]["error"]
    finally:
        subprocess.run(["umount", small], check=True)


def contents(folder):
    """Every content of the folder's snapshot, in the order in which the receiver requests it."""
    tree = snapshot.take(folder)[0][0]
    names = dict.fromkeys(row[1] for row in tree.listing()["files"])
    return b"".join(tree.sources[name].read_bytes() for name in names)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (tree([["../out", SHA, 1, False]]), "'../out' is outside"),
        (tree([["/out", SHA, 1, False]]), "'/out' is outside"),
        (tree([["a//b", SHA, 1, False]]), "'a//b' is outside"),
        (tree([["a/./b", SHA, 1, False]]), "is outside"),
        (tree([["a\0b", SHA, 1, False]]), "is outside"),
        (tree([["a", "../../x", 1, False]]), "a hash is malformed"),
        (tree(links=[["a", "/etc"]]), "the link 'a' points out of the folder, to '/etc'"),
        (tree(links=[["a/b", "../../c"]]), "the link 'a/b' points out"),
        (tree(links=[["../b", "c"]]), "'../b' is outside"),
        (tree(mounts=[["../b", SHA]]), "'../b' is outside"),
        (tree(mounts=[["b", "../../.."]]), "a hash is malformed"),
        (tree([["a/b", SHA, 1, False]], [["a", "c"]]), "a there is not the link that was sent"),
    ],
)
def test_nothing_leads_out_of_the_folder(given, expected, tmp_path):
    assert expected in ask(tmp_path / "sent", [given], b"x")[-1]["error"]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"lock", SHA, "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["sent"]


def test_a_content_that_does_not_match_its_hash_is_refused(tmp_path):
    assert "does not match its hash" in ask(tmp_path, [tree([["a", SHA, 1, False]])], b"y")[-1]["error"]
    assert "ended before everything" in ask(tmp_path, [tree([["a", SHA, 1, False]])])[-1]["error"]
    assert not list((tmp_path / "files").glob("[!.]*"))
    assert [list(reply) for reply in ask(tmp_path, [tree([["a", SHA, 1, False]])], b"x")] == [
        ["missing"],
        ["folders", "home"],
    ]


def test_changed_files_are_replaced_and_links_are_not_followed(tmp_path):
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


def test_only_the_last_folders_stay_besides_those_in_use_and_files_of_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base, names = receive.root(), []
    for i in range(receive.MAX_FOLDERS + 4):
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
    assert left == [1, *range(len(names) - receive.MAX_FOLDERS, len(names))]
    assert (Path(names[0]) / "result").read_text() == "mine"
    assert not Path(names[2]).exists()
    kept = {hashlib.sha256(str(i).encode()).hexdigest() for i in left}
    assert set(os.listdir(Path(base) / "files")) == kept


def test_a_long_list_has_a_time_limit_per_part(monkeypatch):
    """Story: a list of a million files took longer than the one minute for the whole list."""
    alarms = []
    monkeypatch.setattr(receive.signal, "alarm", alarms.append)
    line = b"x" * (3 * receive.PART) + b"\n"
    assert receive._line(io.BytesIO(line + b"rest")) == line
    assert alarms == [receive.TIMEOUT_S, 0] * 4
    assert receive._line(io.BytesIO(b"cut o")) == b"cut o"


def test_senders_take_turns(tmp_path):
    """The second sender waits, reports that, and then has nothing to send."""
    given, replies = tree([["a", SHA, 1, False]]), []
    ask(tmp_path, [])
    source, feed = os.pipe()
    with open(source, "rb") as first, open(feed, "wb") as out:
        sink = io.BytesIO()
        one = threading.Thread(target=receive.receive, args=(first, sink, str(tmp_path)), daemon=True)
        out.write(json.dumps({"trees": [given]}).encode() + b"\n")
        out.flush()
        receive_alone = threading.Thread(target=lambda: replies.extend(ask(tmp_path, [given])), daemon=True)
        # alarms work in the main thread alone
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
    assert replies[0] == {"waiting": True}
    assert replies[1] == {"missing": []}
