"""A trace is valid for readers of Chrome's format; it agrees with the event log and does not change training."""

import json
from collections import defaultdict

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline
from launching import launch
from nodes import Plain, build, rows
from paceline.report.record import read
from paceline.report.trace import document, in_order, parse

NAP_S = 0.03


def tracks(whole):
    """(process, track's name) -> its events in order; checks first that the file is valid."""
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert whole["displayTimeUnit"] == "ms"
    names, found = {}, defaultdict(list)
    for event in whole["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["pid"], event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["name"], str)
        assert event["dur"] >= 0
        found[names[event["pid"], event["tid"]]].append(event)
    for track, events in found.items():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        check_nesting(track, events)
    return dict(found)


def end(event):
    return event["ts"] + event["dur"]


def check_nesting(track, events):
    """Each event is within the one that is open when it begins, or after it."""
    nanosecond, open_ = 0.001, []
    for event in events:
        while open_ and event["ts"] >= end(open_[-1]) - nanosecond / 2:
            open_.pop()
        assert not open_ or end(event) <= end(open_[-1]) + nanosecond / 2, (track, open_[-1]["name"], event["name"])
        open_.append(event)


def inside(events, outer, name=None):
    found = [e for e in events if e["ts"] >= outer["ts"] - 1e-3 and end(e) <= end(outer) + 1e-3 and e is not outer]
    return [e for e in found if name is None or e["name"] == name]


def seconds(events):
    return sum(event["dur"] for event in events) / 1e6


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    done = launch("drawn.py", folder, engine="processes:2", num_nodes=2, PACELINE_TRACE="2-3")
    assert done.stderr.count("the trace of steps 2 to 3 is in") == 1
    whole = json.loads((folder / "run" / "trace.json").read_text())
    return tracks(whole), {e["step"]: e for e in read(folder / "run") if e["event"] == "step"}


def main_track(drawn, node, name):
    """The tracks of the process that holds the node's link."""
    (track,) = [t for t in drawn[0] if t[0] == node and t[1].endswith(name) and "process 1" not in t[1]]
    return drawn[0][track]


@pytest.mark.dear
def test_every_process_of_every_node_is_there(drawn):
    found, _ = drawn
    each = {"compute", "waiting"} | {"wire, gradients", "wire, control"}
    for node in range(2):
        names = {name.rpartition(": ")[2] for pid, name in found if pid == node}
        assert each <= names
    assert len([name for _, name in found if name.endswith("compute")]) == 4


@pytest.mark.dear
def test_it_agrees_with_the_record(drawn):
    """Spans are measured around what the record measures within, or the reverse: their order is certain."""
    found, record = drawn
    compute, waiting = main_track(drawn, 0, "compute"), main_track(drawn, 0, "waiting")
    steps = [event for event in compute if event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == ["step 2", "step 3"]
    for number, step in zip((2, 3), steps, strict=True):
        event_of_step = record[number]
        parts = {name: inside(waiting, step, name) for name in ("input", "exchange, not hidden", "reconcile")}
        parts |= {name: inside(compute, step, name) for name in ("gradient", "update", "forward", "backward")}
        assert seconds([step]) >= event_of_step["seconds"] * (1 - 1e-5)
        assert seconds(parts["input"]) <= event_of_step["wait_seconds"] + 1e-5
        assert seconds(parts["exchange, not hidden"]) <= event_of_step["exchange_seconds"] + 1e-5
        assert seconds(parts["update"] + parts["reconcile"]) <= event_of_step["update_seconds"] + 1e-5
        outer = ("input", "gradient", "exchange, not hidden", "update", "reconcile")
        assert seconds([event for name in outer for event in parts[name]]) <= seconds([step])
        assert len(parts["forward"]) == len(parts["backward"]) == 2, "micro-batches"
        assert seconds(parts["forward"] + parts["backward"]) <= seconds(parts["gradient"])
        all_processes = [
            seconds([[event for event in events if event["name"] == "gradient"][number - 2]])
            for (_, name), events in found.items()
            if name.endswith("compute")
        ]
        assert event_of_step["compute_seconds"] <= max(all_processes) + 1e-5


@pytest.mark.dear
def test_what_sleeps_is_drawn_as_long_as_it_sleeps(drawn):
    for node, least in ((0, 0.0), (1, NAP_S)):
        events = main_track(drawn, node, "compute")
        naps = [event for event in events if event["name"] == "nap (Nap)"]
        assert len(naps) == 4, "two steps of two micro-batches"
        assert all(seconds([nap]) >= least for nap in naps)
        forwards = [event for event in events if event["name"] == "forward"]
        assert all(any(nap in inside(events, forward) for forward in forwards) for nap in naps)
    waits = [e for e in main_track(drawn, 0, "waiting") if e["name"] == "exchange, not hidden"]
    assert all(seconds([wait]) > 0 for wait in waits)


@pytest.mark.dear
def test_bytes_on_the_wire_are_the_records(drawn):
    found, record = drawn
    steps = [event for event in main_track(drawn, 0, "compute") if event["name"].startswith("step ")]
    wires = [event for track, events in found.items() if track[0] == 0 and "wire" in track[1] for event in events]
    for number, step in zip((2, 3), steps, strict=True):
        sent = [e for e in wires if step["ts"] <= e["ts"] - 1000 * e["args"]["waited_ms"] + 1 and e["ts"] <= end(step)]
        assert sum(event["args"]["bytes"] for event in sent) == record[number]["sent_bytes"] > 0
        assert any("the vote" in event["name"] for event in sent)


@pytest.mark.dear
def test_pieces_are_drawn_with_their_form(drawn):
    events = main_track(drawn, 1, "compute")
    pieces = [event for event in events if "form" in event["args"]]
    backwards = [event for event in events if event["name"] == "backward"]
    assert {event["args"]["form"] for event in pieces} <= {"dense", "factors"}
    assert sorted(event["args"]["bucket"] for event in pieces) == [0, 0, 1, 1]
    assert all(any(piece in inside(events, backward) for backward in backwards) for piece in pieces)


class Again(Plain):
    """Layers are recomputed in backward (activation checkpointing)."""

    def forward(self, x):
        return self.head(checkpoint(lambda x: F.relu(self.second(F.relu(self.first(x)))), x, use_reentrant=False))


def trained(folder, kind=Plain):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=12, engine="sequential", folder=folder) as pace:
        losses = [pace.step(rows(12, seed)) for seed in range(4)]
    return losses, model.state_dict()


@pytest.mark.parametrize("kind", [Plain, Again])
def test_alone_it_changes_nothing(tmp_path, monkeypatch, kind):
    want, state = trained(tmp_path / "plain", kind)
    monkeypatch.setenv("PACELINE_TRACE", "1")
    got, drawn = trained(tmp_path / "drawn", kind)
    assert got == want
    assert all(torch.equal(state[name], drawn[name]) for name in state)
    (events,) = (e for (_, name), e in tracks(json.loads((tmp_path / "drawn/trace.json").read_text())).items()
                 if name.endswith("compute"))  # fmt: skip
    assert [event["name"] for event in events].count("head (Linear)") == 3
    (event_of_step,) = [event for event in read(tmp_path / "drawn") if event["event"] == "trace"]
    assert (event_of_step["first_step"], event_of_step["last_step"]) == (1, 3)
    assert not (tmp_path / "plain" / "trace.json").exists()


def test_a_run_that_fails_in_a_drawn_step_says_its_own_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_TRACE", "0")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=12, folder=tmp_path) as pace:
        x, y = rows(12, 0)
        with pytest.raises(FloatingPointError, match="loss is not finite at step 0"):
            pace.step((x * float("nan"), y))
        pace.step((x, y))
        assert not model._forward_hooks
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("step", [0, 2])
def test_where_others_are_here_than_began_nothing_is_drawn_and_that_is_told(step, tmp_path, monkeypatch, capsys):
    """Before or among the traced steps. Regression: a joining node did not take part, so collectives did not match."""
    monkeypatch.setenv("PACELINE_TRACE", "1-2")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=12, engine="sequential", folder=tmp_path) as pace:
        for number in range(4):
            if number == step:
                pace.run.link.generation += 1  # as when nodes were lost, or came
            pace.step(rows(12, number))
    assert not (tmp_path / "trace.json").exists()
    assert capsys.readouterr().err.count("nodes failed or joined since training began, so no step is traced") == 1
    assert [event["event"] for event in read(tmp_path)].count("hint") == 1


