"""Over hosts: measured there, predicted, tried, answered in a sentence, written, kept, and obeyed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from test_overlap_predicts import line
from torch import nn

from needs import needs
from paceline.cli.over_ssh import MAX_PLAN_BYTES, carried_plan, planned
from paceline.job import Job
from paceline.launch.hosts import Host, Way, parse
from paceline.planner import plan_cache
from paceline.planner.cluster import START_LIMIT_S, imagine, make_over
from paceline.planner.cluster_survey import UNMEASURED, Node, Survey, assign_samples
from paceline.planner.measure import node_agent
from paceline.planner.measure.network import NetworkMeasurement, Pair
from paceline.planner.measure.profile import Recording
from paceline.planner.measure.trial import Trial
from paceline.planner.plan_file import Between, Plan, Row
from paceline.planner.planner import MIN_BUDGET_S
from paceline.planner.step_model import LayerTiming
from paceline.planner.teams import Team, WhatIf, answer, duration, rate
from paceline.report.page.bars import predicted_s
from paceline.report.page.run import load
from sshd import Sshd, unavailable

pytestmark = pytest.mark.long

SCRIPT = """
import sys, torch, paceline
from torch.nn import functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
data = torch.utils.data.TensorDataset(torch.randn(640, 256), torch.randint(0, 10, (640,)))
data = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with paceline.join(model, optimizer, F.cross_entropy, batch_size=64) as pace:
    print("row", pace.row)
    for batch in pace.batches(data):
        pace.step(batch)
