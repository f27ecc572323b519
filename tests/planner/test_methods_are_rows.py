"""Every exchange and codec is a row of the plan of several nodes, with a prediction or the reason why it has none."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
import torch
from test_overlap_predicts import BIG, line
from test_plan_over_hosts import plain
from torch import nn
from torch.nn import functional as F

import paceline
from paceline import registry
from paceline.messages import DENSE, ExchangeTraffic
from paceline.planner import cluster
from paceline.planner import methods as rows
from paceline.planner.cluster_model import NetworkModel, packed
from paceline.planner.cluster_survey import Survey
from paceline.planner.measure import methods
from paceline.planner.methods import MeasuredMethod
from paceline.planner.plan_file import Plan
from paceline.planner.plan_tables import method_table
from paceline.planner.teams import EACH, SHARED, answer

OWN = ExchangeTraffic()
STEP = line(BIG, forward_s=0.05, update_s=0.01, factored_s=0.01, rows=32)
MODEL = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)


def measured(engine="sequential", **more):
    model = nn.Sequential(*MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=8, **more) as pace:
        found = [MeasuredMethod.of(each) for each in json.loads(json.dumps(methods.measure(pace.run, engine)))]
        before = [weight.clone() for weight in model.parameters()]
        pace.step((torch.randn(8, 64), torch.randint(0, 4, (8,))))  # the run is as if nothing had been asked
        assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    return found


def test_every_exchange_and_codec_is_a_row_and_the_jobs_own_comes_first():
    found = measured()
    assert [(each.exchange, each.codec, each.chosen) for each in found[:1]] == [("allreduce", "none", True)]
    assert not any(each.chosen or each.refused for each in found[1:])
    assert sorted(each.exchange for each in found if each.codec == "none") == list(registry.names("exchange"))
    around = {
        n for n in registry.names("codec") if "inner" in inspect.signature(registry.module("codec", n).Codec).parameters
    }
    assert around == {"feedback", "lossless"}
    assert {each.codec.split("/")[-1] for each in found} == {*registry.names("codec")} - around
    biased = {each.codec for each in found if "/" in each.codec}
    assert biased == {f"feedback/{n}" for n in registry.names("codec") if registry.says("codec", n, "needs_feedback")}


def test_what_encodes_is_timed():
    for each in measured():
        assert (each.traffic.coding_s > 0) == (each.codec != "none"), each


def test_a_row_is_what_a_job_with_that_method_says_of_itself():
    alone = {(each.exchange, each.codec): each for each in measured()}
    for exchange, codec in (("server", "none"), ("diloco", "none"), ("allreduce", "feedback/lowrank")):
        own = measured(exchange=exchange, codec=codec)[0]
        assert own.chosen
        traffics = (dataclasses.replace(each.traffic, coding_s=0.0) for each in (own, alone[exchange, codec]))
        assert next(traffics) == next(traffics)


@pytest.mark.parametrize("codec", ["qsgd", "feedback/lowrank"])
def test_as_many_collectives_are_counted_as_a_job_with_this_codec_has(codec):
    """Two per bucket; of ``lowrank`` larger buckets are fewer."""

    def collectives(own):
        model = nn.Sequential(*(nn.Conv2d(256, 256, 3) for _ in range(3)), nn.Flatten(), nn.Linear(256, 4))
        with paceline.join(
            model, torch.optim.SGD(model.parameters()), F.cross_entropy, batch_size=8, codec=own
        ) as pace:
            (row,) = [each for each in methods.measure(pace.run, "sequential") if each["codec"] == codec]
            return row["traffic"]["rounds"] * len(pace.run.engine.buckets), len(pace.run.engine.buckets)

    (asked, few), (own, its) = collectives("none"), collectives(codec)
    assert asked == pytest.approx(own) == 2 * its
    assert collectives("feedback/lowrank" if codec == "qsgd" else "qsgd")[0] == pytest.approx(own)
    assert (its < few) == (codec != "qsgd")


def test_each_collective_waits_for_its_messages():
    one, two = (ExchangeTraffic(False, 1.0, rounds=rounds) for rounds in (1.0, 2.0))
    seen = survey(one, MeasuredMethod("allreduce", "two rounds", traffic=two))
    own, other = seen.methods(seen.team(2, SHARED).team)
    assert other.sent_bytes == own.sent_bytes
    assert other.predicted_s == pytest.approx(own.predicted_s + 2 * 1e-4 * len(STEP.parts))


def test_more_nodes_than_a_codec_adds_up_are_refused():
    (qsgd,) = (each for each in measured() if each.codec == "qsgd")
    assert rows.first_refusal([qsgd] * qsgd.most_nodes) == ""
    assert rows.first_refusal([qsgd] * (qsgd.most_nodes + 1)) == "at most 127 nodes can use it"


def test_a_team_too_large_for_the_jobs_own_codec_is_not_predicted():
    """Nor is more promised of it: the other methods say what they would do."""
    kinds = MeasuredMethod("allreduce", "qsgd", chosen=True, most_nodes=3), MeasuredMethod("allreduce", "none")
    nodes = [dataclasses.replace(node, methods=kinds) for node in survey().nodes]
    seen = Survey(nodes, lambda _: NetworkModel(1e-4, 12.5e6), real=False)
    team = seen.team(4, EACH).team
    assert (team.predicted_s, team.predicted_speedup, team.reason) == (None, None, "failed: at most 3 nodes can use it")
    assert answer([seen.alone, team]) == (1, "stay on one machine: of 4 like this one, at most 3 nodes can use it")
    real = Survey(nodes, lambda _: NetworkModel(1e-4, 12.5e6), real=True)
    four = real.team(4, SHARED).team
    assert answer([real.alone, four]) == (1, "stay on one machine: 4 failed: at most 3 nodes can use it")
    refused, other = seen.methods(team)
    assert refused.reason == "refused: at most 3 nodes can use it"
    assert other.reason == "the same updates; the job's own is refused"
    assert other.predicted_s
    assert seen.team(3, EACH).team.predicted_s


@pytest.mark.parametrize(
    ("engine", "options", "refused"),
    [
        ("processes:2", {}, {"server": "divides the optimizer's work"}),
        ("sequential", {"buffers": "broadcast"}, dict.fromkeys(("diloco", "local_sgd"), "buffers='broadcast'")),
    ],
)
def test_what_the_job_cannot_have_is_refused_by_name(engine, options, refused):
    found = {each.exchange: each.refused for each in measured(engine, **options) if each.refused}
    assert found.keys() == refused.keys()
    for exchange, part in refused.items():
        assert exchange in found[exchange]
        assert part in found[exchange]


def survey(own=OWN, *others):
    """Two equal nodes and a network of 100 Mbit/s."""
    step = dataclasses.replace(STEP, ways=own)
    nodes = [dataclasses.replace(plain(name), whole=step, quarter=step.at(8)) for name in "ab"]
    kinds = MeasuredMethod("allreduce", "none", traffic=own, chosen=True), *others
    nodes = [dataclasses.replace(node, methods=kinds) for node in nodes]
    return Survey(nodes, lambda _: NetworkModel(1e-4, 12.5e6), real=True)


def test_the_first_row_is_the_teams_own_prediction():
    seen = survey()
    team = seen.team(2, SHARED).team
    (row,) = seen.methods(team)
    assert (row.predicted_s, row.predicted_speedup, row.sent_bytes, row.exposed_s, row.reason) == (
        *(team.predicted_s, team.predicted_speedup, team.sent_bytes, team.exposed_s),
        "chosen",
    )


def test_fewer_bytes_are_faster_and_what_encodes_them_costs():
    few = ExchangeTraffic(False, 0.1, loses=True)
    seen = survey(
        ExchangeTraffic(False),
        MeasuredMethod("allreduce", "feedback/topk", "approximate", few),
        MeasuredMethod("allreduce", "qsgd", "approximate", dataclasses.replace(few, coding_s=1.0)),
        MeasuredMethod("server", "none", refused="exchange 'server' needs another optimizer"),
        MeasuredMethod("diloco", "none", "approximate", ExchangeTraffic(False, every=100)),
    )
    own, topk, qsgd, server, diloco = seen.methods(seen.team(2, SHARED).team)
    assert topk.predicted_s < own.predicted_s
    assert topk.fidelity == "approximate"
    assert topk.reason == f"other updates (approximate), {own.predicted_s / topk.predicted_s:.2f}x the job's own"
    values = sum(part.numel for part in seen.nodes[0].whole.parts)
    assert qsgd.predicted_s == pytest.approx(topk.predicted_s + values, rel=0.01)
    assert qsgd.reason == "other updates (approximate), not faster"
    assert (server.predicted_s, server.reason) == (None, "refused: exchange 'server' needs another optimizer")
    assert diloco.sent_bytes < own.sent_bytes / 50


def test_the_same_updates_are_told_from_others():
    assert rows.reason(2.0, 1.0, "exact") == "the same updates, 2.00x the job's own"
    assert rows.reason(1.0, 1.0, "exact") == "the same updates, not faster"
    assert rows.reason(2.0, 1.0, "exact", "approximate") == "exact updates, 2.00x the job's own"
    assert rows.reason(1.0, 1.0, "approximate", "approximate") == "other updates (approximate), not faster"


def test_a_row_has_the_jobs_own_options_and_the_default_stays_a_row():
    """Story: a method with options was listed as the default of its name, which was missing."""
    found = measured(exchange="allreduce:forms=dense", codec="half:fp16")
    assert (found[0].exchange, found[0].codec, found[0].traffic.factors) == (
        "allreduce:forms=dense",
        "half:fp16",
        False,
    )
    assert ("allreduce", "none") in [(each.exchange, each.codec) for each in found[1:]]


def test_all_rows_overlap_as_the_job_does():
    found = measured(overlap="forward")
    waits = {
        name for name in registry.names("exchange") if "forward" not in registry.says("exchange", name, "overlaps")
    }
    assert {each.exchange for each in found if each.refused} == waits
    assert {"diloco", "local_sgd", "ordered", "server"} <= waits
    assert all(each.traffic.forward for each in found if not each.refused)


def test_the_fidelity_is_that_of_the_lesser_part():
    found = {(each.exchange, each.codec): each.fidelity for each in measured()}
    lesser = {"diloco": "approximate", "local_sgd": "approximate", "half": "rounded"}
    for (exchange, codec), fidelity in found.items():
        exact = codec == "none" and registry.says("exchange", exchange, "fidelity") == "exact"
        assert fidelity == (lesser.get(exchange) or lesser.get(codec) or ("exact" if exact else "approximate"))


def test_nodes_may_have_methods_in_another_order_and_one_that_others_lack_is_refused():
    """Story: the plan ended without a word of help, after all trials, where a host had a package more."""
    extra, server = MeasuredMethod("theirs", "none"), MeasuredMethod("server", "none")
    seen = survey(OWN, extra, server)
    _, other = seen.nodes
    seen.nodes[1] = dataclasses.replace(other, methods=(server, other.methods[0]))
    own, theirs, served = seen.methods(seen.team(2, SHARED).team)
    assert (own.reason, theirs.reason) == ("chosen", "refused: another node does not have it")
    assert served.predicted_s


def test_a_weight_of_any_size_is_timed_in_parts(monkeypatch):
    monkeypatch.setattr(methods, "ENOUGH", 100)
    timed = []
    monkeypatch.setattr(
        methods, "_run_s", lambda codec, bucket, values: timed.append(bucket.numel) or 1e-6 * values.numel()
    )
    found = {each.codec: each.traffic.coding_s for each in measured()}
    assert max(timed) <= 200
    assert found["qsgd"] == pytest.approx(1e-6)


def test_a_method_that_fails_when_it_is_timed_is_told_and_the_jobs_own_is_planned_without(monkeypatch):
    def run_s(*_):
        raise RuntimeError("no reply\nof mine")

    monkeypatch.setattr(methods, "_run_s", run_s)
    own, *others = measured(codec="half")
    assert (own.traffic.coding_s, own.refused) == (0.0, "")
    for each in others:
        assert each.refused == ("" if each.codec == "none" else "RuntimeError: no reply")


def test_codes_of_a_lossy_codec_are_not_taken_for_as_compressible_as_the_gradient():
    part = dataclasses.replace(BIG, packed_dense=0.5)
    assert packed(part, DENSE, 2, ExchangeTraffic(loses=True)) == 1.0
    assert packed(part, DENSE, 2, ExchangeTraffic()) == 0.5


def test_rows_are_never_of_a_team_whose_trial_failed():
    seen = survey()
    team = seen.team(2, SHARED).team
    assert cluster._methods(seen, [seen.alone, team], 1, ())
    assert cluster._methods(seen, [seen.alone, dataclasses.replace(team, reason="failed: out of memory")], 1, ()) == ()


def test_one_that_a_node_cannot_have_is_for_no_team():
    seen = survey()
    _, other = seen.nodes
    refused = dataclasses.replace(other.methods[0], refused="no room")
    seen.nodes[1] = dataclasses.replace(other, methods=(refused,))
    (row,) = seen.methods(seen.team(2, SHARED).team)
    assert row.reason == "refused: no room"


def test_rows_are_kept_in_the_file_and_shown():
    seen = survey(ExchangeTraffic(), MeasuredMethod("server", "none", refused="no"))
    found = seen.methods(seen.team(2, SHARED).team)
    plan = Plan("sequential", methods=found)
    assert Plan.from_toml(plan.to_toml()).methods == Plan.of(json.loads(plan.to_json())).methods == found
    cells = {column.header: list(column.cells) for column in method_table(found).columns}
    assert [str(each) for each in cells[""]] == ["<- chosen", "refused: no"]
