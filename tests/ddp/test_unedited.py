"""Scripts that know nothing of paceline have our class, in every process of theirs; a lost rank is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.nn.parallel.distributed as torch_ddp

from cluster import Cluster
from launching import unedited
from machines import Machines, needs_cluster, needs_machines
from paceline.cli import prepare
from paceline.ddp import import_hook, module
from paceline.ddp.lost_ranks import LEFT, LostRanks
from paceline.launch.local import free_port
from paceline.planner import ddp_script

pytestmark = pytest.mark.long
OURS, THEIRS = "paceline.ddp.module", "torch.nn.parallel.distributed"

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().sum().backward()
        optimizer.step()
    os.write(1, f"{dist.get_world_size()} {type(model).__module__} {sys.argv[1:]}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
SPAWNS = """
import os, sys
import torch.multiprocessing as mp
import script

def child(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
    script.main()

if __name__ == "__main__":
    os.environ["PORT"] = sys.argv[1]
    mp.spawn(child, nprocs=2)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "spawns.py").write_text(SPAWNS)
    return tmp_path


def said(folder, *words, **more):
    return [line for line in unedited(words, folder, **more).splitlines() if THEIRS in line or OURS in line]


RUN = "-m", "paceline", "run"


def test_run_gives_it_and_passes_the_scripts_arguments(folder):
    """Which shows the standard output of one of a node's processes."""
    assert said(folder, *RUN, "--plan", "processes:2", "script.py", "--lr", "3") == [f"2 {OURS} ['--lr', '3']"]


def test_a_plan_is_not_asked_of_a_script_that_divides_its_own_work(folder):
    assert said(folder, *RUN, "script.py") == [f"1 {OURS} []"]


@pytest.mark.dear
def test_off_leaves_torchs_own(folder):
    assert said(folder, *RUN, "--ddp-off", "--plan", "processes:2", "script.py") == [f"2 {THEIRS} []"]


@pytest.mark.dear
@needs_machines
def test_over_hosts_whose_own_names_resolve_to_loopback(folder):
    """Story: gloo took the address of the host's name, 127.0.1.1, and the other host could not connect to it."""
    with Machines(2) as machines:
        lines = said(folder, *RUN, "-H", machines.hosts(2), "--ssh", machines.ssh, "script.py")
    assert sorted(lines) == [f"[node{node}] 2 {OURS} []" for node in range(2)]


@pytest.mark.dear
def test_under_torchrun(folder):
    words = "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()
    assert said(folder, *words, "-m", "paceline.ddp", "script.py", "--lr", "3") == [f"2 {OURS} ['--lr', '3']"] * 2


@pytest.mark.dear
def test_a_script_may_import_it_openly(folder):
    openly = SCRIPT.replace("torch.nn.parallel import", "paceline import")
    (folder / "openly.py").write_text(openly)
    words = "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()
    assert said(folder, *words, "openly.py") == [f"2 {OURS} []"] * 2


@pytest.mark.dear
def test_children_that_a_script_spawns_have_it(folder):
    lines = said(folder, "-m", "paceline.ddp", "spawns.py", free_port())
    assert [line.partition(" [")[0] for line in lines] == [f"2 {OURS}"] * 2