"""
TWO = Team(2, "a,b", "shared", 64, predicted_speedup=1.97, measured_speedup=1.94, predicted_s=0.1)


def paceline(*words, code=0, cwd=None, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The variables of a launcher whose hosts keep a plan of their own: only what they do together is measured."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with Sshd() as server:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(server.folder))
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), None, 64)
        mark = plan_cache.fingerprint(job, "exact", [("torch.float32", (256,)), ("torch.int64", ())])
        kept = Plan("sequential", rows=(Row("sequential", measured_s=0.01, spread_s=0.001),), fingerprint=mark)
        plan_cache.store(kept, ["script.py"], plan_cache.survey())
        yield {"PACELINE_SSH": server.ssh, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.dear
@needs(sshd=unavailable())
def test_a_plan_over_hosts_is_measured_answered_written_kept_and_obeyed(tmp_path, own):
    options = ["--budget", 1, "--what-if", "nodes=8,link=10gbit,latency=1ms"]
    words = ["plan", "-H", "one,two", *options, "--json", "--out", "plan.toml", "script.py"]
    told = json.loads(paceline(*words, cwd=tmp_path, **own).stdout)
    alone, shared, each, *imagined = told["teams"]
    assert (alone["nodes"], alone["measured_speedup"], alone["batch_size"]) == (1, 1.0, 64)
    assert alone["hosts"] in ("one", "two")
    for team, kind, batch in ((shared, "shared", 64), (each, "each", 128)):
        assert (team["nodes"], team["batch"], team["batch_size"]) == (2, kind, batch)
        assert sorted(team["hosts"].split(",")) == ["one", "two"]
        assert team["predicted_s"] > 0
        assert team["measured_s"] > 0, team["reason"]
        assert team["per_s"] == pytest.approx(batch / team["measured_s"])
        assert team["sent_bytes"] > 0
        assert re.fullmatch("[01] of 1", team["factors"])  # the second is too small to
        assert re.fullmatch(r"0\.weight (dense|factors): as factors .* MB, .* ms .*, dense .*", team["forms"])
    assert [(team["nodes"], team["hosts"], team["measured_s"]) for team in imagined] == [(8, "", None)] * 2
    assert {team["link"] for team in imagined} == {"10gbit, 1ms latency"}
    assert imagined[0]["exposed_s"] > 0.001
    assert told["num_nodes"] in (1, 2)
    first, *others = told["methods"]
    assert (first["exchange"], first["codec"], first["nodes"], first["reason"]) == ("allreduce", "none", 2, "chosen")
    assert first["predicted_s"] == {64: shared, 128: each}[first["batch_size"]]["predicted_s"]
    assert all(other["predicted_s"] > 0 for other in others), [other["reason"] for other in others]
    assert ("is worth it: " in told["reason"]) == (told["num_nodes"] == 2)
    assert told["hosts"] == {"one": "sequential", "two": "sequential"}
    assert json.loads(Plan.read(tmp_path / "plan.toml").to_json()) == told
    done = paceline("run", "-H", "one,two", "--out", "mine", "script.py", cwd=tmp_path, **own)
    used = list(told["hosts"])[: told["num_nodes"]]
    said = [line for line in sorted(done.stdout.splitlines()) if not line.startswith("run: ")]
    assert said == [f"[{name}] row sequential" for name in sorted(used)]
    assert Plan.read(tmp_path / "mine" / "plan.toml") == Plan.read(tmp_path / "plan.toml")
    foretold = shared["predicted_s"] if len(used) == 2 else 0.0
    assert predicted_s(load(tmp_path / "mine")) == pytest.approx(foretold, rel=1e-5)  # a record rounds
    left = [name for name in told["hosts"] if name not in used]
    assert ("not started: " in done.stderr) == bool(left)
    assert f"plan: sequential ({told['reason']}; measured {told['date']})" in done.stderr


@pytest.mark.dear
@needs(sshd=unavailable())
@pytest.mark.timeout(400)
def test_a_plan_over_three_real_hosts_tries_two_and_three(tmp_path, own):
    words = ["plan", "-H", "one,two,three", "--budget", 1, "--json", "script.py"]
    told = json.loads(paceline(*words, cwd=tmp_path, **own).stdout)
    _, *teams = told["teams"]
    assert [(team["nodes"], team["batch"]) for team in teams] == [(n, b) for b in ("shared", "each") for n in (2, 3)]
    assert all(team["measured_s"] for team in teams), [team["reason"] for team in teams]
    names = [{pair["one"], pair["other"]} for pair in told["pairs"]]
    assert names == [{"one", "two"}, {"one", "three"}, {"two", "three"}]
    assert all(pair["latency_s"] > 0 and pair["bytes_per_s"] > 0 for pair in told["pairs"])


@pytest.mark.parametrize(("mark", "chosen"), [("known", "sequential"), ("another", "threads:2")])
def test_a_kept_plan_counts_where_it_is_of_what_the_script_trains_now(monkeypatch, mark, chosen):
    """Story: a model in a file of its own was changed, and the new step scaled to the old one's seconds."""
    recorded = []

    def lines(command, row, *_):
        recorded.append(row)
        return Recording(line(), line(), 64, mark)

    monkeypatch.setattr(node_agent.planning, "cached", lambda *_: (Plan("sequential", fingerprint="known"), ""))
    monkeypatch.setattr(node_agent.planning, "make", lambda *_, **__: Plan("threads:2", fingerprint=mark))
    monkeypatch.setattr(node_agent.profile, "record_step_models", lines)
    assert node_agent.measure_node(["x.py"])["plan"]["chosen"] == chosen
    assert recorded == list(dict.fromkeys(["sequential", chosen]))


class Told:
    """Hosts a, b and c as they would answer; b is slower, and far from a."""

    WIRES = NetworkMeasurement(3, (Pair(0, 1, 5e-3, 1e7), Pair(0, 2, 1e-4, 1e9), Pair(1, 2, 1e-4, 1e9)))

    def __init__(self, collective=""):
        self.wires, self.tried = dataclasses.replace(self.WIRES, collective=collective), []

    def query(self, hosts, asked, limit_s, options=()):
        names = [host.name for host in hosts]
        if asked["do"] == "wire":
            met = tuple(pair for pair in self.wires.pairs if pair.other < len(hosts))
            said = dict.fromkeys(names, dataclasses.replace(self.wires, size=len(hosts), pairs=met).to_dict())
        elif asked["do"] == "node":
            said = {name: node_said(plain(name, step_s=0.2 if name == "b" else 0.1)) for name in names}
        else:
            plan = Plan.read(options[options.index("--plan") + 1])
            assert plan.hosts == dict(zip(names, asked["rows"], strict=True))
            self.tried.append((",".join(names), asked["times"], options[options.index("--shares") + 1]))
            said = {name: dataclasses.asdict(self.trial(32 * asked["times"])) for name in names}
        return json.loads(json.dumps(said))

    def trial(self, rows):
        return Trial("x", 0.05, per_s=rows / 0.05, steps_s=(0.05,) * 8)


