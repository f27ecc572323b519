"""A restarted run resumes from its newest checkpoint, bit for bit, with or without `restore` in its script."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import paceline
from launching import begin, finish
from paceline.checkpoint import auto_resume
from paceline.checkpoint.saver import Saver

DATA = torch.utils.data.TensorDataset(torch.randn(20, 4, generator=torch.manual_seed(0)), torch.arange(20) % 3)
STEPS = 3 * 5  # of three epochs


class Crash(Exception):
    """Simulates a power loss: no object is closed."""


OPEN = []  # what was joined


@pytest.fixture
def script(monkeypatch):
    """Runs a script in this process as if in a new one. ``again``: its launcher restarts it."""

    def call(run, *given, again=False, **how):
        for name, fresh in (("_pending", []), ("_numbers", itertools.count()), ("_by_script", []), ("_random", {})):
            monkeypatch.setattr(auto_resume, name, fresh)
        monkeypatch.setenv("PACELINE_RESUME", str(int(again)))
        try:
            return run(*given, **how)
        except Crash:
            return None

    yield call
    while OPEN:  # signal handlers and threads of what crashed would be other tests'
        if not (training := OPEN.pop().training).over:
            training.leave("crashed")


def joined(folder, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    OPEN.append(paceline.join(model, optimizer, F.cross_entropy, batch_size=4, engine="sequential", folder=folder))
    return OPEN[-1]


def weights(pace):
    return [tensor.clone() for tensor in pace.job.model.state_dict().values()]


def one_call(folder, crash=0, every=4, restore=False):
    pace = joined(folder)
    if restore:
        pace.restore()
    for batch in pace.batches(DATA, epochs=3):
        pace.step(batch)
        if every and pace.num_steps % every == 0:
            pace.save()
        if pace.num_steps == crash:
            raise Crash
    pace.close()
    assert pace.num_steps == STEPS
    return weights(pace)


def a_call_per_epoch(folder, crash=0, at_end=False, breaks=False):
    """The script itself counts the calls. ``breaks``: the loop ends before the requested epochs."""
    pace = joined(folder)
    for _ in range(3):
        for batch in pace.batches(DATA, epochs=9 if breaks else 1):
            pace.step(batch)
            if not at_end and pace.num_steps % 4 == 0:
                pace.save()
            if pace.num_steps == crash:
                raise Crash
            if breaks and batch.ends_epoch:
                break
        torch.randn(3)
        if at_end:
            pace.save()
    pace.close()
    assert pace.num_steps == STEPS
    return weights(pace)


def two_models(folder, crash=0):
    """Two models trained alternately; the second has its own join, and uses the samples of the first."""
    one, two = joined(folder), joined(folder / "other", seed=1)
    for batch in one.batches(DATA, epochs=3):
        x, y = one.rows(batch)
        for pace in (one, two):
            pace.backward(F.cross_entropy(pace.job.model(x), y), rows=len(y))
            pace.update()
        if one.num_steps % 4 == 0:
            one.save()
            two.save()
        if one.num_steps == crash:
            raise Crash
    one.close()
    two.close()
    return weights(one) + weights(two)


def two_folds(folder, crash=0):
    """Two trainings in sequence, in one folder, with the same model: a checkpoint of the second fits the first."""
    found = []
    for fold in range(2):
        pace = joined(folder, seed=fold)
        for batch in pace.batches(DATA, epochs=3):
            pace.step(batch)
            if pace.num_steps == 7:
                pace.save()
            if fold * STEPS + pace.num_steps == crash:
                raise Crash
        pace.close()
        found += weights(pace)
    return found


@pytest.mark.parametrize(
    ("run", "how", "crash"),
    [
        (one_call, {}, 6),
        (one_call, {}, 12),
        (one_call, {"restore": True}, 6),
        (one_call, {}, 3),
        (a_call_per_epoch, {}, 7),
        (a_call_per_epoch, {}, 13),
        (a_call_per_epoch, {"at_end": True}, 8),
        (a_call_per_epoch, {"at_end": True}, 12),
        (a_call_per_epoch, {"breaks": True}, 13),
        (two_models, {}, 6),
        (two_folds, {}, 9),
        (two_folds, {}, STEPS + 9),
    ],
)
def test_it_ends_as_if_nothing_had_happened(script, tmp_path, run, how, crash):
    whole = script(run, tmp_path / "whole", **how)
    assert script(run, tmp_path / "crashed", crash=crash, **how) is None
    resumed = script(run, tmp_path / "crashed", again=True, **how)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_script_that_restores_does_so_once(script, tmp_path, monkeypatch):
    script(one_call, tmp_path, crash=6)
    calls, restore = [], Saver.restore
    monkeypatch.setattr(Saver, "restore", lambda self, *given: calls.append(given) or restore(self, *given))
    for how in (True, False):
        script(one_call, tmp_path, again=True, restore=how)
    assert len(calls) == 2


@pytest.mark.parametrize("restore", [True, False])
def test_without_a_checkpoint_it_says_so_and_begins_at_step_0(script, tmp_path, capsys, restore):
    want = script(one_call, tmp_path / "whole", every=0)
    capsys.readouterr()
    found = script(one_call, tmp_path / "again", every=0, again=True, restore=restore)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    output = capsys.readouterr().err
    assert "no checkpoint" in output
    assert output.endswith("begins at step 0\n")


def test_a_loop_without_batches_begins_at_step_0_and_is_told(script, tmp_path, capsys):
    def run():
        pace = joined(tmp_path)
        for _ in range(3):
            pace.step(DATA[:4])
        pace.save()
        pace.close()
        return weights(pace)

    first, then = script(run), script(run, again=True)
    assert all(torch.equal(a, b) for a, b in zip(first, then, strict=True))
    assert capsys.readouterr().err.count("not resumed, since this loop does not use pace.batches()") == 1


def test_another_word_than_0_or_1_is_told(monkeypatch):
    monkeypatch.setenv("PACELINE_RESUME", "yes")
    with pytest.raises(ValueError, match="PACELINE_RESUME='yes' is neither 1 nor 0"):
        joined(None)


KILLED = Path(__file__).parents[1] / "support" / "scripts" / "killed_at_once.py"


def weights_of(folder):
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]


@pytest.mark.dear
def test_all_nodes_killed_at_once_end_with_the_bits_of_a_resume_by_hand(tmp_path):
    far, near = tmp_path / "far", tmp_path / "near"
    command = "run", "--plan", "sequential", "--shares", "equal", "--nodes", "2:2"
    _, errors = finish(begin(*command, "--out", far, KILLED, far, 5))
    assert errors.count("resumes from its newest checkpoint") == 1
    assert f"resumed from the checkpoint of step 3 in {far}" in errors
    assert "Traceback" not in errors
    finish(begin(*command, "--restarts", 0, "--out", near, KILLED, near, 5), code=137)
    finish(begin(*command, "--restarts", 0, "--out", near, KILLED, near, 5, "restore"))
    one, other = weights_of(far), weights_of(near)
    assert len(one) == len(other) == 2
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


@pytest.mark.dear
def test_without_a_folder_two_killed_nodes_begin_at_step_0(tmp_path):
    _, errors = finish(begin("run", "--plan", "sequential", "--nodes", "2:2", KILLED, tmp_path, 2))
    assert "no checkpoint, since the run has no folder (--out): it begins at step 0" in errors
    assert len(weights_of(tmp_path)) == 2
