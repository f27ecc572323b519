"""A node that died is started again and comes back between two steps: it ends as if it had never been away."""

import json
import subprocess
import sys
import time

import pytest
import torch
from outlived import BATCH, COUNT, EPOCHS, Samples

from launching import HERE, environment
from nodes import OPTIMIZERS, Plain, build, gap, reference
from paceline.checkpoint import checkpoint
from paceline.data import sampler
from paceline.elastic.reconfigure import JOIN_S
from paceline.report.page import summary as used_
from paceline.report.page.run import load
from paceline.report.record import read

pytestmark = pytest.mark.long
START = (
    "import sys; from paceline.launch import local;"
    "sys.exit(local.start(sys.argv[4:], sys.argv[1], int(sys.argv[2]), min_nodes=int(sys.argv[3]), returns=3))"
)
LENGTHS = [min(BATCH, COUNT - at) for at in range(0, COUNT, BATCH)] * EPOCHS


def launch(folder, *words, engine="sequential", num_nodes=3, least=1):
    script = [sys.executable, str(HERE / "scripts" / "outlived.py"), str(folder), *words]
    command = [sys.executable, "-c", START, engine, str(num_nodes), str(least), *script]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=110, check=False)


def batches():
    """The indices of each step's samples, in the order of one process alone."""
    turns = [sampler.permutation(3, epoch, COUNT) for epoch in range(EPOCHS)]
    return [turn[at : at + BATCH] for turn in turns for at in range(0, COUNT, BATCH)]


