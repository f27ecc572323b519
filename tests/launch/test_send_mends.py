"""Errors at either end do not break later transfers, and private files are not sent."""

import hashlib
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

from needs import needs
from paceline.launch.deploy import receive, snapshot
from paceline.launch.deploy import send as sender
from paceline.launch.hosts import parse
from sending import ask, tree

needs_git = needs(git="" if shutil.which("git") else "there is no git on this machine")


def one(name, content):
    """A folder with one file."""
    return tree([[name, hashlib.sha256(content).hexdigest(), len(content), False]])


def test_a_broken_listing_is_deleted(tmp_path):
    """Story: one empty listing, as a power failure may leave it, broke every later transfer."""
    first = Path(ask(tmp_path, [one("a", b"1")], b"1")[-1]["folders"][0])
    for text in ("", '{"files": ['):
        (tmp_path / "trees" / f"{first.name}.json").write_text(text)
        (tmp_path / "trees" / "0123.json").write_text(text)
        assert "folders" in ask(tmp_path, [one("a", b"1")], b"1")[-1]
        assert sorted(path.name for path in (tmp_path / "trees").glob("*.json")) == [f"{first.name}.json"]
        assert json.loads((tmp_path / "trees" / f"{first.name}.json").read_text()) == one("a", b"1")


def test_a_folder_that_cannot_be_removed_stays_and_stops_no_transfer(tmp_path, monkeypatch):
    folders = [ask(tmp_path, [one("a", b"%d" % i)], b"%d" % i)[-1]["folders"][0] for i in range(3)]
    for i, folder in enumerate(folders):
        os.utime(f"{folder}.json", (i, i))
    unlink = os.unlink

    def refuse(path):
        if str(path).startswith(folders[0]):
            raise PermissionError(13, "Permission denied", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    receive.sweep(str(tmp_path), [], max_kept=1)
    assert [Path(folder, "a").exists() for folder in folders] == [True, False, True]
    contents = {hashlib.sha256(b"%d" % i).hexdigest() for i in (0, 2)}
    assert set(os.listdir(tmp_path / "files")) == contents


def test_without_space_old_folders_are_deleted_first_and_arrived_files_stay(tmp_path, monkeypatch):
    old, new = one("a", b"old"), one("a", b"new")
    (folder,) = ask(tmp_path, [old], b"old")[-1]["folders"]
    both = tree(new["files"] + one("b", b"late")["files"])
    assert "ended before everything" in ask(tmp_path, [both], b"new")[-1]["error"]
    usage = shutil.disk_usage

    def small(path):
        return usage(path)._replace(free=0 if Path(folder, "a").exists() else 1 << 30)

    monkeypatch.setattr(shutil, "disk_usage", small)
    missing, reply = ask(tmp_path, [new])
    assert (missing, "folders" in reply) == ({"missing": []}, True)
    assert not Path(folder).exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=0))
    assert "MB are needed in" in ask(tmp_path, [one("a", b"more")], b"more")[-1]["error"]


def git(folder, *words):
    options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", folder, *options, *words], check=True, capture_output=True, timeout=20)


@needs_git
def test_untracked_hidden_files_and_environments_are_not_sent(tmp_path):
    """A password in .env, or .venv with links out of the folder; without git they were never sent."""
    git(tmp_path, "init", "-q")
    for name in ("train.py", "new.py", ".env", ".venv/pyvenv.cfg", "env/pyvenv.cfg", "env/lib/a.py", "environ.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "env" / "python").symlink_to("/usr/bin/python3")
    (tmp_path / ".tracked").touch()
    git(tmp_path, "add", "train.py", ".tracked")
    ((sent,), _) = snapshot.take(tmp_path)
    assert {path for path, *_ in sent.files} == {"train.py", ".tracked", "new.py", "environ.py"}
    assert sent.links == []


@needs_git
def test_a_submodule_that_is_not_checked_out_is_empty(tmp_path):
    """Story: git lists its folder as './', which was searched without end."""
    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
    git(tmp_path / "inner", "commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "outer" / "train.py").touch()
    git(tmp_path / "outer", "add", "train.py")
    git(tmp_path / "outer", "submodule", "--quiet", "add", str(tmp_path / "inner"), "inner")
    git(tmp_path / "outer", "commit", "-q", "-m", "first")
    git(tmp_path, "clone", "-q", str(tmp_path / "outer"), "clone")
    ((sent,), _) = snapshot.take(tmp_path / "clone")
    assert {path for path, *_ in sent.files} == {".gitmodules", "train.py"}


def test_a_host_may_wait_for_another_sender_as_long_as_it_reports_that(monkeypatch):
    """A waiting host reports it every two seconds; a stopped one does not."""
    ended, now = [], [0.0]
    monkeypatch.setattr(sender, "kill", ended.append)
    monkeypatch.setattr(sender.time, "monotonic", lambda: now[0])
    to = sender.Delivery(parse("one")[0], process=object())
    for _ in range(5):
        to.num_waits += 1
        now[0] += 0.9 * sender.STALL_S
        to.check_progress()
    assert not ended
    now[0] += 1.1 * sender.STALL_S
    to.check_progress()
    assert len(ended) == 1


def test_a_long_list_that_is_sent_slowly_is_no_stall(monkeypatch):
    monkeypatch.setattr(sender, "PART", 1 << 16)
    to, states = sender.Delivery(*parse("a")), []

    def write(data):
        to.check_progress()
        states.append(to.progress[0])

    listed = SimpleNamespace(sources={}, listing=lambda: tree([[f"{i:0100}", "a", 1, False] for i in range(2000)]))
    stdin = SimpleNamespace(write=write, flush=lambda: None)
    assert sender._transfer(SimpleNamespace(stdin=stdin, stdout=io.BytesIO()), to, [listed]) is None
    assert len(set(states)) > 2000 * 100 // sender.PART
