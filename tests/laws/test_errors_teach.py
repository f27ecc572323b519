"""A user's mistake is answered with what was given and what would be accepted, all faults at once, in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import paceline
from paceline import cli, registry
from paceline.checkpoint.checkpoint import CheckpointError
from paceline.codec import feedback, half, topk
from paceline.job import Job
from paceline.planner import planner as planning
from paceline.session import LaunchEnvironment

PLUGINS = [(room, name) for room in registry.ROOMS for name in registry.names(room)]

# Names.


@pytest.mark.parametrize(("room", "name"), PLUGINS)
def test_a_slip_of_the_finger_is_told_the_near_name_and_all_known_ones(room, name):
    for slip in (name + name[-1], name[:-1]):
        with pytest.raises(ValueError, match=f"named {slip!r}") as raised:
            registry.find(room, slip)
        assert f"did you mean {name!r}?" in str(raised.value)
        assert f"known: {', '.join(registry.names(room))};" in str(raised.value)


@pytest.mark.parametrize("room", registry.ROOMS)
def test_a_name_like_no_other_is_told_the_known_ones_and_no_guess(room):
    for look in (registry.find, registry.module, registry.parse):
        with pytest.raises(ValueError, match="named 'zzzzzzzz'") as raised:
            look(room, "zzzzzzzz")
        assert all(name in str(raised.value) for name in registry.names(room))
        assert "did you mean" not in str(raised.value)


# Options.


@pytest.mark.parametrize(
    ("text", "given", "accepted"),
    [
        ("topk:kep=0.1", "kep", "keep"),
        ("topk:0.1,0.2", "too many", "keep"),
        ("half:typ=fp16", "typ", "type"),
        ("none:keep=1", "keep", "no options"),
        ("feedback/topk:kep=0.1", "kep", "keep"),
    ],
)
def test_a_wrong_option_is_told_the_accepted_ones(text, given, accepted):
    with pytest.raises(ValueError, match=rf"codec '\w+': .*{given}.*; it accepts: {accepted}"):
        registry.parse("codec", text)


@pytest.mark.parametrize(
    ("text", "given", "accepted"),
    [
        ("topk:keep=0", "keep=0", "0 < keep <= 1"),
        ("topk:keep=2.5", r"keep=2\.5", "0 < keep <= 1"),
        ("topk:keep=much", "much", "0 < keep <= 1"),
        ("topk:keep=", "keep=", "0 < keep <= 1"),
        ("topk:keep", "keep", "0 < keep <= 1"),
        ("half:fp8", "'fp8'", "bf16, fp16"),
        ("feedback", "feedback", "feedback/topk:keep=0.01"),
        ("feedback:0.1", "feedback", "feedback/topk:keep=0.01"),
    ],
)
def test_a_wrong_value_is_told_the_accepted_ones(text, given, accepted):
    with pytest.raises(ValueError, match=given) as raised:
        registry.parse("codec", text)
    assert accepted in str(raised.value)


@pytest.mark.parametrize("text", ["threads:0", "threads:-1", "threads:many", "threads:1.5"])
def test_a_wrong_count_of_threads_is_told_what_counts(text):
    with pytest.raises(ValueError, match=r"k >= 1") as raised:
        registry.parse("engine", text)
    assert text.partition(":")[2] in str(raised.value)


# Forms.


def test_every_form_is_understood():
    assert isinstance(registry.parse("codec", "topk"), topk.Codec)
    assert registry.parse("codec", "topk:keep=0.25").keep == 0.25
    assert registry.parse("codec", "topk:0.25").keep == 0.25
    assert registry.parse("codec", " topk: keep = 0.25 ").keep == 0.25
    assert registry.parse("codec", "half:fp16").type == registry.parse("codec", "half:type=fp16").type == torch.float16
    assert isinstance(registry.parse("codec", "half"), half.Codec)
    wrapped = registry.parse("codec", "feedback/topk:keep=0.25")
    assert isinstance(wrapped, feedback.Codec)
    assert wrapped.inner.keep == 0.25
    assert registry.parse("codec", "feedback/feedback/topk:keep=0.25").inner.inner.keep == 0.25
    assert isinstance(registry.parse("engine", "threads:3").num_threads, int)


@pytest.mark.parametrize("text", ["", " ", ":", "topk:", ":keep=1", "top k", "top-k:keep=1", "/topk", "topk keep=1"])
def test_a_malformed_text_is_shown_the_form(text):
    with pytest.raises(ValueError, match="is not of the form") as raised:
        registry.parse("codec", text)
    assert repr(text) in str(raised.value)
    assert "name[:option,...][/inner]" in str(raised.value)
    assert registry.parse("codec", "topk:keep=0.01"), "the example in the error is right"


# Jobs.


def job(**changed):
    model = torch.nn.Linear(2, 1)
    good = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss": print, "batch_size": 4}
    return Job(**{**good, **changed})


FAULTS = [
    ("model", "alexnet", r"model must be a torch\.nn\.Module, got str"),
    ("optimizer", 0.1, r"optimizer must be a torch\.optim\.Optimizer or a list of these, got float"),
    ("loss", "mse", r"loss must be callable as loss\(output, target\), got str"),
    ("batch_size", 0, r"batch_size .* int >= 1, got 0"),
    ("batch_size", 2.5, r"batch_size .* int >= 1, got 2\.5"),
    ("clip", -1, r"clip .* > 0 or None, got -1"),
    ("clip", float("nan"), r"clip .* > 0 or None, got nan"),
    ("clip", "1", r"clip .* > 0 or None, got '1'"),
]


@pytest.mark.parametrize(("name", "value", "said"), FAULTS)
def test_a_faulty_argument_is_told_what_it_must_be_and_was(name, value, said):
    assert job()
    with pytest.raises(ValueError, match=said) as raised:
        job(**{name: value})
    assert str(raised.value).count(";") == 0, "something right was called wrong"


def test_all_faults_of_a_job_are_told_at_once():
    first = {name: (value, said) for name, value, said in reversed(FAULTS)}
    with pytest.raises(ValueError, match=r"^join: ") as raised:
        job(**{name: value for name, (value, _) in first.items()})
    assert len(first) == 5
    assert all(re.search(said, str(raised.value)) for _, said in first.values())


SLIPS = {
    "batch_size": (None, r"batch_size .* got None"),
    "seed": (1.5, r"seed is an int, got 1\.5"),
    "clip": (0, r"clip .* got 0"),
    "loss": (torch.nn.CrossEntropyLoss, r"loss .*the class CrossEntropyLoss itself; instantiate it"),
    "scheduler": (torch.optim.lr_scheduler.StepLR, r"scheduler .*the class StepLR itself; instantiate it"),
    "precision": ("int4", r"precision .* got 'int4'"),
    "batch_norm": ("global", r"batch_norm .* got 'global'"),
    "buffers": ("mean", r"buffers is 'own' or 'broadcast', got 'mean'"),
    "accumulate": (0, r"accumulate .* got 0"),
    "engine": ("thread:2", r"no engine named 'thread'.*did you mean 'threads'"),
    "exchange": ("allreduced", r"no exchange named 'allreduced'"),
    "codec": ("topk:keep=2", r"0 < keep <= 1"),
    "overlap": ("sideways", r"overlap is one of backward, forward, got 'sideways'"),
    "shares": ("most", r"shares are .* got 'most'"),
    "keep": (0, r"keep is .* got 0"),
    "reproducible": ("yes", r"reproducible is .* got 'yes'"),
    "encrypt": ("tls", r"encrypt is .* got 'tls'"),
    "folder": (3, r"folder is a path or None, got 3"),
    "most_rows": (0, r"most_rows .* got 0"),
    "metric": (torch.nn.L1Loss, r"metric .*the class L1Loss itself"),
    "optimizer": (torch.optim.SGD, r"optimizer .*the class SGD itself"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_fault_that_join_can_see_is_told_before_anything_begins(name):
    """Story: seed=1.5 and a scheduler's class ended in tracebacks of torch's insides, some steps later."""
    model = torch.nn.Linear(2, 1)
    value, said = SLIPS[name]
    words = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss": print, "batch_size": 4}
    with pytest.raises(ValueError, match=rf"^join: .*{said}"):
        paceline.join(model, **{**words, name: value})


def test_twenty_faults_at_once_are_all_named():
    model = torch.nn.Linear(2, 1, device="meta")
    with pytest.raises(ValueError, match=r"^join: .*on the meta device") as raised:
        paceline.join(model, **{name: value for name, (value, _) in SLIPS.items()})
    assert [name for name, (_, said) in SLIPS.items() if not re.search(said, str(raised.value))] == []
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: torch.jit.script(torch.nn.Linear(2, 1)), r"the model is a torch\.jit\.ScriptModule"),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.jit.script(torch.nn.Linear(2, 1))),
            r"layer '1' is a torch\.jit\.ScriptModule",
        ),
        (lambda: torch.nn.Linear(2, 1, device="meta"), r"2 of the model's tensors, 'weight' the first, .* meta device"),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1, device="meta", affine=False)),
            r"3 of the model's tensors, '1\.running_mean' the first",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.script's own
def test_a_model_that_cannot_be_trained_here_is_told_why(model, said):
    built = model()
    with pytest.raises(ValueError, match=rf"^join: .*{said}"):
        paceline.join(built, torch.optim.SGD(built.parameters(), 0.1), print, batch_size=4)


@pytest.mark.parametrize("place", ["scheduler", "precision"])
def test_a_grad_scaler_that_is_passed_is_told_to_stay_out(place):
    with pytest.raises(ValueError, match=r"'fp16' scales the loss by itself"):
        job(**{place: torch.amp.GradScaler("cpu")})


def test_an_optimizer_of_another_model_and_a_model_without_parameters_are_told():
    other = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="holds 2 parameters of another model"):
        job(optimizer=torch.optim.SGD(other.parameters(), 0.1))
    frozen = torch.nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        job(model=frozen, optimizer=torch.optim.SGD(frozen.parameters(), 0.1))


def test_a_model_whose_sizes_are_not_known_yet_is_told():
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    optimizer = torch.optim.SGD(lazy.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"lazy layers.*call it on a batch.*before join"):
        job(model=lazy, optimizer=optimizer)
    with torch.no_grad():
        lazy(torch.zeros(2, 5))
    assert job(model=lazy, optimizer=optimizer)


def test_a_loss_with_parameters_is_told_where_they_belong():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return (self.scale * (output - target)).square().mean()

    model, loss = torch.nn.Linear(2, 1), Scaled()
    both = [*model.parameters(), *loss.parameters()]
    with pytest.raises(ValueError, match=r"parameters of the loss.*model\.criterion = loss"):
        job(model=model, loss=loss, optimizer=torch.optim.SGD(both, 0.1))
    model.criterion = loss
    assert job(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))


# The launcher's environment.

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launched(monkeypatch):
    def environment(**variables):
        for name in RANKS:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return LaunchEnvironment.of_environment()

    return environment


def test_every_rank_of_a_launcher_is_placed(launched):
    assert launched() == LaunchEnvironment()
    for rank in range(6):
        meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
        world = launched(RANK=str(rank), WORLD_SIZE="6", LOCAL_WORLD_SIZE="2", **meeting)
        assert world == LaunchEnvironment(rank % 2, 2, rank // 2, 3, "10.0.0.1", 29500)
    assert launched(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") == LaunchEnvironment(1, 2, 0, 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "one"}, "RANK='one'.* whole number"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE='-2'.* whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'.* whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2.*RANK must be below WORLD_SIZE"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE=3, .*LOCAL_WORLD_SIZE=2.*same number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1"),
        ({"GROUP_RANK": "1"}, "GROUP_RANK=1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "several nodes.*MASTER_ADDR and MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "295000"},
            "MASTER_PORT=295000 is no port; give",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_told_its_values(launched, variables, said):
    with pytest.raises(ValueError, match=said):
        launched(**variables)


# The command line.


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "trains.py"
    path.write_text(
        "import torch, paceline\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "paceline.join(model, optimizer, torch.nn.functional.mse_loss, batch_size=2)\n"
    )
    return path


@pytest.mark.dear("engine proceses:2", "engine threads:many")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--model", "alexnett"], r"named 'alexnett'; known: .*; did you mean 'alexnet'\?"),
        (["run", "missing.py"], r"no script at 'missing\.py'; give the path"),
        (["run", "--codecs", "half", __file__], r"no option '--codecs' here: --help lists"),
        (["run", "--engine", "proceses:2", "SCRIPT"], r"named 'proceses'; known: .*; did you mean 'processes'\?"),
        (["run", "--engine", "threads:many", "SCRIPT"], r"many"),
        (["run", "--engine", "threads:count=2", "SCRIPT"], r"count.*; it accepts: num_threads"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_command_answers_in_one_line_with_exit_code_2(words, said, script, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in RANKS}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *(str(script) if word == "SCRIPT" else word for word in words)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert re.fullmatch(rf"paceline: .*{said}.*\n", done.stderr), done.stderr
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == [script], "something was left behind"


@pytest.mark.parametrize(
    "command", [["run", "SCRIPT"], ["train"], ["verify", "SCRIPT"], ["plan", "SCRIPT"], ["doctor"]]
)
def test_hosts_of_a_variable_that_is_not_set_are_no_reason_to_train_here(command, script):
    words = [str(script) if word == "SCRIPT" else word for word in command]
    done = CliRunner().invoke(cli.app, [words[0], "-H", "", *words[1:]])
    assert re.match(r"-H was given '', which names no host", str(done.exception))


def test_where_a_launcher_has_started_several_none_of_them_starts_a_run_of_its_own(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(cli.app, ["run", str(script)])
    assert re.match(r"`paceline run` starts all .* as one of 2 .*give that launcher the script", str(done.exception))


@pytest.mark.parametrize("option", ["--batch-size=4", "--model=alexnet", "--data=photos"])
def test_options_of_train_before_a_script_are_not_taken_for_the_scripts(option, script):
    done = CliRunner().invoke(cli.app, ["plan", option, str(script)])
    assert re.match(rf"{option.partition('=')[0]} before the script belongs to `paceline train`", str(done.exception))


def test_a_plan_that_cannot_be_written_is_not_measured_first(script, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(planning, "make", lambda *given, **more: measured.append(1))
    for out, said in (
        (script / "plan.toml", r"plan\.toml .*; give another --out"),
        (tmp_path, "a folder; give"),
    ):
        done = CliRunner().invoke(cli.app, ["plan", "--out", str(out), str(script)])
        assert re.match(rf"the plan cannot be written to .*{said}", str(done.exception))
    assert not measured


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words = {"batch_size": 2, "engine": "sequential", "folder": tmp_path / "file" / "run"}
    with pytest.raises(CheckpointError, match=r"the run's folder .*file/run cannot be written on .*; give another"):
        paceline.join(model, optimizer, torch.nn.functional.mse_loss, **words)


def test_a_codec_that_would_be_ignored_is_refused():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words = {"batch_size": 2, "engine": "sequential", "exchange": "local_sgd:4", "codec": "half"}
    with pytest.raises(ValueError, match="'local_sgd:4' sends weights as they are and takes no codec, got 'half'"):
        paceline.join(model, optimizer, torch.nn.functional.mse_loss, **words)


def test_virtual_shares_are_added_up_in_their_own_order_or_refused():
    """Story: layers' factors met an assertion inside of backward, and dense sums other bits on other nodes."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words = {"batch_size": 4, "engine": "reproducible:4", "exchange": "allreduce:forms=dense"}
    with pytest.raises(
        ValueError, match="'allreduce:forms=dense' adds them up in another order; use exchange='ordered'"
    ):
        paceline.join(model, optimizer, torch.nn.functional.mse_loss, **words)