def check(folder, done, nodes=3, local=1, exact=True):
    """Everybody ended with the same weights, losses and schedule; each sample of each step was computed once."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    names = sorted(path.stem for path in folder.glob("?-?.json"))
    assert names == [f"{node}-{rank}" for node in range(nodes) for rank in range(local)], done.stderr
    said = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    states = [torch.load(folder / f"{name}.pt", weights_only=True) for name in names]
    for state in states:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items() if "running" not in name)
    assert sum(each["leader"] for each in said) == 1
    assert {each["world"][1] for each in said} == {nodes}
    source = Samples()
    longest = max((each["losses"] for each in said), key=len)
    assert all(each["losses"] == longest[-len(each["losses"]) :] for each in said)
    assert all(each["counted"] == pytest.approx(float(source.y.double().mean()), rel=1e-12) for each in said)
    if exact:
        data = [(source.x[turn], source.y[turn]) for turn in batches()]
        want, want_losses = reference(build(Plain), data, OPTIMIZERS["momentum"])
        assert longest == pytest.approx(want_losses[-len(longest) :], rel=1e-9)
        assert gap(states[0], want) < 1e-9
    used = {step: [] for step in range(len(LENGTHS))}
    for path in folder.glob("used-*.jsonl"):
        for line in path.read_text().splitlines():
            step, values = json.loads(line)
            used[step] += values
    for step, turn in enumerate(batches()):
        assert sorted(used[step]) == sorted(source.x[turn][:, 0].tolist()), f"step {step}"
    events = read(folder)
    weights = {event["step"]: event["weight"] for event in events if event["event"] == "step"}
    assert [weights[step] for step in sorted(weights)] == LENGTHS
    assert checkpoint.read_newest(folder).step == len(LENGTHS)
    assert used_.sample_usage(load(folder)) == f"each once in {EPOCHS} whole epochs"
    return events


@pytest.mark.dear
@pytest.mark.parametrize(("num_nodes", "victim"), [(2, 1), (3, 0)])
def test_the_others_go_on_and_it_comes_back(tmp_path, num_nodes, victim):
    """Also who led does, and no longer leads then."""
    done = launch(tmp_path, f"{victim}:3:backward", "back", num_nodes=num_nodes)
    events = check(tmp_path, done, nodes=num_nodes)
    told = [event for event in events if event["event"] == "regroup"]
    assert [event["num_nodes"] for event in told] == [num_nodes - 1, num_nodes]
    assert [len(event["came"]) for event in told] == [0, 1]
    (welcome,) = (event for event in events if event["event"] == "welcome")
    assert welcome["num_bytes"] < 50_000  # all else went ahead of it
    assert welcome["ahead_bytes"] > 2 * sum(p.nbytes for p in build(Plain).parameters())
    assert f"node {victim} failed; restarting it" in done.stderr
    assert len([event for event in events if event["event"] == "redo"]) <= 2  # one for the forms


@pytest.mark.dear
def test_all_but_one_come_back(tmp_path):
    check(tmp_path, launch(tmp_path, "0:2:vote", "2:2:forward", "back"))


@pytest.mark.dear
def test_nodes_of_several_processes(tmp_path):
    """What is large goes ahead there too."""
    done = launch(tmp_path, "1:4:forward", "back", engine="processes:2", num_nodes=2)
    events = check(tmp_path, done, nodes=2, local=2)
    (welcome,) = (event for event in events if event["event"] == "welcome")
    assert welcome["num_bytes"] < 50_000
    assert welcome["ahead_bytes"] > 2 * sum(p.nbytes for p in build(Plain).parameters())


@pytest.mark.dear
@pytest.mark.parametrize(
    ("what", "engine", "num_nodes"),
    [("spread1", "sequential", 3), ("settle0", "sequential", 3), ("settle1", "processes:2", 2)],
)
def test_who_dies_while_all_join_ends_nothing(tmp_path, what, engine, num_nodes):
    done = launch(tmp_path, what, "back", engine=engine, num_nodes=num_nodes)
    events = check(tmp_path, done, nodes=num_nodes, local=1 if engine == "sequential" else 2)
    told = [event for event in events if event["event"] == "regroup"]
    assert (told[0]["step"], told[0]["num_nodes"]) == (0, num_nodes - 1)
    assert told[-1]["num_nodes"] == num_nodes


@pytest.mark.dear
@pytest.mark.parametrize("how", ["half", "adam", "shares", "sync", "reproducible"])
def test_however_it_trains(tmp_path, how):
    """Against the same training by one process, which nothing happens to."""
    alone, nodes = tmp_path / "alone", tmp_path / "nodes"
    for folder, words, many in ((alone, (), 1), (nodes, ("1:3:backward", "back"), 3)):
        folder.mkdir()
        kept = () if how == "reproducible" or (many == 1 and how in ("half", "shares")) else (how,)
        engine = "reproducible:8" if how == "reproducible" else "sequential"
        done = launch(folder, *words, *kept, engine=engine, num_nodes=many, least=int(many > 1))
        assert done.returncode == 0, done.stderr
    check(nodes, done, exact=False)
    (want,) = (torch.load(path, weights_only=True) for path in alone.glob("*.pt"))
    found = [torch.load(path, weights_only=True) for path in sorted(nodes.glob("*.pt"))]
    if how == "half":  # rounded, and so not the same
        assert done.stderr.count("the all-reduce adds in bf16: with 3 nodes each sum is rounded once per node") == 1
        losses = [json.loads((folder / "0-0.json").read_text())["losses"] for folder in (alone, nodes)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    elif how == "reproducible":
        assert all(torch.equal(value, want[name]) for state in found for name, value in state.items())
    else:
        assert all(gap(state, want) < 1e-9 for state in found)


@pytest.mark.dear
@pytest.mark.parametrize("how", ["whole", "thin"])
def test_a_codec_whose_state_all_nodes_share_begins_anew_with_who_comes_back(tmp_path, how):
    """It has no warm start, and sums of matrices with unlike ones would be no sums."""
    check(tmp_path, launch(tmp_path, "1:3:backward", "back", how), exact=how == "whole")


@pytest.mark.dear
def test_who_has_too_little_memory_for_more_rows_takes_them_in_more_parts_until_it_is_back(tmp_path):
    check(tmp_path, launch(tmp_path, "1:3:backward", "back", "memory"))
    times = [json.loads(path.read_text())["times"] for path in sorted(tmp_path.glob("?-?.json"))]
    for node in (0, 2):
        assert times[node][0] == times[node][-1] == 1
        assert 2 in times[node]
        changes = [one for one, other in zip(times[node], times[node][1:], strict=False) if one != other]
        assert changes == [1, 2]


@pytest.mark.dear
def test_who_comes_back_and_dies_while_it_is_given_the_state_costs_a_step(tmp_path):
    done = launch(tmp_path, "2:3:forward", "back", "take")
    events = check(tmp_path, done)
    assert done.stderr.count("node 2 failed; restarting it") == 2
    assert [event["num_nodes"] for event in events if event["event"] == "regroup"] == [2, 3, 2, 3]


@pytest.mark.dear
def test_who_dies_while_it_is_given_a_copy_costs_nothing(tmp_path):
    done = launch(tmp_path, "2:3:forward", "back", "copy")
    events = check(tmp_path, done)
    assert done.stderr.count("node 2 failed; restarting it") == 2
    told = [event for event in events if event["event"] == "regroup"]
    assert [len(event["lost"]) for event in told] in ([1, 0], [1, 0, 0])  # they may have met to find it gone
    assert len([event for event in events if event["event"] == "redo"]) <= 2  # and one for the forms


@pytest.mark.dear
def test_who_comes_back_and_is_reached_by_nobody_ends_nobody(tmp_path):
    """Story: of members that did not reach a new one, the one with the highest rank ended itself."""
    done = launch(tmp_path, "2:3:forward", "back", "shut")
    check(tmp_path, done)
    assert done.stderr.count("node 2 failed; restarting it") == 2
    assert "node 1 ended" not in done.stderr


@pytest.mark.dear
def test_who_has_another_model_is_refused_by_name(tmp_path):
    done = launch(tmp_path, "2:3:forward", "back", "other")
    check(tmp_path, done)
    assert "it was given different optimizer, model" in done.stderr or "different model" in done.stderr


def _has_lost(folder):
    record = folder / "record.jsonl"
    return record.exists() and "regroup" in record.read_text()


@pytest.mark.dear
@pytest.mark.parametrize(
    ("encrypt", "engine", "its"),
    [
        ("0", "sequential", "sequential"),
        ("1", "sequential", "sequential"),
        ("0", "processes:2", "sequential"),
        ("0", "sequential", "processes:2"),
    ],
)
def test_a_node_that_is_started_by_hand_comes_with_the_ticket(tmp_path, encrypt, engine, its):
    """Nobody starts the one that died again; another does, by the command line, maybe in another way; the ticket says
    whether it encrypts."""
    script, ticket = str(HERE / "scripts" / "outlived.py"), tmp_path / "ticket.json"
    start = START.replace("returns=3", "returns=0")
    command = [sys.executable, "-c", start, engine, "2", "1", sys.executable, script, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [*command, "1:3:backward", "back"],
        env=environment(PACELINE_TICKET_FILE=str(ticket), PACELINE_ENCRYPT=encrypt),
        **pipes,
    ) as run:
        try:
            end = time.monotonic() + 60
            while not _has_lost(tmp_path) and time.monotonic() < end:
                time.sleep(0.2)
            late = [sys.executable, "-m", "paceline", "run", "--plan", its, "--join", str(ticket)]
            late += [script, str(tmp_path), "back"]
            came = subprocess.run(
                late, env=environment(OUTLIVED_NODE="1"), capture_output=True, text=True, timeout=80, check=False
            )
            out, errors = run.communicate(timeout=80)
        finally:
            run.kill()
    assert came.returncode == 0, came.stdout + came.stderr
    done = subprocess.CompletedProcess(command, run.returncode, out, errors)
    if engine == its:
        check(tmp_path, done, nodes=2)
        return
    assert done.returncode == 0, errors
    states = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("?-?.pt"))]
    assert len(states) == 3
    assert all(gap(state, states[0]) < 1e-9 for state in states)  # sums of unlike shapes are not the same bits
    (welcome,) = (event for event in read(tmp_path) if event["event"] == "welcome")
    assert welcome["num_bytes"] < 50_000


@pytest.mark.dear
def test_who_dies_when_another_is_taken_in_comes_back_as_well(tmp_path):
    events = check(tmp_path, launch(tmp_path, "1:2:backward", "back", "meet2"))
    told = [event for event in events if event["event"] == "regroup"]
    assert sum(len(event["lost"]) for event in told) == 2
    assert sum(len(event["came"]) for event in told) == 2


@pytest.mark.dear
def test_who_leads_stops_while_it_gives_another_its_state_and_nobody_waits_for_it(tmp_path):
    """The one that is given it notices as the others do: it is alive, and they meet with all who are."""
    done = launch(tmp_path, "1:3:forward", "back", "halt", num_nodes=4)
    assert done.returncode == 0, done.stderr
    source = Samples()
    want, _ = reference(build(Plain), [(source.x[turn], source.y[turn]) for turn in batches()], OPTIMIZERS["momentum"])
    states = [torch.load(tmp_path / f"{node}-0.pt", weights_only=True) for node in (1, 2, 3)]
    assert all(gap(state, want) < 1e-9 for state in states)
    halted_s = (tmp_path / "halted").stat().st_mtime
    after = min(
        event["time"] for event in read(tmp_path) if event["event"] == "regroup" and event["time"] > halted_s + 1
    )
    # a node that watched its own connection alone would notice after JOIN_S, and no sooner
    assert after - halted_s < JOIN_S, done.stderr


@pytest.mark.dear
@pytest.mark.parametrize("victims", [(1, 2), (0, 1)])
def test_fewer_than_the_minimum_are_left_and_wait_and_both_come_back(tmp_path, victims):
    """Story: the launcher gave the last one 15 s, nodes that came back found nobody, and a traceback said so."""
    done = launch(tmp_path, *(f"{node}:3:forward" for node in victims), "back", least=2)
    check(tmp_path, done)
    assert all(done.stderr.count(f"node {node} failed; restarting it") == 1 for node in victims)
    assert "resumes from" not in done.stderr