@pytest.mark.parametrize("words", [(), ("-m",), ("nowhere.py",)])
def test_a_script_that_is_not_there_is_told(folder, words):
    command = [sys.executable, "-m", "paceline.ddp", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert "SCRIPT" in done.stderr or "no script at 'nowhere.py'" in done.stderr


def test_the_folder_comes_first_once_and_what_was_there_stays():
    before = {"PYTHONPATH": f"a{os.pathsep}{import_hook.INHERITED}{os.pathsep}b"}
    want = os.pathsep.join([import_hook.INHERITED, "a", "b"])
    assert import_hook.environment(before) == {"PYTHONPATH": want}
    assert import_hook.environment({**before, import_hook.VARIABLE: import_hook.OFF}) == {}


def test_a_machines_own_sitecustomize_still_runs(folder):
    (folder / "sitecustomize.py").write_text("print('own')")
    given = import_hook.environment({"PYTHONPATH": str(folder)})
    words = "import sys; import torch; from torch.nn.parallel import DistributedDataParallel as D; print(D.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", words], env={**os.environ, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["own", OURS]


@pytest.mark.parametrize("first", ["paceline.transport", "paceline.engine.compute.batch"])
def test_a_module_of_ours_may_be_the_first_to_import_torch(first, folder):
    program = f"""
import pickle, {first}
from torch.nn import parallel
from torch.nn.parallel import distributed as one
assert pickle.loads(pickle.dumps(one)) is one  # as others send functions that use it
ours = parallel.DistributedDataParallel
print(ours.__module__, one.DistributedDataParallel is ours, vars(one)["DistributedDataParallel"] is ours)
assert type(one) is type(parallel) is type(pickle)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **import_hook.environment({})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == f"{OURS} True True\n", done.stdout + done.stderr


def test_who_only_looks_whether_torch_is_there_takes_nothing_away(folder):
    given = import_hook.environment({})
    words = (
        "import importlib.util as u; assert u.find_spec('torch'); assert u.find_spec('torch'); import torch; "
        "from torch.nn.parallel import DistributedDataParallel as D; print(D.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", words], env={**os.environ, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == OURS


def test_an_instance_of_torchs_own_class_is_one_of_the_class_in_its_place():
    made = torch_ddp.DistributedDataParallel.__new__(torch_ddp.DistributedDataParallel)
    assert isinstance(made, module.DistributedDataParallel)
    assert not isinstance(object(), module.DistributedDataParallel)

    class Own(module.DistributedDataParallel):
        pass

    assert not isinstance(made, Own)


# a lost rank

ENDLESS = SCRIPT.replace("range(3)", "range(10**9)").replace(
    "optimizer.step()", "optimizer.step(); step == 20 and open(os.environ['RANK'], 'w').close()"
)


SHARED = ENDLESS.replace("400", "4000").replace("torch.randn(8", "torch.randn(999")  # more rows than pay


@pytest.mark.parametrize(
    "text",
    [pytest.param(ENDLESS, marks=pytest.mark.dear, id="factors"), pytest.param(SHARED, id="in shared memory")],
)
def test_a_killed_rank_ends_the_others_within_ten_seconds_by_name(text, tmp_path):
    (tmp_path / "endless.py").write_text(text)
    started = started_ranks(tmp_path)
    try:
        begun(tmp_path)
        started[1].kill()
        _, said = started[0].communicate(timeout=10)
    finally:
        ended(started)
    assert started[0].returncode == 1
    assert "rank 1 (here) was not heard for 2.5 s and is taken for lost; this process (rank 0) ends" in said


def started_ranks(folder):
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    given |= {"OMP_NUM_THREADS": "1", "PACELINE_HOST": "here"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "paceline.ddp", "endless.py"],
            env={**given, "RANK": str(rank)},
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ended(started):
    for process in started:
        process.kill()
        process.communicate()


MIDDLE = ENDLESS.replace(
    "def main",
    """class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if dist.get_rank() and os.path.exists("now"):
            raise RuntimeError("in the middle")
        return gradient

class Between(torch.nn.Module):
    def forward(self, x):
        return Fails.apply(x)

def main""",
    1,
).replace("torch.nn.ReLU()", "Between()")


def test_a_rank_that_fails_in_the_middle_of_backward_ends_the_other_by_name(tmp_path):
    """Of two layers one's gradient has been offered, the other's never will be."""
    (tmp_path / "endless.py").write_text(MIDDLE)
    started = started_ranks(tmp_path)
    try:
        begun(tmp_path)
        (tmp_path / "now").write_text("")
        said = [process.communicate(timeout=10)[1] for process in reversed(started)]
    finally:
        ended(started)
    assert [process.returncode for process in started] == [1, 1]
    assert "RuntimeError: in the middle" in said[0]
    assert "rank 1 (here) has ended; this process (rank 0) ends" in said[1]


def begun(folder):
    """Both train, and each has heard the other."""
    end = time.monotonic() + 120
    while not all((folder / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < end, "it did not begin to train"
        time.sleep(0.05)
    time.sleep(2.5)


@pytest.mark.dear
@needs_cluster
@pytest.mark.parametrize("cut_off", [0, 1])
def test_a_cut_cable_ends_both_parts_within_ten_seconds_by_name(tmp_path, cut_off):
    """Torch's own class waits for half an hour."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-m", "paceline.ddp", "endless.py"]
    with Cluster(2) as cluster:
        started = [
            cluster.start(rank, command, {}, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for rank in range(2)
        ]
        begun(tmp_path)
        cluster.pull_cable(cut_off)
        said = [process.communicate(timeout=14)[1] for process in started]  # 5 s unanswered, 4.5 s to be explained
    assert [process.returncode for process in started] == [1, 1]
    assert "rank 1 (node1) was not heard for 2.5 s and is taken for lost; this process (rank 0) ends" in said[0]
    assert "rank 0 (node0) cannot be reached and is taken for lost; this process (rank 1) ends" in said[1]


class Store:
    """What `LostRanks` uses of torch's."""

    def __init__(self):
        self.values = {}

    def clone(self):
        return self

    def set_timeout(self, limit):
        pass

    def set(self, key, value):
        self.values[key] = value


def watcher(now, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return LostRanks(Store(), 0, 3, "here")


def test_who_says_nothing_new_is_silent_and_who_left_is_not_missed(monkeypatch):
    now = [0.0]
    watch = watcher(now, monkeypatch)
    for second in range(1, 30):
        now[0] = float(second)
        watch._take([1, 2], [f"{min(second, 10)} there", LEFT if second > 5 else f"{second} far"])
    assert watch.silent() == [1]


def test_who_stood_still_itself_takes_nobody_for_lost(monkeypatch):
    now = [0.0]
    watch = watcher(now, monkeypatch)
    watch._take([1], ["1 there"])
    now[0] = 60.0
    watch._take([1], ["1 there"])
    assert watch.silent() == []


def test_who_ended_before_the_first_beat_is_named_too(monkeypatch):
    """Story: a rank that was killed in its first second was in torch's trace alone."""
    now = [0.0]
    watch = watcher(now, monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    watch._take([1], ["1 there"])
    heard = watch.silent
    monkeypatch.setattr(watch, "silent", lambda: watch._take([1], [f"{now[0]} there"]) or heard())
    assert watch.explain() == "rank 2 was not heard for 2.5 s and is taken for lost; this process (rank 0) ends"


def test_the_path_of_the_folder_is_in_the_package():
    assert (Path(import_hook.INHERITED) / "sitecustomize.py").is_file()


@pytest.mark.parametrize(
    ("text", "uses", "starts"),
    [
        ("from torch.nn.parallel import DistributedDataParallel", "DistributedDataParallel", False),
        ("from paceline import DistributedDataParallel, __version__", "DistributedDataParallel", False),
        ("import paceline\nDistributedDataParallel\npaceline.join(model)", "", False),
        ("import paceline as pace\nDistributedDataParallel\npace.join(model)", "", False),
        ("import os\nDistributedDataParallel\nos.path.join('a')", "DistributedDataParallel", False),
        ("import lightning as L\nL.Trainer(devices=2, strategy='paceline')", "lightning", True),
        ("import lightning as L\nL.seed_everything(1)\ndist.init_process_group('gloo')", "lightning", False),
        ("from transformers import Seq2SeqTrainingArguments", "Seq2SeqTrainingArguments", False),
        ("from accelerate import Accelerator\nDistributedDataParallel", "accelerate", False),
        ("from accelerate import notebook_launcher\nnotebook_launcher(f)", "accelerate", True),
        ("import torch.multiprocessing as mp\nDistributedDataParallel\nmp.spawn(f)", "DistributedDataParallel", True),
        ("import torch.multiprocessing as mp\nmp.spawn(f)", "", False),
        ("print('a plain script')", "", False),
    ],
)
def test_what_a_script_uses_is_read_in_it(text, uses, starts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    for command in (["train.py"], ["-m", "train"]):
        assert (ddp_script.used(command), ddp_script.starts_processes(command)) == (uses, starts)
    assert ddp_script.used(["-m", "nowhere.train"]) == ""


DIRECT = "from torch.nn.parallel import DistributedDataParallel"


@pytest.mark.parametrize(
    ("files", "uses"),
    [
        ({"train.py": "import engine", "engine.py": DIRECT}, "DistributedDataParallel"),
        ({"train.py": "from lib import core", "lib/__init__.py": "", "lib/core.py": DIRECT}, "DistributedDataParallel"),
        ({"train.py": "def f():\n import lib.core.inner", "lib/core/inner.py": DIRECT}, "DistributedDataParallel"),
        (
            {
                "train.py": "import lib",
                "lib/__init__.py": "from . import a",
                "lib/a.py": "from .b import c",
                "lib/b.py": DIRECT,
            },
            "DistributedDataParallel",
        ),
        ({"train.py": "import a", "a.py": "import b", "b.py": f"import a\n{DIRECT}"}, "DistributedDataParallel"),
        ({"train.py": "import engine\nimport paceline\npaceline.join()", "engine.py": DIRECT}, ""),
        ({"train.py": "import engine", "engine.py": f"from paceline import join\n{DIRECT}"}, ""),
        ({"train.py": "import os, nowhere", "engine.py": DIRECT}, ""),
        ({"train.py": "import engine", "engine.py": f"what is this\n{DIRECT}"}, "DistributedDataParallel"),
    ],
)
def test_what_a_script_imports_from_its_folder_is_looked_at_too(files, uses, tmp_path, monkeypatch):
    """Story: an entry script of two lines was planned as if it called paceline.join, and refused as it did not."""
    for name, text in files.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert ddp_script.used(["code/train.py"]) == uses
    monkeypatch.chdir("code")
    assert ddp_script.used(["train.py"]) == ddp_script.used(["-m", "train"]) == uses


@pytest.mark.parametrize(
    ("plan", "alone", "starter"), [("auto", True, "script"), ("auto", False, "run"), ("processes:2", True, "run")]
)
def test_a_script_of_lightnings_is_given_ranks_unless_it_is_one_node_alone(plan, alone, starter, tmp_path, monkeypatch):
    monkeypatch.setenv(import_hook.STARTED_BY, "a launcher before")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import lightning\nlightning.Trainer(devices=2)")
    prepare.plan_of_ddp(["train.py"], plan, alone)
    assert os.environ[import_hook.STARTED_BY] == starter
