"""Methods of one's own, without a fork: an object, "package.module:Class", or a package that brings them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import launching
import paceline
from paceline import registry, session
from paceline.cli import report
from paceline.codec import topk
from paceline.engine import sequential
from paceline.environment import LaunchEnvironment
from paceline.exchange import allreduce
from paceline.launch.machine import Machine
from paceline.planner import candidates
from paceline.report.record import read

DOCS = Path(__file__).parents[2] / "docs"
# of each kind: a name, the page that shows its module, its description in `paceline list`, and how it is used
METHODS = {
    "codec": (
        "strange_sign",
        "adding-a-codec.md",
        "Signs times the mean magnitude; lossy, use under feedback",
        "feedback/{}",
    ),
    "exchange": ("strange_plain", "adding-an-exchange.md", "All-reduce of whole gradients after backward, .*", "{}"),
    "engine": (
        "strange_recompute",
        "adding-an-engine.md",
        "One process that recomputes activations in backward.*",
        "{}:2",
    ),
}
WIRE = '"""Gloo under another name."""\n\nfrom paceline.link import gloo\n\n\nclass Link(gloo.Link):\n    pass\n'
SCRIPT = """
import sys, torch, paceline
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8, codec=sys.argv[1],
                   engine="sequential", folder=sys.argv[2]) as pace:
    pace.step((torch.ones(8, 4), torch.arange(8) % 3))
    pace.save()
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder of modules that is on the path, as an installed package is."""
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "__init__.py").touch()
    (tmp_path / "stranger" / "wire.py").write_text(WIRE)
    points = "[paceline.link]\nwire = stranger.wire\n"
    for kind, (name, page, *_) in METHODS.items():
        shown = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[0]
        (tmp_path / "stranger" / f"{name}.py").write_text(shown)
        points += f"[paceline.{kind}]\n{name} = stranger.{name}\nbroken = stranger.nowhere\n"
    about = tmp_path / "stranger-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "stranger"]:  # of another test's folder
        monkeypatch.delitem(sys.modules, name)
    registry._installed.cache_clear()
    yield tmp_path
    registry._installed.cache_clear()


def join(**words):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = {"engine": "sequential", **words}
    return paceline.join(model, optimizer, F.cross_entropy, batch_size=8, **words)


def test_objects_are_used_as_they_are(tmp_path):
    class Codec(topk.Codec):
        pass

    made = sequential.Engine(), allreduce.Exchange("bytes"), Codec(0.5)
    with join(engine=made[0], exchange=made[1], codec=made[2], folder=tmp_path) as pace:
        assert (pace.run.engine, pace.exchange, pace.run.codec) == made
        assert pace.run.methods["codec"].endswith("Codec")
        pace.step((torch.ones(8, 4), torch.arange(8) % 3))
    event = next(event for event in read(tmp_path) if event["event"] == "join")
    assert event["codec"].endswith("test_objects_are_used_as_they_are.<locals>.Codec")
    assert event["exchange"] == "paceline.exchange.allreduce:Exchange"


def test_a_class_of_a_module_takes_options_and_may_be_wrapped(stranger):
    codec = registry.parse("codec", "stranger.strange_sign:Codec")
    assert codec.needs_feedback
    assert registry.parse("codec", "feedback/stranger.strange_sign:Codec").inner.needs_feedback
    with pytest.raises(ValueError, match=r"codec 'stranger.strange_sign:Codec': too many positional arguments"):
        registry.parse("codec", "stranger.strange_sign:Codec:3")
    assert registry.says("codec", "stranger.strange_sign:Codec", "fidelity") == "approximate"
    assert registry.head("stranger.strange_sign:Codec:keep=1") == ("stranger.strange_sign:Codec", "keep=1")
    assert registry.current("codec", "stranger.strange_sign:Codec") == "stranger.strange_sign:Codec"
    with join(codec="feedback/stranger.strange_sign:Codec") as pace:
        assert pace.run.methods["codec"] == "feedback/stranger.strange_sign:Codec"


@pytest.mark.parametrize("kind", METHODS)
def test_an_entry_point_and_text_name_the_same_class(stranger, kind):
    name, *_, used = METHODS[kind]
    text = f"stranger.{name}:{kind.title()}"
    for given in (used.format(name), used.format(text)):
        with join(**{kind: given}) as pace:
            found = {"codec": pace.run.codec, "exchange": pace.exchange, "engine": pace.engine}[kind]
            found = getattr(found, "inner", found)
            assert (type(found).__module__, type(found).__name__) == (f"stranger.{name}", kind.title())
            pace.step((torch.ones(8, 4), torch.arange(8) % 3))
            # nodes compare them when they start
            assert pace.run.methods.get(kind) == (None if kind == "engine" else used.format(text))
    with pytest.raises(ValueError, match=rf"no {kind} named '{name}x'; known: .*did you mean '{name}'\?"):
        join(**{kind: f"{name}x"})
    assert registry.says(kind, name, "fidelity") == registry.says(kind, text, "fidelity")


@pytest.mark.parametrize("name", ["wire", "wyre", "stranger.wire:Link"])
def test_a_link_is_chosen_by_its_entry_point(stranger, name, monkeypatch):
    """Text is refused, with the names of all links between nodes."""
    monkeypatch.setenv("PACELINE_LINK", name)
    world, model = LaunchEnvironment(num_nodes=2), torch.nn.Linear(4, 3)
    if name == "wire":
        assert session._link(world, model) == name
        assert registry.module("link", name).Link.__module__ == "stranger.wire"
        return
    with pytest.raises(ValueError, match=r"PACELINE_LINK='.*' is no link between nodes; use gloo, .*, wire, or unset"):
        session._link(world, model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("stranger.nowhere:Codec", r"codec stranger\.nowhere:Codec: No module named .*; accepted: package"),
        ("stranger.strange_sign:Nothing", r"cannot get codec stranger\.strange_sign:Nothing: .*no attribute 'Nothing'"),
        ("pathlib:Path", r"codec pathlib:Path is no class of paceline\.contract\.Codec"),
        ("Sign Codec", r"codec 'Sign Codec' is not of the form name\[:option,\.\.\.\].* package\.module:Class"),
        (3, r"codec is a name such as 'none', 'package\.module:Class', or an object of .*Codec, got 3"),
        (topk.Codec, r"codec is a name such as 'none', .*, got <class 'paceline\.codec\.topk\.Codec'>"),
    ],
)
def test_what_is_no_method_is_told_at_join(stranger, given, said):
    with pytest.raises(ValueError, match=said):
        join(codec=given)


@pytest.mark.parametrize("kind", ["exchange", "engine"])
def test_a_method_of_another_kind_is_told_at_join(stranger, kind):
    with pytest.raises(
        ValueError, match=rf"{kind} stranger\.strange_sign:Codec is no class of paceline\.contract\.{kind.title()}"
    ):
        join(**{kind: "stranger.strange_sign:Codec"})


def test_an_engine_that_counts_anything_leaves_the_plan_its_configurations(stranger):
    """Story: `paceline plan` ended with an error of its own where a package's engine counted something new."""
    path = stranger / "stranger" / "strange_recompute.py"
    before = candidates.planned()
    path.write_text(re.sub(r"(class Engine.*\n)", r"\1    counts = 'segment'\n\n", path.read_text()))
    registry._installed.cache_clear()
    assert registry.says("engine", "strange_recompute", "counts") == "segment"
    assert set(candidates.planned()) == set(before)
    assert candidates.planned()[-1] == "strange_recompute"
    machine, facts = Machine(cores=2, physical_cores=2), candidates.JobFacts(rows=8)
    assert "strange_recompute" not in candidates.candidates("exact", machine, facts, ())
    assert not candidates.predictable("strange_recompute")


