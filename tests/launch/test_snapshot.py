"""What goes along: all that git sees, or what looks like work; what cannot is named."""

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
    with pytest.raises(ValueError, match=r"--send: not all of .* can be sent: ") as told:
        snapshot.take(work)
    for said in ("the link far leads out of it, to /etc", "the link up leads out", "pipe is neither file nor link"):
        assert said in str(told.value)
    with pytest.raises(ValueError, match="there is no folder absent here to send"):
        snapshot.take(work, Path("absent"))