def test_where_nodes_may_be_lost_statistics_of_all_need_an_exchange_that_agrees_each_step(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "PACELINE_NODES": "1:2"}.items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    words = {"batch_size": 2, "engine": "sequential", "exchange": "local_sgd:4", "batch_norm": "sync"}
    with pytest.raises(ValueError, match=r"an exchange that votes on each step, such as allreduce.* 'local_sgd:4'"):
        paceline.join(model, optimizer, torch.nn.functional.mse_loss, **words)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("field", "other"), [("batch_size", "batch_size=12"), ("model", "batch_size=8"), ("clip", "clip=1.0")]
)
def test_nodes_with_different_jobs_are_told_what_differs(tmp_path, field, other):
    """Story: two nodes trained on mismatched batches, or aborted inside the network library."""
    script = tmp_path / "differs.py"
    script.write_text(
        "import os, torch, paceline\n"
        "first = os.environ['RANK'] == '0'\n"
        f"model = torch.nn.Linear(4, 2 if first or {field != 'model'} else 3)\n"
        "words = {'batch_size': 8, 'engine': 'sequential'}\n"
        f"words |= {{}} if first else dict({other})\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "paceline.join(model, optimizer, torch.nn.functional.cross_entropy, **words)\n"
    )
    start = "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[1:], 'sequential', 2))"
    command = [sys.executable, "-c", start, sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count(f"the nodes were given different {field}: rank") == 2, done.stderr


@pytest.mark.parametrize("words", [["run", __file__], ["train"], ["plan", __file__], ["verify", __file__], ["doctor"]])
def test_hosts_given_one_by_one_are_one_list(words, monkeypatch, capsys, tmp_path):
    """Of several -H the last one alone once counted, and training went on without the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paceline", words[0], "-H", "bad!", "--hosts", "two,wor$e", *words[1:]])
    with pytest.raises(SystemExit):
        cli.main()
    assert "-H bad!,two,wor$e: 'bad!' is no host name; 'wor$e' is no host name" in capsys.readouterr().err
