"""Who leads takes late nodes in: what each is given, and whoever cannot come costs the others nothing."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.elastic import consistency, state_transfer
from paceline.elastic.admission import IN_VAIN, MAX_VAIN, OWN, Admission
from paceline.errors import LinkError
from waiting import until


class Doorkeeper:
    """One node asks to follow; what it is told is kept."""

    def __init__(self, pace):
        said = {"turn": 1, "host": "late", "said": {}, "began": pace.run.cursor.began, "size": 1, "least": 1, "most": 8}
        self.asked, self.told = {"late": {**said, "data": dict(pace.run.cursor.facts)}}, {}

    def waiting(self):
        return self.asked

    def answer(self, name, told):
        self.told[name] = told


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
        until(lambda: welcome._look() or door.told)
        monkeypatch.undo()
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        assert door.told["late"]["refused"] == f"the node that leads has no memory for a copy of {num_bytes} bytes"
        before = model.weight.detach().clone()
        pace.step((torch.ones(8, 4), torch.ones(8, 2)))
        assert not torch.equal(before, model.weight)


def test_who_has_other_samples_is_refused(monkeypatch):
    """Story: its labels meant something else, and it was taken in."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        next(pace.batches(torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))))
        door = Doorkeeper(pace)
        door.asked["late"]["data"]["numbers of samples"] = 9
        monkeypatch.setattr(type(pace.run.members), "join_desk", door)
        admission(pace, {})._look()
        assert "different numbers of samples (8, 9)" in door.told["late"]["refused"]


def admission(pace, said):
    return Admission(pace.run, said, pace.training.end, pace.training._give_up)


class Noted:
    """A line that keeps what is sent."""

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
    door.line = lambda name: door.lines.append(Noted()) or door.lines[-1]
    monkeypatch.setattr(type(pace.run.members), "join_desk", door)
    return door, admission(pace, {})


def test_who_was_met_in_vain_is_followed_no_more(monkeypatch):
    """Story: every step was kept, to be sent, for one that was refused and took its time to end."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        monkeypatch.setattr(welcome, "_meet", tuple)

        def level():
            welcome._look()
            if (following := welcome._following.get("late")) and following.placed:
                following.part(state_transfer.state_part(pace.run, following.next))
            return welcome._ready

        for _ in range(MAX_VAIN):
            until(level)
            welcome.admit()
        welcome._look()
        assert door.told["late"]["refused"] == IN_VAIN
        assert not welcome._following
        monkeypatch.undo()


def test_who_comes_by_another_line_is_given_all_anew(monkeypatch):
    """What the kernel took for the line before, and lost, counted as sent."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)

        def level():
            welcome._look()
            if (following := welcome._following.get("late")) and following.placed:
                following.part(state_transfer.state_part(pace.run, following.next))
            return welcome._ready

        (ready,) = until(level)
        assert (ready.turn, door.lines[0].messages) == (1, 1)
        came = door.asked["late"]
        door.asked["late"] = {key: value for key, value in came.items() if key != "began"} | {"turn": 2}
        welcome._look()
        assert "position" in door.told["late"]
        assert not welcome._ready
        door.asked["late"] = came | {"turn": 3}
        (ready,) = until(level)
        assert ready.turn == 3
        assert [line.messages for line in door.lines] == [1, 1]
        welcome.begin_again()
        monkeypatch.undo()


def test_a_line_that_breaks_is_closed_and_nothing_waits_for_it_until_the_node_asks_anew(monkeypatch):
    """What would be sent to nobody has no end. The node is not refused: its line is told, and it comes by another."""
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        line = Noted()
        line.breaks, door.line = True, lambda name: line

        def broken():
            welcome._look()
            following = welcome._following["late"]
            if following.placed:
                following.part(state_transfer.state_part(pace.run, following.next))
            return following.broken and following

        following = until(broken)
        assert line.closed
        for _ in range(3):
            following.before(pace.agreement, None)()
            welcome._look()
        assert following._messages.qsize() <= 1  # the word that ends the thread
        assert not welcome._ready
        assert not door.told
        welcome.begin_again()
        monkeypatch.undo()


def test_who_does_not_come_when_all_meet_for_it_is_met_for_no_more(monkeypatch):
    model = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, torch.nn.functional.mse_loss, batch_size=8, engine="sequential") as pace:
        door, welcome = welcoming(pace, monkeypatch)
        monkeypatch.setattr(welcome, "_meet", lambda: ())
        meetings = 0
        while not door.told and meetings < 10:
            welcome._look()
            if (following := welcome._following.get("late")) and following.placed:
                following.part(state_transfer.state_part(pace.run, following.next))
            if welcome._ready:
                welcome.admit()
                meetings += 1
        assert meetings == 2
        assert door.told["late"]["refused"].startswith("all met to take it in, 2 times")
        welcome.begin_again()
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
        pace.run.folder = pace.training.home.path = tmp_path / "file" / "run"
        pace.training.home.take_over()
        before = model.weight.detach().clone()
        pace.step((torch.ones(8, 4), torch.ones(8, 2)))
        assert not torch.equal(before, model.weight)
        with pytest.raises(OSError, match=r"file/run"):
            pace.save()
    assert (
        "run cannot be written here (Not a directory): training continues without a record" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("own", "said", "nodes", "why"),
    [
        (True, {}, "1:4", "the script that trains deals its rows itself"),
        (False, {}, "1:1", "1 nodes train, or are about to, and there are to be at most 1 (--nodes)"),
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
        welcome._refuses = OWN if own else ""
        until(lambda: welcome._look() or door.told)
        monkeypatch.undo()
    assert door.told["late"]["refused"].startswith(why)
    assert why in capsys.readouterr().err
