"""Admission by the leader: what a joining node receives; a node that cannot join costs the members nothing."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.elastic import consistency, state_transfer
from paceline.elastic.admission import ATTEMPTS_FAILED, MAX_ATTEMPTS, OWN_ROWS, Admission
from paceline.errors import LinkError
from waiting import until


class Doorkeeper:
    """A join desk with one request; it keeps the responses."""

    def __init__(self, pace):
        said = {"turn": 1, "host": "late", "said": {}, "began": pace.run.cursor.began, "size": 1, "least": 1, "most": 8}
        self.asked, self.responses = {"late": {**said, "data": dict(pace.run.cursor.facts)}}, {}

    def waiting(self):
        return self.asked

    def answer(self, name, response):
        self.responses[name] = response


def test_where_no_memory_is_left_for_a_copy_the_node_is_refused_and_training_goes_on(monkeypatch):
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential")
    with pace:
        door = Doorkeeper(pace)
        monkeypatch.setattr(type(pace.run.members), "join_desk", door)
        welcome = admission(pace, {})

        def full(*given, **more):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(torch, "empty_like", full)
        until(lambda: welcome._handle_requests() or door.responses)
        monkeypatch.undo()
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        assert door.responses["late"]["refused"] == f"the leader has no memory for a copy of {num_bytes} bytes"
        before = model.weight.detach().clone()
        pace.step((torch.ones(8, 4), torch.ones(8, 2)))
        assert not torch.equal(before, model.weight)


def test_who_has_other_samples_is_refused(monkeypatch):
    """Story: its labels meant something else, and it was admitted."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        next(pace.batches(torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))))
        door = Doorkeeper(pace)
        door.asked["late"]["data"]["numbers of samples"] = 9
        monkeypatch.setattr(type(pace.run.members), "join_desk", door)
        admission(pace, {})._handle_requests()
        assert "different numbers of samples (8, 9)" in door.responses["late"]["refused"]


def admission(pace, said):
    return Admission(pace.run, said, pace.training.end, pace.training._save_and_exit)


class Noted:
    """A channel that counts the messages sent."""

    def __init__(self):
        self.messages, self.closed, self.breaks = 0, False, False

    def send(self, parts, num_bytes):
        if self.breaks:
            raise LinkError("gone")
        self.messages += 1

    def set_deadline_mode(self):
        pass

    def close(self):
        self.closed = True


def welcoming(pace, monkeypatch):
    door = Doorkeeper(pace)
    door.lines = []
    door.channel = lambda name: door.lines.append(Noted()) or door.lines[-1]
    monkeypatch.setattr(type(pace.run.members), "join_desk", door)
    return door, admission(pace, {})


def test_who_was_met_in_vain_is_followed_no_more(monkeypatch):
    """Story: every step was kept in memory for a node that had been refused and did not end yet."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        monkeypatch.setattr(welcome, "_admit_ready", tuple)

        def level():
            welcome._handle_requests()
            if (catch_up := welcome._catch_ups.get("late")) and catch_up.has_buffer:
                catch_up.part(state_transfer.state_part(pace.run, catch_up.next))
            return welcome._ready

        for _ in range(MAX_ATTEMPTS):
            until(level)
            welcome.admit()
        welcome._handle_requests()
        assert door.responses["late"]["refused"] == ATTEMPTS_FAILED
        assert not welcome._catch_ups
        monkeypatch.undo()


def test_who_comes_by_another_line_is_given_all_anew(monkeypatch):
    """Data that the kernel accepted for the old connection, and lost, counted as sent."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)

        def level():
            welcome._handle_requests()
            if (catch_up := welcome._catch_ups.get("late")) and catch_up.has_buffer:
                catch_up.part(state_transfer.state_part(pace.run, catch_up.next))
            return welcome._ready

        (ready,) = until(level)
        assert (ready.turn, door.lines[0].messages) == (1, 1)
        came = door.asked["late"]
        door.asked["late"] = {key: value for key, value in came.items() if key != "began"} | {"turn": 2}
        welcome._handle_requests()
        assert "position" in door.responses["late"]
        assert not welcome._ready
        door.asked["late"] = came | {"turn": 3}
        (ready,) = until(level)
        assert ready.turn == 3
        assert [line.messages for line in door.lines] == [1, 1]
        welcome.begin_again()
        monkeypatch.undo()


