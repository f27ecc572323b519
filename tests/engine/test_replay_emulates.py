"""A recorded timeline is replayed in its time, with pieces whose sums are right; and it says that it is emulated."""

import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import paceline
import ranks
from nodes import OPTIMIZERS, Plain, Rank, Whole, build, rows
from paceline.engine import emulated, sequential
from paceline.engine.compute.timeline import Timeline, record
from paceline.engine.emulated import Engine
from paceline.exchange.flow import cost_model
from paceline.exchange.flow.cost_model import multiplication
from paceline.messages import DENSE, FACTORS, Decision
from paceline.registry import parse

ROWS, NODES = 6, 8


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A recording whose pieces are real ones, and whose seconds are all made up: such as a clock can tell."""
    path = tmp_path_factory.mktemp("replay") / "plain.json"
    recorded().write(path)
    whole = json.loads(path.read_text())
    whole["forward"] = [[name, 0.010] for name, _ in whole["forward"]]
    whole["backward"] = {
        form: [[i, 0.020 if form == DENSE else 0.015] for i, _ in line] for form, line in whole["backward"].items()
    }
    whole["update_seconds"], whole["factored_update_seconds"] = 0.01, 0.014
    for gradient in whole["pieces"]:
        gradient["product_seconds"] = 0.002 if gradient["linear"] else 0.0
    path.write_text(json.dumps(whole))
    return path


def recorded():
    model, engine = build(), sequential.Engine()
    engine.open(model, OPTIMIZERS["momentum"](model.parameters()), F.cross_entropy)
    start = time.perf_counter()
    line = record(engine, model, rows(ROWS, 1), passes=3)
    whole_s = time.perf_counter() - start
    engine.close()
    assert 0 < 3 * line.total([DENSE] * len(line.buckets)) < 2 * whole_s
    return line


def test_a_recording_knows_the_pieces_and_layers_of_the_model(tmp_path):
    line = recorded()
    model, engine = build(), sequential.Engine()
    engine.open(model, OPTIMIZERS["momentum"](model.parameters()), F.cross_entropy)
    assert line.buckets == engine.buckets
    assert [name for name, _ in line.forward] == ["first", "second", "head"]
    for form in (DENSE, FACTORS):
        assert sorted(i for i, _ in line.backward[form]) == list(range(len(line.buckets)))
        assert all(seconds > 0 for _, seconds in line.backward[form])
    for bucket, num_rows, seconds in zip(line.buckets, line.factor_rows, line.products, strict=True):
        assert (num_rows, seconds > 0) == ((ROWS, True) if bucket.linear else (0, False)), bucket
    assert (line.rows, line.dtype, line.update > 0) == (ROWS, "float64", True)
    line.write(tmp_path / "line.json")
    assert Timeline.read(tmp_path / "line.json") == line


@pytest.mark.parametrize("faster", [1.0, 10.0])
def test_what_an_exchange_decides_by_is_as_fast_as_what_is_replayed(file, faster, monkeypatch):
    """Story: accelerators were emulated, and forms chosen by what a core shared by 16 nodes takes to multiply."""
    engine, model = Engine(file, faster=faster), build()
    engine.open(model, OPTIMIZERS["momentum"](model.parameters()), F.cross_entropy)
    bucket = max((bucket for bucket in engine.buckets if bucket.linear), key=lambda bucket: bucket.numel)
    calls = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-7 * next(calls))  # a busy core takes no part in it
    for module in (emulated, cost_model):
        monkeypatch.setattr(module, "time", clock)
    per_flop = multiplication(bucket, ROWS, torch.float64, torch.device("cpu"), engine.multiply)
    wanted = 0.002 / faster / (2 * ROWS * bucket.numel)
    assert wanted <= per_flop < 1.01 * wanted


@pytest.mark.parametrize("form", [DENSE, FACTORS])
def test_eight_nodes_add_up_what_each_has_filled_in_and_take_the_recorded_time(file, form):
    """Node r's gradients are r + 1; its factors too, ROWS times."""
    line = Timeline.read(file)
    linears = {bucket.index for bucket in line.buckets if bucket.linear and form == FACTORS}
    forms = [FACTORS if bucket.index in linears else DENSE for bucket in line.buckets]

    def work(link):
        rank = Rank(link, build(), engine=Engine(file, fill=link.rank + 1.0), batch=NODES * ROWS)
        rank.exchange.choice.forms = list(forms)
        rank.exchange.choice.seen = True
        for _ in range(2):
            start = time.perf_counter()
            outcome = rank.step(Whole(rows(NODES * ROWS, 1)))
            step_s = time.perf_counter() - start
            assert outcome.decision is Decision.COMMIT
            assert outcome.vote.weight == NODES * ROWS
            own_update_s = line.updating({i: line.factor_rows[i] for i in linears})
            assert outcome.vote.seconds >= line.total(forms) - own_update_s
            # everyone's factors are multiplied out
            assert step_s >= line.total(forms) + (NODES - 1) * sum(line.products[i] for i in linears)
            for gradient in outcome.gradients:
                whole = sum(range(1, NODES + 1))
                if gradient.bucket.index in linears:
                    product = gradient.output_grad.T @ gradient.layer_input
                    assert torch.equal(
                        product, torch.full(gradient.bucket.shapes[0], ROWS * whole, dtype=torch.float64)
                    )
                else:
                    assert torch.equal(gradient.flat, torch.full((gradient.bucket.numel,), whole, dtype=torch.float64))
        rank.exchange.close()
        return step_s

    assert len(ranks.run(NODES, work)) == NODES


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def test_faster_is_faster_and_a_node_without_rows_adds_nothing(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(emulated, "time", Clock())
    engine = parse("engine", "emulated:plain.json,faster=10")
    model = Plain()
    engine.open(model, torch.optim.SGD(model.parameters()), None)
    forms, gradients = [DENSE] * len(engine.buckets), []
    line_s = engine.timeline.total(forms) - engine.timeline.update
    vote = engine.gradient(object(), 1.0, forms, gradients.append)
    assert vote.seconds == pytest.approx(line_s / 10)
    gradients.clear()
    vote = engine.gradient(None, 1.0, forms, gradients.append)
    assert vote.seconds == 0.0
    assert (vote.weight, set(vote.used), sum(vote.rows)) == (0.0, {0}, 0)
    assert all(not gradient.flat.any() for gradient in gradients)
    gradients.clear()
    engine.gradient(None, 1.0, [FACTORS if bucket.linear else DENSE for bucket in engine.buckets], gradients.append)
    assert [len(gradient.output_grad) for gradient in gradients if gradient.bucket.linear] == [0, 0]


def test_a_record_says_that_it_was_emulated(file, monkeypatch, tmp_path):
    monkeypatch.chdir(file.parent)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch_size": ROWS, "engine": "emulated:plain.json", "folder": tmp_path}
    with paceline.join(model, optimizer, F.cross_entropy, **options) as pace:
        pace.step(rows(ROWS, 1, torch.float32))
        with pytest.raises(ValueError, match="emulates"):
            pace.engine.forward(None)
    events = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    (joined,) = [event for event in events if event["event"] == "join"]
    assert (joined["engine"], joined["emulated"]) == ("emulated:plain.json", True)
    (step,) = [event for event in events if event["event"] == "step"]
    assert step["seconds"] >= pace.engine.timeline.total(pace.exchange.forms())
    assert Engine.fidelity == "emulated"


def test_what_is_no_timeline_is_refused_by_name(tmp_path):
    (tmp_path / "other.json").write_text('{"timeline": 99}')
    for name, why in (("missing.json", "FileNotFound"), ("other.json", "format is 99, this version reads 1")):
        with pytest.raises(ValueError, match=rf"{name} is no timeline .*{why}.*timeline\.record"):
            Engine(tmp_path / name)