def node_said(node):
    lines = [dataclasses.asdict(one) for one in (node.whole, node.quarter)]
    told = {"plan": node.plan.to_dict(), "batch_size": node.batch_size, "lines": lines}
    return told | {"methods": [dataclasses.asdict(each) for each in node.methods]}


def test_of_three_hosts_two_and_all_are_tried_with_the_batch_shared_and_with_more(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    far, command = Told(), ["x.py"]
    plan, _ = make_over([Host(name, name) for name in "abc"], far, command)
    assert sorted(far.tried) == [
        ("a,c", 1, "equal"),
        ("a,c", 2, "equal"),
        ("a,c,b", 1, "14,13,5"),
        ("a,c,b", 3, "39,39,18"),
    ]
    assert [(team.hosts, team.measured_s) for team in plan.teams[1:]] == [("a,c", 0.05), ("a,c,b", 0.05)] * 2
    assert plan.pairs == (Between("a", "b", 5e-3, 1e7), Between("a", "c", 1e-4, 1e9), Between("b", "c", 1e-4, 1e9))
    assert plan_cache.cached_over(list("abc"), command, "exact").pairs == plan.pairs
    assert json.loads(plan.to_json())["pairs"][0] == {
        "one": "a",
        "other": "b",
        "latency_s": 5e-3,
        "bytes_per_s": 1e7,
    }


def test_hosts_that_add_up_by_another_collective_are_predicted_by_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    part = LayerTiming("dense", 1_000_000, dense_s=0.01)
    monkeypatch.setattr(sys.modules[__name__], "PARTS", (part,))  # of the lines that hosts tell
    for name, in_sequence in (("", 4 / 3 * 4e6), ("ring", 4 / 3 * 4e6), ("binomial", 16e6)):
        plan, _ = make_over([Host(host, host) for host in "abc"], Told(name), ["x.py"])
        (three,) = (team for team in plan.teams if team.nodes == 3 and team.batch == "shared")
        steps = 2 * 2
        assert three.exposed_s == pytest.approx(in_sequence / 1e7 + (steps + 2) * 5e-3, rel=0.05), name


def test_one_host_has_no_link_and_imagines_none_without_a_rate(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="add its rate"):
        make_over([Host("a", "a")], Told(), ["x.py"], what_if=[WhatIf.parse("nodes=4")])
    for words, told in (
        ("nodes=4,link=1gbit", "; latency assumed 0.2 ms, and 0.9 ns of work per byte"),
        ("nodes=4,link=1gbit,latency=5ms", "; 0.9 ns of work per byte assumed"),
    ):
        _, sentence = make_over([Host("a", "a")], Told(), ["x.py"], what_if=[WhatIf.parse(words)])
        assert sentence.endswith(told)


def test_over_a_measured_wire_nothing_is_assumed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hosts = [Host(name, name) for name in "ab"]
    plan, sentence = make_over(hosts, Told(), ["x.py"], what_if=[WhatIf.parse("nodes=4,link=1gbit")])
    assert {team.assumed for team in plan.teams} == {""}
    assert "assumed" not in sentence


@pytest.mark.dear
def test_machines_like_this_one_are_imagined_from_its_own_step(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Plan("sequential", rows=(Row("sequential", measured_s=0.02),), versions=plan_cache.versions())
    what_if = [WhatIf.parse(f"nodes={n},link={link}") for n, link in ((2, "1gbit"), (2, "100gbit"), (16, "1mbit"))]
    plan, sentence = imagine(made, [str(tmp_path / "script.py")], what_if, 2.0)
    assert (plan.chosen, plan.num_nodes) == ("sequential", None)
    alone, *teams = plan.teams
    assert alone.measured_s == 0.02
    assert [(team.nodes, team.batch) for team in teams] == [(n, b) for n in (2, 2, 16) for b in ("shared", "each")]
    assert all(team.predicted_s and not team.measured_s and not team.hosts for team in teams)
    slow, fast = teams[1], teams[3]
    assert slow.predicted_s >= fast.predicted_s
    assert teams[4].predicted_speedup < 1
    assert "would be" in sentence
    assert sentence.endswith("; latency assumed 0.2 ms, and 0.9 ns of work per byte")
    with pytest.raises(ValueError, match="without -H there is none to measure; add its rate"):
        imagine(made, ["script.py"], [WhatIf.parse("nodes=4")])


PARTS = ()


def plain(name, chosen="threads:2", step_s=0.1, **more):
    rows = (Row(chosen, measured_s=step_s), *(Row(row, measured_s=s) for row, s in more.items()))
    whole = line(*PARTS, forward_s=0.09, update_s=0.01, factored_s=0.01, rows=32)
    return Node(name, Plan(chosen, rows=rows), 32, whole, whole.at(8))


def test_equal_machines_get_equal_shares_and_others_shares_by_their_speed():
    rows = ("threads:2", "threads:2")
    assert assign_samples(33, [plain("a"), plain("b", step_s=0.105)], rows) == (17, 16)
    assert assign_samples(32, [plain("a"), plain("b", step_s=0.3)], rows) == (26, 6)


def test_several_machines_are_held_against_the_best_way_of_the_best_one(tmp_path, monkeypatch):
    """Story: machines with unlike rows were asked together and alone by threads, which was slower than one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slow = plain("a", "processes:2", 0.30, **{"threads:2": 0.5})
    fast = plain("b", "processes:4+channels_last", 0.15, **{"threads:4": 0.25})
    survey = Survey([slow, fast], lambda count: UNMEASURED.with_link(1e10), real=True)
    assert (survey.alone.engines, survey.alone.measured_s) == (fast.plan.chosen, 0.15)
    one = survey.team(2, "shared")
    assert one.rows == (fast.plan.chosen, slow.plan.chosen)
    tried = survey.with_trial(dataclasses.replace(one, trial=Trial("x", 0.145, per_s=32 / 0.145)))
    assert answer([survey.alone, tried])[0] == 1, "1.03 times as fast is not worth a machine"


def test_a_speed_is_that_of_the_rows_that_there_were():
    """600 samples are no batch of 1024, nor are those of the script's own batches of 64."""
    survey = Survey([plain(name) for name in "abcd"], lambda count: UNMEASURED.with_link(1e10), real=True)
    one = survey.team(4, "each")
    assert one.team.batch_size == 128
    team = survey.with_trial(dataclasses.replace(one, trial=Trial("x", 0.1, per_s=1000.0)))
    assert (team.per_s, team.measured_speedup) == (1000.0, 1000.0 / 320)
    assert team.efficiency == pytest.approx(1000.0 / (4 * 320))
    assert team.reason == "its steps had 100 samples, as the data set provides"


def test_a_dataset_smaller_than_the_batch_is_no_faster_alone_than_shared():
    """Story: the seconds of 100 rows were taken for those of 256, and a second machine never paid."""
    some = plain("a")
    small = [dataclasses.replace(some, name=name, batch_size=256) for name in "ab"]
    survey = Survey(small, lambda count: UNMEASURED.with_link(1e10), real=True)
    assert (survey.measured_per_s, survey.alone_per_s) == (320.0, [pytest.approx(320.0)] * 2)
    team = survey.team(2, "shared").team
    assert team.batch_size == 32
    assert 1.5 < team.predicted_speedup < 2.0
    assert survey.team(33, "shared") is None


def test_a_plan_too_long_for_an_environment_is_carried_without_what_is_longest():
    pairs = tuple(Between(f"host{i}", f"host{j}", 1e-4, 1e9) for i in range(60) for j in range(i))
    large = Plan("threads:2", num_nodes=2, hosts={"a": "threads:2"}, teams=(TWO,), pairs=pairs)
    small = dataclasses.replace(large, pairs=pairs[:3])
    assert len(large.to_toml()) > MAX_PLAN_BYTES
    assert Plan.from_toml(carried_plan(small)) == small
    assert Plan.from_toml(carried_plan(large)) == dataclasses.replace(large, pairs=())


def test_a_hosts_own_measuring_has_an_end_that_is_waited_for(tmp_path, monkeypatch):
    """Story: 5 % of a run of days was measured, and given up after 540 s, with all that had been found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limits = []

    class Timed(Told):
        def query(self, hosts, asked, limit_s, options=()):
            if asked["do"] == "node":
                limits.append((asked["budget_s"], limit_s))
            return super().query(hosts, asked, limit_s, options)

    for budget_s in (None, 60.0):
        make_over([Host(name, name) for name in "abc"], Timed(), ["x.py"], budget_s=budget_s)
    assert limits == [(MIN_BUDGET_S, START_LIMIT_S + 20 * MIN_BUDGET_S), (60.0, START_LIMIT_S + 1200.0)]


ONE = Team(1, "a", batch_size=64, predicted_speedup=1.0, measured_speedup=1.0)
TWO3 = Team(2, "a,b", "each", 128, predicted_speedup=1.9, reason="failed: lost b")
THREE = Team(3, "a,b,c", "shared", 64, predicted_speedup=2.8, measured_speedup=2.7)


@pytest.mark.parametrize(
    ("teams", "count", "sentence"),
    [
        ([TWO], 2, "the second machine is worth it: 1.97x predicted, 1.94x measured"),
        (
            [Team(2, "a,b", "shared", 64, predicted_speedup=0.9, predicted_s=0.1, exposed_s=0.05)],
            1,
            "stay on one machine: 2 are 0.90x predicted with a global batch of 64 (50 of 100 ms wait for the network)",
        ),
        (
            [
                Team(2, "a,b", "shared", 64, predicted_speedup=1.8, measured_speedup=0.7),
                Team(2, "a,b", "each", 128, predicted_speedup=1.9, measured_speedup=1.8),
            ],
            1,
            "stay on one machine: 2 are 1.80x predicted, 0.70x measured with a global batch of 64; with 128 they "
            "would be 1.90x predicted, 1.80x measured",
        ),
        (
            [TWO, Team(3, "a,b,c", predicted_speedup=1.95)],
            2,
            "2 of 3 machines are worth it: 1.97x predicted, 1.94x measured",
        ),
        ([TWO, Team(3, "a,b,c", predicted_speedup=2.9)], 3, "all 3 machines are worth it: 2.90x predicted"),
        (
            [
                Team(2, "a,b", predicted_speedup=1.8),
                Team(3, "a,b,c", predicted_speedup=2.5, measured_speedup=1.6),
                Team(4, "a,b,c,d", predicted_speedup=3.0, measured_speedup=1.5),
            ],
            3,
            "3 of 4 machines are worth it: 2.50x predicted, 1.60x measured",
        ),
        (
            [
                Team(2, "a,b", batch_size=64, predicted_speedup=1.8),
                Team(3, "a,b,c", batch_size=64, predicted_speedup=2.5, measured_speedup=0.8),
            ],
            1,
            "stay on one machine: 3 are 2.50x predicted, 0.80x measured with a global batch of 64",
        ),
        (
            [Team(8, link="1gbit", predicted_speedup=6.5)],
            1,
            "8 machines like this one over 1gbit would be 6.50x predicted",
        ),
        (
            [Team(8, link="1gbit", assumed="latency assumed 0.2 ms", predicted_speedup=6.5)],
            1,
            "8 machines like this one over 1gbit would be 6.50x predicted; latency assumed 0.2 ms",
        ),
        (
            [Team(8, link="1mbit", predicted_speedup=0.2)],
            1,
            "stay on one machine: 8 like this one over 1mbit would be 0.20x predicted",
        ),
        (
            [Team(2, "a,b", "shared", 64, predicted_speedup=1.97, reason="failed: lost b"), TWO3],
            1,
            "stay on one machine: 2 failed: lost b",
        ),
        (
            [Team(2, "a,b", "shared", 64, predicted_speedup=1.97, reason="failed: lost b"), THREE],
            3,
            "all 3 machines are worth it: 2.80x predicted, 2.70x measured",
        ),
        (
            [Team(2, "a,b", "each", 2, predicted_speedup=1.9)],
            1,
            "stay on one machine: a global batch of 1 has fewer samples than 2 nodes",
        ),
    ],
)
def test_the_answer_is_one_sentence(teams, count, sentence):
    assert answer([ONE, *teams]) == (count, sentence)


def test_a_plan_with_teams_is_written_and_read(tmp_path):
    plan = Plan("threads:2", num_nodes=2, hosts={"a.example": "threads:2", "b": "threads:4"}, teams=(ONE, TWO))
    plan.write(tmp_path / "plan.toml")
    assert Plan.read(tmp_path / "plan.toml") == plan
    assert Plan.of(json.loads(plan.to_json())) == plan
    for text, told in (("nods = 1", "did you mean 'nodes'"), ("hosts = 'a'", "lacks 'nodes'")):
        with pytest.raises(ValueError, match=rf"teams\[0\].*{told}"):
            Plan.from_toml(f"chosen = 'threads:2'\n[[teams]]\n{text}")


def test_a_kept_plan_is_found_by_hosts_and_by_what_makes_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = Plan("threads:2", versions=plan_cache.versions(), teams=(ONE, TWO))
    train = ["-m", "paceline.train.run"]
    plan_cache.store_over(plan, ["a", "b"], [*train, '{"model": "alexnet"}'])
    assert plan_cache.cached_over(["b", "a"], [*train, '{"model": "alexnet", "epochs": 5, "lr": 0.1}'], "exact") == plan
    assert plan_cache.cached_over(["a"], [*train, '{"model": "alexnet"}'], "exact") is None
    assert plan_cache.cached_over(["a"], train, "exact") is None
    assert plan_cache.cached_over(["a", "b"], [*train, '{"model": "alexnet", "batch_size": 4}'], "exact") is None
    for other in ({"clip": 1.0}, {"momentum": 0.9}):
        assert (
            plan_cache.cached_over(["a", "b"], [*train, json.dumps({"model": "alexnet", **other})], "exact") is None
        ), other
    for name, value in (
        *(("PACELINE_LINK", "tls"), ("PACELINE_ENCRYPT", "1")),
        *(("PACELINE_COLLECTIVE", "ring"), ("PACELINE_OVERLAP", "forward")),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert plan_cache.cached_over(["a", "b"], [*train, '{"model": "alexnet"}'], "exact") is None, name
    assert plan_cache.cached_over(["a", "b"], [*train, '{"model": "alexnet"}'], "exact") == plan
    plan_cache.store_over(Plan("threads:2", versions={"torch": "1"}), ["a"], ["x.py"])
    assert plan_cache.cached_over(["a"], ["x.py"], "exact") is None, "made by other versions"


def test_a_plan_says_which_hosts_start(tmp_path, monkeypatch, capsys):
    """How many were once told and not obeyed; a plan of another fidelity was taken, and one against the slots said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_ENGINE", raising=False)
    monkeypatch.chdir(tmp_path)
    rows = {"c": "threads:3", "a": "threads:1", "b": "threads:2"}
    plan = Plan("threads:3", "because", versions=plan_cache.versions(), num_nodes=2, hosts=rows)
    plan.write("plan.toml")
    plan_cache.store_over(plan, ["a", "b", "c"], ["x.py"])

    def start(hosts, asked="auto", fidelity="exact", shares=None, least=0):
        nodes, found, _ = planned(parse(hosts), asked, ["x.py"], fidelity, shares, least)
        return {node.name: row for node, row in zip(nodes, found, strict=True)}

    for asked in ("auto", "plan.toml"):
        assert start("a,b,c", asked) == {"a": "threads:1", "c": "threads:3"}
        said = "not started: b, since the plan uses 2 of 3; --plan with a configuration, such as --plan threads:3, "
        assert capsys.readouterr().err.endswith(f"{said}starts all\n")
        assert start("a,b,c", asked, shares="2,1,1") == dict(sorted(rows.items())), "each was given its share"
        assert start("a,b,c", asked, least=2) == dict(sorted(rows.items())), "as many as were asked for may be lost"
    assert start("a,b,c", "threads:4") == dict.fromkeys("abc", "threads:4")
    assert start("a:2,b,c") == {"a": "processes:2", "b": "", "c": ""}
    assert start("a,b,c", fidelity="rounded") == dict.fromkeys("abc", "")
    assert start("b,c", "plan.toml") == {"b": "threads:2", "c": "threads:3"}, "no team of the plan's"
    assert start("b", "plan.toml") == {"b": "threads:2"}


def test_what_if_is_read():
    assert WhatIf.parse("nodes=8, link=2.5gbit,latency=3ms") == WhatIf(8, 2.5e9, 0.003, "2.5gbit, 3ms latency")
    assert WhatIf.parse("latency=5ms") == WhatIf(latency_s=0.005, description="5ms latency")
    assert (rate("100mbit"), duration("2s")) == (1e8, 2.0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--what-if", "node=8"], "'node=8' is not understood; accepted: nodes=8,link=10gbit,latency=5ms"),
        (["--what-if", "nodes=1,link=1gbit"], "nodes must be a whole number from 2 to 4096, got '1'"),
        (["--what-if", "nodes=1000000000,link=1gbit"], "nodes must be a whole number from 2 to 4096"),
        (["--what-if", "nodes=²,link=1gbit"], "nodes must be a whole number from 2 to 4096, got '²'"),
        (["--nodes", "100000000", "--link", "1gbit"], "predicts 2 to 64 machines like this one"),
        (["--budget", "-1"], "--budget takes seconds above 0, got -1"),
        (["--what-if", "link=fast"], "'fast' is not a link's rate; accepted: a number above 0 and its unit"),
        (["--what-if", "nodes=2"], "without -H there is none to measure; add its rate to --what-if"),
        (["--nodes", "2"], "over --link, such as --nodes 2 --link 1gbit"),
        (["--link", "1gbit"], "--link 1gbit is between --nodes"),
        (["-H", "a,b", "--nodes", "2", "--link", "1gbit"], "with -H use --what-if nodes=2"),
        (["-H", "a:2,b"], "leave out the number after the colon of a"),
    ],
)
def test_what_cannot_be_imagined_is_told_before_anything_is_measured(words, told, monkeypatch, capsys):
    from paceline import cli

    monkeypatch.setattr(sys, "argv", ["paceline", "plan", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert told in capsys.readouterr().err


def test_a_chosen_collective_is_imagined_for_as_many_nodes_as_can_be_drawn(monkeypatch, capsys):
    from paceline import cli

    monkeypatch.setenv("PACELINE_COLLECTIVE", "ring")
    monkeypatch.setattr(sys, "argv", ["paceline", "plan", "--what-if", "nodes=65,link=1gbit"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "PACELINE_COLLECTIVE=ring is simulated message by message, for up to 64 nodes" in capsys.readouterr().err


def test_what_a_host_says_wrong_is_told_in_its_words():
    from paceline.launch.ask_hosts import RemoteQuery

    with pytest.raises(ValueError, match=r"nothing was started.*\n- nowhere\.invalid: "):
        RemoteQuery(Way()).query([Host("nowhere.invalid", "nowhere.invalid")], {"do": "wire"}, 30.0)