def test_a_line_that_breaks_is_closed_and_nothing_waits_for_it_until_the_node_asks_anew(monkeypatch):
    """The queue would grow without limit. The node is not refused: it sees the closed connection, and opens another."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        line = Noted()
        line.breaks, door.channel = True, lambda name: line

        def broken():
            welcome._handle_requests()
            catch_up = welcome._catch_ups["late"]
            if catch_up.has_buffer:
                catch_up.part(state_transfer.state_part(pace.run, catch_up.next))
            return catch_up.broken and catch_up

        catch_up = until(broken)
        assert line.closed
        for _ in range(3):
            catch_up.before_update(pace.agreement, None)()
            welcome._handle_requests()
        assert catch_up._messages.qsize() <= 1  # the word that ends the thread
        assert not welcome._ready
        assert not door.responses
        welcome.begin_again()
        monkeypatch.undo()


def test_who_does_not_come_when_all_meet_for_it_is_met_for_no_more(monkeypatch):
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        monkeypatch.setattr(welcome, "_admit_ready", lambda: ())
        meetings = 0
        while not door.responses and meetings < 10:
            welcome._handle_requests()
            if (catch_up := welcome._catch_ups.get("late")) and catch_up.has_buffer:
                catch_up.part(state_transfer.state_part(pace.run, catch_up.next))
            if welcome._ready:
                welcome.admit()
                meetings += 1
        assert meetings == 2
        assert door.responses["late"]["refused"].startswith("all members waited for it at 2 rendezvous, in vain")
        welcome.begin_again()
        monkeypatch.undo()


@pytest.mark.parametrize("field", ["said", "least", "data"])
def test_a_request_of_another_version_is_refused_by_name_and_an_error_of_ours_is_not_taken_for_one(monkeypatch, field):
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door = Doorkeeper(pace)
        monkeypatch.setattr(type(pace.run.members), "join_desk", door)
        welcome = admission(pace, {})
        monkeypatch.setattr(welcome, "_refusal", lambda request: {}["ours"])
        with pytest.raises(KeyError, match="ours"):
            welcome._handle_requests()
        del door.asked["late"][field]
        welcome._handle_requests()
        assert "it runs another version of paceline" in door.responses["late"]["refused"]
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["PACELINE_COLLECTIVE", "PACELINE_LINK"])
def test_who_would_add_up_another_way_says_so(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    mine = consistency.digests({}, None)
    monkeypatch.setenv(name, {"PACELINE_COLLECTIVE": "ring", "PACELINE_LINK": "nccl"}[name])
    its = consistency.digests({}, None)
    assert [key for key in mine if mine[key] != its[key]] == [name]


def test_who_leads_from_now_on_and_has_no_folder_trains_on(tmp_path, capsys):
    (tmp_path / "file").touch()
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        pace.run.folder = pace.training.run_folder.path = tmp_path / "file" / "run"
        pace.training.run_folder.take_over()
        before = model.weight.detach().clone()
        pace.step((torch.ones(8, 4), torch.ones(8, 2)))
        assert not torch.equal(before, model.weight)
        with pytest.raises(OSError, match=r"file/run"):
            pace.save()
    text = "run cannot be written here (Not a directory): training continues without an event log"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "said", "nodes", "why"),
    [
        (True, {}, "1:4", "the script assigns its own rows to processes"),
        (False, {}, "1:1", "1 nodes train, or are about to; at most 1 are allowed (--nodes)"),
        (False, {"files of paceline": "others"}, "1:4", "it was given different files of paceline; start it with"),
    ],
    ids=["a loop of the user's own", "one too many", "another version of the code"],
)
def test_who_may_not_come_is_told_why(monkeypatch, capsys, own, said, nodes, why):
    monkeypatch.setenv("PACELINE_NODES", nodes)
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door = Doorkeeper(pace)
        door.asked["late"]["said"] = {"files of paceline": "mine"} | said
        monkeypatch.setattr(type(pace.run.members), "join_desk", door)
        welcome = admission(pace, {"files of paceline": "mine"})
        welcome._refuses = OWN_ROWS if own else ""
        until(lambda: welcome._handle_requests() or door.responses)
        monkeypatch.undo()
    assert door.responses["late"]["refused"].startswith(why)
    assert why in capsys.readouterr().err