def test_a_drawing_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_TRACE", "1-2")
    (tmp_path / "trace.json").mkdir()
    losses, _ = trained(tmp_path)
    assert len(losses) == 4
    assert "the trace of steps 1 to 2 could not be written to" in capsys.readouterr().err


def test_a_wire_takes_one_thing_after_another():
    rows = [("b", 1.0, 3.0, {}), ("a", 0.0, 2.0, {}), ("c", 5.0, 4.0, {})]
    assert in_order(rows) == [
        ("a", 0.0, 2.0, {"waited_ms": 0.0}),
        ("b", 2.0, 3.0, {"waited_ms": 1000.0}),
        ("c", 5.0, 5.0, {"waited_ms": 0.0}),
    ]


def test_times_are_whole_nanoseconds():
    first, second = ("a", 0.1, 0.1 + 1 / 3, {}), ("b", 0.1 + 1 / 3, 0.7, {})
    found = tracks(document([(0, "here", {"compute": [first, second]})]))
    assert [event["name"] for event in found[0, "here: compute"]] == ["a", "b"]


def test_which_steps():
    assert parse("5") == (5, 7)
    assert parse("5-9") == (5, 9)
    for wrong in ("x", "-3", "5-", "9-5", "1.5"):
        with pytest.raises(ValueError, match=r"is no step; give the first step to trace, as 5, or .* as 5-9"):
            parse(wrong)
