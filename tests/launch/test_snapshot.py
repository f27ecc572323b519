"""--send takes the files that git lists, or those that look like work; it names files that cannot be sent."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from needs import needs
from paceline.launch.deploy import snapshot
from sending import lay

needs_git = needs(git="" if shutil.which("git") else "there is no git on this machine")


@pytest.fixture
def work(tmp_path):
    return lay(tmp_path / "work")


@needs_git
def test_files_that_git_lists_are_sent(work):
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


def test_without_git_files_that_look_like_work_are_sent(work, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(work.parent))
    for name in (".secret/a", "runs/b", "package/__pycache__/c.pyc", "env/pyvenv.cfg", "env/d", ".hidden"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).touch()
    ((tree,), _) = snapshot.take(work)
    assert {path for path, *_ in tree.files} == {"package/empty", "package/words.py", "tool", "train.py"}


def test_files_that_cannot_be_sent_are_named(work, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(work.parent))
    (work / "far").symlink_to("/etc")
    (work / "up").symlink_to("../other")
    os.mkfifo(work / "pipe")
    with pytest.raises(ValueError, match=r"--send: not all of .* can be sent: ") as raised:
        snapshot.take(work)
    for expected in ("the link far leads out of it, to /etc", "the link up leads out", "pipe is neither file nor link"):
        assert expected in str(raised.value)
    with pytest.raises(ValueError, match="there is no folder absent here to send"):
        snapshot.take(work, Path("absent"))
