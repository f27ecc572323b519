"""`paceline verify`, with -H most of all: the run is one process's, or not; nothing is left on the hosts."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from near import ON, Near
from needs import needs
from paceline.planner import verify as verification
from paceline.planner.diagnose import equivalence
from sshd import Sshd, unavailable

pytestmark = pytest.mark.long

needs_sshd = needs(sshd=unavailable())
OWN_LOOP = str(Path(__file__).parents[2] / "examples" / "own_loop.py")

TWICE = """
import torch, paceline

def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dice = torch.Generator().manual_seed(steps)
    rows = torch.randn(8 * steps, 4, generator=dice)
    data = torch.utils.data.TensorDataset(rows, (rows.sum(1) > 0).long())
    with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8) as pace:
        for batch in pace.batches(data):
            pace.step(batch)

torch.manual_seed(0)
train(torch.nn.Sequential(torch.nn.Linear(4, 2)), 2)
train(torch.nn.Linear(4, 2), 9)
"""


@pytest.fixture(scope="module")
def sshd():
    with Sshd() as server:
        yield server


def verify(sshd, *words, code=0):
    before = {path.name for path in Path("/tmp").glob("paceline-verify-*")}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "verify", *map(str, words)],
        env={**os.environ, "PACELINE_SSH": sshd.ssh},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    left = {path.name for path in Path("/tmp").glob("paceline-verify-*")} - before
    assert not [name for name in left if re.fullmatch(r"paceline-verify-[0-9a-f]{16}", name)]
    return done.stdout, done.stderr


@pytest.mark.dear
@needs_sshd
def test_an_exact_run_is_the_same(sshd):
    said, _ = verify(sshd, "--steps", 4, "-H", "one,two", OWN_LOOP)
    assert re.search(r"4 steps in float64, dropout off: .*\nthe same\n$", said)


@pytest.mark.dear
@needs_sshd
def test_another_mathematics_is_not(sshd, tmp_path):
    script = tmp_path / "local_steps.py"
    script.write_text(Path(OWN_LOOP).read_text().replace("batch_size=256", 'batch_size=256, exchange="local_sgd:2"'))
    said, _ = verify(sshd, "--steps", 3, "-H", "one,two", script, code=1)
    assert said.endswith("NOT the same\n")


@pytest.mark.dear
@needs_sshd
def test_a_script_that_ends_early_is_told(sshd, tmp_path):
    script = tmp_path / "short.py"
    script.write_text("print('nothing to do')")
    said, errors = verify(sshd, "--steps", 3, "-H", "one,two", script, code=2)
    assert "[one] nothing to do" in said
    assert re.search(r"the script ended on all nodes \(exit code 0\) before step 3; .*fewer --steps", errors)


@pytest.mark.dear
@needs_sshd
def test_a_host_that_cannot_take_part_is_told_before_anything_starts(sshd):
    _, errors = verify(sshd, "-H", "one,shut", OWN_LOOP, code=2)
    assert "nothing was started" in errors
    assert "shut: no ssh server listens there" in errors


def test_a_script_that_does_not_end_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(verification, "LIMIT_S", 0.5)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"the script had not ended after 0 s|after 1 s; give fewer --steps"):
        verification.verify([sys.executable, "-c", "import time; time.sleep(60)"], 3, 2, "sequential", "float64")


@pytest.mark.parametrize("code", [130, 143])
def test_who_ends_it_is_not_told_to_mend_it(code):
    with pytest.raises(SystemExit) as ended:
        verification._check_ended(False, code, 3, "on all nodes")
    assert ended.value.code == code


def test_weights_that_lie_below_tmp_are_their_owners_alone(tmp_path):
    from paceline.planner.diagnose.equivalence import EquivalenceRun

    EquivalenceRun(tmp_path / "new" / "many", 1, "float64").begin({"weight": torch.zeros(2)})
    assert (tmp_path / "new" / "many" / "first.safetensors").exists()
    assert (tmp_path / "new" / "many").stat().st_mode & 0o777 == 0o700


@pytest.mark.dear
def test_a_script_that_joins_twice_is_compared_by_the_join_that_takes_all_steps(tmp_path, monkeypatch):
    """Story: the second's first weights lay where the first's had lain, and one process began with those."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    monkeypatch.delenv("RANK", raising=False)
    compared = verification.verify([sys.executable, str(script)], 4, 2, "sequential", "float64")
    assert compared.same
    assert compared.worst in ("weight", "bias"), "the first, which took two steps alone, has '0.weight' and '0.bias'"


def begin(hosts, orders, meeting):
    """In place of nodes: no more than the folder that theirs would be below."""
    folder = Path(json.loads(orders.environment["PACELINE_VERIFY"])["folder"])
    folder.mkdir(parents=True)
    return folder.parent


def test_a_host_is_asked_to_compare_as_it_is_asked_for_all_else(tmp_path, monkeypatch):
    """Its ssh reads nothing that is typed here; a file there is not taken for Python's; a login may say any bytes."""
    near = Near(tmp_path)
    for name in ("json", "shutil"):
        (near.home / f"{name}.py").write_text("raise SystemExit('not this one')")
    way = near(f"head -c 5 >> read\nprintf '\\377\\n'\n{ON}")
    begun = []
    monkeypatch.setattr(verification, "check", lambda *_: ("127.0.0.1", 9))
    monkeypatch.setattr(verification.ssh, "start", lambda *asked: begun.append(begin(*asked)) or 0)
    (source, sink), stdin = os.pipe(), os.dup(0)
    try:
        os.write(sink, b"typed")
        os.dup2(source, 0)
        with pytest.raises(ValueError, match="the script ended on all nodes"):
            verification.over_ssh("a", way, ["train.py"], 3, "", "float64")
    finally:
        os.dup2(stdin, 0)
        for each in (source, sink, stdin):
            os.close(each)
    assert (near.home / "read").read_bytes() == b""
    assert not begun[0].exists()


@pytest.fixture
def deaf():
    """Neither SIGTERM nor SIGHUP ends these tests."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_one_that_is_ended_leaves_neither_processes_nor_weights(number, deaf, tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "LIMIT_S", 2.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    pid = tmp_path / "pid"
    script = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"

    def end():
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        verification.verify([sys.executable, "-c", script], 3, 2, "sequential", "float64")
    assert ended.value.code == 128 + number
    assert not Path(f"/proc/{pid.read_text()}").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_one_over_ssh_that_is_ended_leaves_no_weights_there(number, deaf, tmp_path, monkeypatch):
    begun = []

    def ended_early(*asked):
        begun.append(begin(*asked))
        os.kill(os.getpid(), number)
        return 1

    monkeypatch.setattr(verification, "check", lambda *_: ("127.0.0.1", 9))
    monkeypatch.setattr(verification.ssh, "start", ended_early)
    with pytest.raises(SystemExit) as ended:
        verification.over_ssh("a", Near(tmp_path)(), ["train.py"], 3, "", "float64")
    assert ended.value.code == 128 + number
    assert not begun[0].exists()


def test_a_script_that_goes_on_after_its_end_is_told_so(tmp_path):
    for join in ("join0", "join1"):
        (tmp_path / join).mkdir()
        (tmp_path / join / equivalence.LAST).touch()
    with pytest.raises(ValueError, match=r"join0, join1 all took their steps, .*catch Exception, and neither"):
        equivalence.compare(tmp_path, tmp_path, "float64")
