"""The experiment of the seeds: its data, its lines and where they cross, and a run of either kind."""

from __future__ import annotations

import math

import pytest

from machines import needs_cluster
from paceline.data import images
from paceline_bench import seed
from paceline_bench.seed import crossover, photographs
from paceline_bench.seed.crossover import Line
from paceline_bench.seed.job import Job
from paceline_bench.seed.trial import Outcome, Setup, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return photographs.write(tmp_path_factory.mktemp("images"), 12)


def test_images_are_of_three_classes_by_turns_and_always_the_same(folder, tmp_path):
    train, test = images.load(folder)
    assert train.classes == tuple(sorted(photographs.CLASSES))
    assert (len(train), len(test)) == (12, 9)
    again = photographs.write(tmp_path, 3)
    for path in sorted(again.rglob("*.jpg")):
        assert path.read_bytes() == (folder / path.relative_to(again)).read_bytes()


def test_lines_cross_where_both_take_the_same_time():
    one, two = Line(3.0, 0.04), Line(7.0, 0.02)
    images_ = crossover.crossing(one, two)
    assert images_ == pytest.approx(200)
    assert one.start_s + one.image_s * images_ == pytest.approx(two.start_s + two.image_s * images_)
    assert crossover.crossing(one, Line(2.0, 0.03)) == 0.0, "a second machine that costs nothing pays at once"
    assert crossover.crossing(one, Line(7.0, 0.04)) == math.inf


def test_a_line_goes_through_its_points():
    line = Line.through([(32, 3 + 0.5 * 32), (64, 3 + 0.5 * 64), (96, 3 + 0.5 * 96)])
    assert (line.start_s, line.image_s) == (pytest.approx(3), pytest.approx(0.5))


@pytest.mark.parametrize("images_", [0.0, 3.0, 40.0, 150.0, 5000.0, math.inf])
def test_sizes_are_whole_batches_of_what_there_is_on_both_sides(images_):
    sizes = crossover.sizes_around(min(images_, 1536), 32, 1536)
    assert all(size % 32 == 0 and 32 <= size <= 1536 for size in sizes)
    assert len(sizes) >= 3
    if 32 < images_ < 1000:
        assert sizes[0] < images_ < sizes[-1]


def test_every_setup_of_the_article_is_there():
    rows = [setup.row for setup in seed.LOCAL]
    assert {"replicas:2", "processes:2", "pipeline:2,micros=1,cut=preset"} <= set(rows)
    assert any(row.startswith("processes:2/pipeline:2") for row in rows)
    placed = seed.distributed("sequential")
    for mpi in (True, False):
        assert {setup.nodes for setup in placed if setup.mpi == mpi} == {1, 2, 4}


def test_some_setups_alone_beside_the_baseline(monkeypatch):
    ran = []

    def run_one(setup, job, rate, show):
        ran.append(setup.name)
        return Outcome(setup.name, 1.0, 0.1, 0.9, 100.0, 1e9, 0.0, 0.0, 2, 1.0)

    monkeypatch.setattr(seed, "run_one", run_one)
    monkeypatch.setattr(seed, "lacking", lambda setup: "")
    monkeypatch.setattr(seed, "unavailable", lambda: "")
    monkeypatch.setattr(photographs, "write", lambda folder, most: folder)
    (found,) = seed.run(["simple-big/over MPI"], 1, lambda text: None)
    assert ran == [seed.BASELINE.name, *(setup.name for setup in seed.distributed("") if setup.mpi)]
    assert "best on this machine" not in found.details
    with pytest.raises(ValueError, match="no task named tiny/MPI; known: complex-small, "):
        next(seed.run(["tiny/MPI"], 1, lambda text: None))


@pytest.mark.dear
def test_ways_train_the_same(folder):
    """Without a drop of a node's or a library's own: the first loss is of the same weights and images."""
    job = Job("", "alexnet", str(folder), "", 6, 12)
    ways = seed.BASELINE, Setup("ours", "paceline"), Setup("cut", "paceline", "pipeline:2,micros=2,cut=preset", 2)
    told = [run(setup, job, None, lambda text: None) for setup in ways]
    assert [one.steps for one in told] == [2, 2, 2]
    assert {round(one.loss, 2) for one in told} == {round(told[0].loss, 2)}
    for one in told:
        assert 0 < one.until_first_s < one.until_first_s + one.training_s <= one.whole_s
        assert one.memory_bytes > 2e8
        assert one.sent_bytes == 0


@pytest.mark.dear
@needs_cluster
def test_nodes_send_what_they_must(folder):
    """Equal seeds make equal weights, so that less than the weights leaves a node in two steps."""
    job = Job("", "alexnet", str(folder), "", 6, 12)
    one = run(Setup("ours", "paceline", nodes=2), job, None, lambda text: None)
    assert 0 < one.step_bytes <= one.sent_bytes < 57e6


def test_a_process_that_fails_is_told(tmp_path):
    (tmp_path / "train").mkdir()
    job = Job("", "alexnet", str(tmp_path), "", 6, 12)
    with pytest.raises(ValueError, match=r"a process of the task failed \(exit code 1\)(?s:.*)images"):
        run(seed.BASELINE, job, None, lambda text: None)
