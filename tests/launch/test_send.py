"""--send transfers files completely or not at all, once, into one folder; a run starts there as it would here."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launching
from launching import finish
from needs import needs
from paceline.launch.deploy import snapshot
from paceline.launch.deploy.send import send
from paceline.launch.hosts import Way, parse
from sending import lay
from sshd import Sshd, unavailable

pytestmark = pytest.mark.long

needs_sshd = needs(sshd=unavailable())


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


def base_of(sshd):
    return sshd.folder / "paceline" / "sent"


@pytest.fixture
def work(tmp_path):
    return lay(tmp_path / "work")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            (folder / name / f"{i}.jpg").write_bytes(f"{name} {i}".encode() * 1000)
    return folder


def begin(sshd, *words, cwd):
    return launching.begin(*words, cwd=cwd, PACELINE_SSH=sshd.ssh)


@pytest.mark.dear
@needs_sshd
def test_a_run_starts_in_the_snapshot_and_a_second_sends_only_what_changed(sshd, work):
    output, errors = finish(begin(sshd, "run", "-H", "one", "--send", "train.py", cwd=work))
    assert output == "[one] as sent\n"
    assert "sent to one: 4 files" in errors
    (work / "package" / "words.py").write_text("SAID = 'changed'\n")
    (work / "more.py").write_text(
        "import os, sys, package.words\nsys.modules['dask'] = None\n"  # as if the processes had joined by that library
        "print(package.words.SAID, os.access('tool', os.X_OK), os.readlink('short'), os.stat('package/empty').st_size)"
    )
    output, errors = finish(begin(sshd, "run", "-H", "one,two", "--send", work / "more.py", cwd=work))
    assert sorted(output.splitlines()) == [f"[{name}] changed True package/words.py 0" for name in ("one", "two")]
    # both names are this machine: the second host has everything already
    counts = sorted(line.partition(": ")[2].split(",")[0] for line in errors.splitlines() if line.startswith("sent"))
    assert counts == ["0 files", "2 files"]
    folders = [path for path in (base_of(sshd) / "trees").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert base_of(sshd).stat().st_mode & 0o777 == 0o700


@pytest.mark.dear
@needs_sshd
def test_training_uses_data_that_were_sent(sshd, work, tmp_path):
    """Real images, packed; the run's folder is below the home folder there, or at an absolute path."""
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
    result = json.loads(output)
    assert result["run"] == str(tmp_path / "run")
    assert result["epochs"] == 1
    assert "sent to one" in errors
    assert list((tmp_path / "run").glob("checkpoint-*"))


@needs_sshd
def test_data_keep_their_path_and_are_stored_once(sshd, work, photos):
    (work / "photos").symlink_to(photos)
    for changed, whole in ((False, 30_000), (True, 25_001)):
        if changed:
            (photos / "cat" / "0.jpg").write_bytes(b"x")
        trees, place = snapshot.take(work, Path("photos"))
        (host,), (went,) = send(parse("one"), Way(sshd.ssh), trees)
        assert went.num_files + went.num_present == 10
        assert went.num_files == 1 or not changed
        assert place == "photos"
        found = list(Path(host.folder, "photos").glob("*/*.jpg"))
        assert sum(path.stat().st_size for path in found) == whole
        assert {path.stat().st_nlink for path in found} == {2 + changed} | ({2} if changed else set())
        assert {path.stat().st_mode & 0o777 for path in found} == {0o444}


@needs_sshd
def test_a_missing_package_is_reported_before_anything_is_sent(sshd, work, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    bare = tmp_path / "bare" / "bin" / "python"
    (work / "big").write_bytes(os.urandom(100))
    words = ["run", "-H", "one", "--python", bare, "--send", "train.py"]
    _, errors = finish(begin(sshd, *words, cwd=work), code=2)
    assert "- one: torch is not installed for" in errors
    assert not (base_of(sshd) / "files" / hashlib.sha256((work / "big").read_bytes()).hexdigest()).exists()


@needs_sshd
def test_a_failed_connection_is_reported_and_the_next_transfer_resumes(sshd, work):
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
    with pytest.raises(ValueError, match=r"- one: the connection failed after .* start again: the files that have"):
        send(parse("one"), slow, trees, cut)
    assert seen
    hosts, (went,) = send(parse("one"), Way(sshd.ssh), trees)
    # small files may follow all parts: bytes are compared, not files
    assert 0 < went.all_bytes < 4 * (8 << 20), "the first part has arrived, the last has not"
    for i in range(4):
        assert (Path(hosts[0].folder) / f"part{i}").read_bytes() == (work / f"part{i}").read_bytes()
    assert not list((base_of(sshd) / "files").glob(".part*"))


def write_slow(folder, sshd):
    """An ssh limited to 30 MB/s, so that the connection fails during the transfer."""
    path = folder / "slow.py"
    path.write_text(
        "import subprocess, sys, time, os\n"
        f"p = subprocess.Popen([*{sshd.ssh.split()!r}, *sys.argv[1:]], stdin=subprocess.PIPE)\n"
        "while data := os.read(0, 1 << 16):\n    p.stdin.write(data); p.stdin.flush(); time.sleep(0.002)\n"
        "p.stdin.close()\nsys.exit(p.wait())\n"
    )
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--send", "train.py"], "--send sends to the hosts of -H, and there is none"),
        (["--data", "x", "train.py"], "--data x needs --send"),
    ],
)
def test_inconsistent_options_are_reported(words, expected, work):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", *words],
        **{"cwd": work, "capture_output": True, "text": True, "timeout": 60},
        env={**os.environ, "PACELINE_SSH": "false"},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"paceline: {expected}")
