"""Two distributions: the package without its benchmarks, and those; either without the other's files."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomli
from typer.testing import CliRunner

from paceline.cli import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """What each wheel holds. Built from a copy, since building leaves files behind."""
    home, out = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("wheels")
    for name in ("src", "bench"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, home)
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    command = [sys.executable, "-m", "pip", *words, str(home), str(home / "bench")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name.partition("-")[0]: set(zipfile.ZipFile(path).namelist()) for path in out.glob("*.whl")}


def test_each_wheel_holds_its_own_package_whole_and_no_other(wheels):
    for name, sources in (("paceline", ROOT / "src"), ("paceline_bench", ROOT / "bench" / "src")):
        held = {path for path in wheels[name] if ".dist-info/" not in path}
        assert {path.split("/")[0] for path in held} == {name}
        assert {path.relative_to(sources).as_posix() for path in (sources / name).rglob("*.py")} <= held
    assert {"paceline/py.typed", "paceline/report/page/page.css"} <= wheels["paceline"]
    assert any(path.startswith("paceline/train/sample/") for path in wheels["paceline"])


def test_both_are_of_one_version():
    package, bench = (tomli.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in (".", "bench"))
    assert bench["version"] == package["version"]
    assert bench["dependencies"] == [f"paceline=={package['version']}"]


def test_without_the_benchmarks_their_command_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "paceline_bench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "paceline_bench", None)
    assert "Examples" in CliRunner().invoke(app, ["bench", "--help"], catch_exceptions=False).stdout
    with pytest.raises(ValueError, match=r"paceline-bench, which is not installed here; .*: pip install \./bench$"):
        CliRunner().invoke(app, ["bench", "local"], catch_exceptions=False)
