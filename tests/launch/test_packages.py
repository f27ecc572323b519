"""The packages that a command needs are checked on every host; missing ones are reported before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from needs import needs
from paceline.launch.deploy.packages import imported, lacking, needed
from paceline.launch.doctor.preflight import check
from paceline.launch.hosts import Way, parse
from sshd import Sshd, unavailable

needs_sshd = needs(sshd=unavailable())


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import absent, numpy.linalg, absent.part\nfrom elsewhere.deep import x", ["absent", "elsewhere", "numpy"]),
        ("import os, torch\nimport paceline\nfrom __future__ import annotations", []),
        ("import beside, folder\nfrom folder.inner import x\nfrom . import y", []),
        ("try:\n    import absent\nexcept ImportError:\n    absent = None", []),
        ("def late():\n    import absent\n\nif __name__ == '__main__':\n    import absent", []),
        ("import sys\nsys.path.insert(0, 'lib')\nimport in_lib, numpy", ["numpy"]),
        ("import absent\nthis is no Python", []),
        ("import absent\0", []),
    ],
)
def test_a_script_needs_its_top_level_imports(source, names, tmp_path):
    (tmp_path / "beside.py").touch()
    (tmp_path / "folder").mkdir()
    assert imported(source.encode(), tmp_path) == names


def test_a_command_needs_the_packages_of_its_script_and_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "train.py").write_text("import absent, part.other")
    assert needed(["-m", "part.train", "--more"]) == {"absent": "train.py"}
    assert needed(["-m", "paceline.train.run", "{}"]) == {}
    (tmp_path / "part" / "__main__.py").write_text("import absent_too")
    (tmp_path / "mine.py").write_text("import not_here")
    assert needed(["-m", "part"]) == {"absent_too": "__main__.py"}
    assert needed(["-m", "paceline.train.run", '{"model": "mine:build"}']) == {"not_here": "mine.py"}
    assert needed(["-m", "paceline.train.run", '{"model": "alexnet"}']) == {}
    monkeypatch.setenv("PACELINE_ENCRYPT", "1")
    monkeypatch.setenv("PACELINE_LINK", "mpi")
    by_options = {"cryptography": "--encrypt", "mpi4py": "PACELINE_LINK=mpi"}
    assert needed(["-m", "paceline.train.run", "{}"]) == by_options
    assert needed(["part/train.py"]) == {"absent": "train.py", "part": "train.py", **by_options}


def test_the_remedy_names_what_pip_knows():
    (line,) = lacking({"PIL": "a.py", "cryptography": "--encrypt", "absent": "a.py"}, ["PIL", "cryptography"], "/p")
    wanted = r"pip install pillow==\d[\d.]+ 'paceline\[encrypt\]'; or name"
    assert re.match(
        rf"PIL \(needed by a\.py\), cryptography \(needed by --encrypt\) are not installed for /p .*{wanted}",
        line,
        re.I,
    )
    assert lacking({"PIL": "a.py"}, ["what", 3], "/p") == []


@needs_sshd
def test_each_host_reports_its_missing_packages_in_a_line(sshd, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'cryptography' else find(name)\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={tmp_path}:$PYTHONPATH\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    needs = {"cryptography": "--encrypt", "numpy": "a.py", "absent": "a.py"}
    with pytest.raises(ValueError, match="not every host") as raised:
        check(parse("one,two"), Way(sshd.ssh, str(python), str(tmp_path)), needs=needs)
    what = "cryptography (needed by --encrypt), absent (needed by a.py) are not installed for"
    remedy = (
        f"install there: {python} -m pip install 'paceline[encrypt]' absent; or name another interpreter with --python"
    )
    assert str(raised.value).splitlines()[1:] == [f"- {n}: {what} {python} there; {remedy}" for n in ("one", "two")]


@needs_sshd
def test_nothing_starts_where_a_script_would_miss_a_package(sshd, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')\nimport absent_here_and_there")
    command = [sys.executable, "-m", "paceline", "run", "-H", "one", "--ssh", sshd.ssh, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "- one: absent_here_and_there (needed by script.py) is not installed for " in done.stderr
    assert not (tmp_path / "started").exists()
