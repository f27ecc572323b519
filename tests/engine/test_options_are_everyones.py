"""The numbers of an optimizer's groups are everyone's at each step, or that is the error which all processes raise."""

import pytest
import torch
from torch import nn

import ranks
from launching import launch, small
from nodes import OPTIMIZERS, Rank, build, gap, rows
from paceline.engine.checks.optimizer_options import Options
from paceline.errors import UnlikeOptions
from paceline.link.net.metered import MeteredLink
from paceline.messages import Vote

CHANGES = {
    "lr": (
        "adam",
        lambda group: group.update(lr=0.05),
        r"the learning rate of group 0 is 0\.01 on rank 0 and 0\.05 on rank 2",
    ),
    "momentum": (
        "momentum",
        lambda group: group.update(momentum=0.5),
        r"momentum of group 0 is 0\.9 on rank 0 and 0\.5",
    ),
    "decay": (
        "adamw",
        lambda group: group.update(weight_decay=0),
        r"weight_decay of group 0 is 0\.1 on rank 0 and 0\.0",
    ),
    "betas": (
        "adam",
        lambda group: group.update(betas=(0.9, 0.9)),
        r"betas of group 0 is \[0\.9, 0\.999\] .* \[0\.9, 0\.9\]",
    ),
    "a tensor": (
        "sgd",
        lambda group: group.update(lr=torch.tensor(0.2)),
        r"the learning rate of group 0 is 0\.1 .* 0\.2",
    ),
    "a word": ("momentum", lambda group: group.update(nesterov=True), r"nesterov of group 0 is False .* True"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_number_changed_on_one_rank_alone_is_told_as_that(what, capsys):
    """Story: it was reported as processors that are not alike, and the weights of rank 0 went round from then on."""
    optimizer, change, said = CHANGES[what]

    def work(link):
        rank = Rank(MeteredLink(link), build(), OPTIMIZERS[optimizer])
        rank.train([rows(24, 0), rows(24, 1)])
        if link.rank == 2:
            change(rank.optimizer.param_groups[0])
        before = rank.state()
        with pytest.raises(UnlikeOptions, match=f"differ between processes at step 2: {said}") as raised:
            rank.train([rows(24, 2)])
        assert gap(rank.state(), before) == 0.0
        rank.optimizer.param_groups[0].update(
            OPTIMIZERS[optimizer](rank.model.parameters()).param_groups[0]
            | {"params": rank.optimizer.param_groups[0]["params"]}
        )
        rank.train([rows(24, 2)])  # made alike again, all train on
        return str(raised.value), rank.state()

    (words, one), *others = ranks.run(3, work)
    assert all(its == words and gap(state, one) == 0.0 for its, state in others)
    assert "processors" not in capsys.readouterr().err


def test_a_schedule_that_moves_in_lockstep_is_no_difference():
    def work(link):
        rank = Rank(MeteredLink(link), build(), OPTIMIZERS["adam"])
        rank.run.job.scheduler = torch.optim.lr_scheduler.OneCycleLR(rank.optimizer, 0.1, total_steps=6)
        rank.train([rows(24, i) for i in range(5)])
        return rank.optimizer.param_groups[0]["lr"]

    first, second = ranks.run(2, work)
    assert first == second != 0.01


def test_what_differs_by_rounding_alone_is_left_out_from_then_on():
    """As a schedule's cosine between two libraries, or a step size that the optimizer finds by itself."""

    def work(link):
        rank = Rank(MeteredLink(link), build(), OPTIMIZERS["adam"])
        gathers, gather = [], rank.control.all_gather
        rank.control.all_gather = lambda *words: gathers.append(1) or gather(*words)
        for i in range(4):
            rank.optimizer.param_groups[0]["lr"] = 0.01 / (i + 1) * (1 + 1e-12 * link.rank)
            rank.train([rows(24, i)])
        rank.optimizer.param_groups[0]["eps"] = 1e-8 * (1 + link.rank)
        with pytest.raises(UnlikeOptions, match=r"eps of group 0"):
            rank.train([rows(24, 4)])
        return len(gathers)

    assert ranks.run(2, work) == [2, 2]


def test_nodes_that_average_now_and_then_may_have_numbers_of_their_own():
    def work(link):
        rank = Rank(MeteredLink(link), build(), OPTIMIZERS["sgd"], exchange="local_sgd:2")
        rank.optimizer.param_groups[0]["lr"] = 0.1 * (1 + link.rank)
        rank.train([rows(24, i) for i in range(4)])
        return rank.state()

    one, other = ranks.run(2, work)
    assert gap(one, other) == 0.0


@pytest.mark.dear
def test_between_the_processes_of_a_node_it_is_told_once(tmp_path):
    body = (
        "batch = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)",
        "pace.step(batch)",
        "if pace.world.local_rank:",
        "    optimizer.param_groups[0]['lr'] = 0.05",
        "pace.step(batch)",
    )
    done = launch(str(small(tmp_path, *body)), engine="processes:2", code=1)
    said = [line for line in done.stderr.splitlines() if "optimizer's numbers differ" in line]
    assert len(said) == 1, done.stderr
    assert "at step 1: the learning rate of group 0 is 0.1 on rank 0 of 1 on " in said[0]
    assert "and 0.05 on rank 0 of 1 on " in said[0]
    assert "local rank 1" in said[0]


def test_the_checksum_is_of_numbers_and_not_of_their_types():
    model = nn.Linear(2, 2)
    one, other = (torch.optim.AdamW(model.parameters(), lr=lr) for lr in (0.5, torch.tensor(0.5)))
    said = [("rank 0", Options(one).numbers()), ("rank 1", Options(other).numbers())]
    assert Options(one).compare(said) == ""
    assert Options(one).checksum() == Options(torch.optim.AdamW(model.parameters(), lr=0.5)).checksum()
    assert Options(one).checksum() != Options(torch.optim.AdamW(model.parameters(), lr=0.25)).checksum()


def test_of_several_votes_the_merged_one_says_that_they_differ():
    same = Vote.merge([Vote(options=7), Vote(options=7)])
    assert not same.options_differ
    mixed = Vote.merge([Vote(options=7), Vote(options=8)])
    assert Vote.unpack(mixed.pack()).options_differ
    assert Vote.merge([mixed, same]).options_differ