@pytest.mark.parametrize("kind", [*METHODS, "link"])
def test_methods_of_packages_are_listed(stranger, kind, capsys):
    name, _, described, _ = METHODS.get(kind, ("wire", "", "Gloo under another name", ""))
    report.list_()
    listed = capsys.readouterr().out
    assert re.search(rf"^{kind} +{name} +{described}$", listed, re.MULTILINE)
    assert "broken" not in listed


@pytest.mark.dear
def test_a_package_adds_methods_by_entry_points(stranger, tmp_path):
    """Listed with its sentence, hinted at after a typing error, trained with; a broken one is not listed."""
    environment = {**os.environ, "PYTHONPATH": launching.python_path(stranger)}

    def call(*words, code=0):
        command = [sys.executable, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    listed = call("-m", "paceline", "list")
    assert re.search(r"^codec +strange_sign +Signs times the mean magnitude; lossy, use under feedback$", listed, re.M)
    assert "broken" not in listed
    (tmp_path / "script.py").write_text(SCRIPT)
    call(str(tmp_path / "script.py"), "feedback/strange_sign", str(tmp_path / "run"))
    (event,) = (event for event in read(tmp_path / "run") if event["event"] == "join")
    assert event["codec"] == "feedback/strange_sign"
    assert "did you mean 'strange_sign'?" in call(
        str(tmp_path / "script.py"), "strange_sing", str(tmp_path / "other"), code=1
    )
