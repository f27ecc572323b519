"""The samples and their order follow from (seed, epoch, step) alone; who computes which rows changes nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.data.batches import as_source, batches
from paceline.data.sampler import Assignment, num_steps, permutation, window

SHARES = {
    1: (None, (3.0,)),
    2: (None, (1.0, 2.0), (0.0, 1.0), (1.0, 0.0), (0.1, 0.7), (0.2, 0.7), (0.0, 1 / 3)),
    3: (None, (1.0, 2.0, 3.0), (0.0, 1.0, 0.0), (0.1, 0.2, 0.7), (1 / 3, 1 / 7, 1 / 11)),
    4: (None, (1.0, 2.0, 3.0, 4.0), (0.0, 0.0, 5.0, 1.0), (0.1, 0.1, 0.1, 0.3)),
}
CREWS = [(num_nodes, shares) for num_nodes in SHARES for shares in SHARES[num_nodes]]
COUNTS = (0, 1, 2, 7, 32, 97)


def seats(num_nodes, shares=None, local_size=1):
    """Every process's seat, nodes first."""
    pairs = itertools.product(range(num_nodes), range(local_size))
    return [Assignment(node, num_nodes, local, local_size, shares) for node, local in pairs]


# Permutations.


@pytest.mark.parametrize("seed", [0, 1, 2**31])
@pytest.mark.parametrize("epoch", [0, 1, 99])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
def test_every_sample_comes_once_and_equal_arguments_give_equal_orders(seed, epoch, size):
    order = permutation(seed, epoch, size)
    assert sorted(order.tolist()) == list(range(size))
    assert np.array_equal(order, permutation(seed, epoch, size))


def test_the_order_is_this_one_for_ever():
    """A run that is resumed years later, elsewhere, goes on with the samples it has not seen."""
    assert permutation(3, 1, 12).tolist() == [0, 11, 6, 2, 1, 3, 7, 4, 10, 9, 8, 5]
    assert permutation(0, 0, 5).tolist() == [3, 2, 1, 0, 4]


def test_samples_move_everywhere():
    places = np.stack([permutation(0, epoch, 20) for epoch in range(4000)])
    counts = np.stack([np.bincount(places[:, at], minlength=20) for at in range(20)])
    assert abs(counts - 200).max() < 5 * (200 * 0.95) ** 0.5 + 1  # five standard deviations


def test_every_seed_and_epoch_has_an_order_of_its_own():
    keys = list(itertools.product(range(5), range(5)))
    orders = {tuple(permutation(seed, epoch, 100).tolist()) for seed, epoch in keys}
    assert len(orders) == len(keys)
    assert tuple(range(100)) not in orders


# Windows.


@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (1, 8), (7, 3), (8, 4), (97, 32), (100, 1)])
def test_windows_are_the_epoch_and_only_the_last_is_short(size, batch_size):
    order = permutation(3, 1, size)
    windows = [window(order, step, batch_size) for step in range(num_steps(size, batch_size))]
    assert np.array_equal(np.concatenate(windows), order)
    assert all(len(w) == batch_size for w in windows[:-1])
    assert len(windows[-1]) == (size % batch_size or batch_size)


@pytest.mark.parametrize("start", range(5))
def test_resuming_at_any_step_goes_on_with_the_same_windows(start):
    """What is kept is (seed, epoch, step): everything after it is made anew."""
    whole = [
        (b.epoch, b.step, b.indices.tolist()) for b in batches(numbered(97), 32, 3, seed=5, assignment=Assignment())
    ]
    resumed = [
        (b.epoch, b.step, b.share(Assignment())[0].tolist())
        for b in batches(numbered(97), 32, 3, seed=5, assignment=Assignment(), start=(1, start))
    ]
    assert resumed == whole[4 + start :]
    assert resumed


# Seats.


@pytest.mark.parametrize(("num_nodes", "shares"), CREWS)
@pytest.mark.parametrize("local_size", [1, 2, 3])
@pytest.mark.parametrize("count", COUNTS)
def test_seats_cover_the_batch_in_order_without_overlap(num_nodes, shares, local_size, count):
    dealt = [row for assignment in seats(num_nodes, shares, local_size) for row in assignment.rows(count)]
    assert dealt == list(range(count))


@pytest.mark.parametrize(("num_nodes", "shares"), CREWS)
@pytest.mark.parametrize("count", COUNTS)
def test_nodes_get_their_shares_to_within_a_row(num_nodes, shares, count):
    wanted = np.array(shares or [1.0] * num_nodes)
    for assignment, fair in zip(seats(num_nodes, shares), count * wanted / wanted.sum(), strict=True):
        assert abs(len(assignment.rows(count)) - fair) < 1 + 1e-6
        if not fair:
            assert not assignment.rows(count)


@pytest.mark.parametrize("local_size", [1, 2, 3, 5])
def test_the_processes_of_a_node_differ_by_at_most_a_row(local_size):
    sizes = [len(assignment.rows(97)) for assignment in seats(1, None, local_size)]
    assert max(sizes) - min(sizes) <= 1


# Batches.


class Fetching:
    """A source that says what was asked of it: each row is (sample, epoch)."""

    def __init__(self, size):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def fetch(self, indices, epoch):
        self.asked.append(list(indices))
        samples = torch.tensor(self.asked[-1])
        return samples, torch.full_like(samples, epoch)


class Counting(Dataset):
    """Map-style, one sample at a time."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        assert isinstance(i, int)
        return torch.tensor(i), torch.tensor(-i)


def numbered(size):
    return TensorDataset(torch.arange(size), -torch.arange(size))


DATASETS = {"tensors": numbered, "map-style": Counting, "fetching": Fetching}
every_dataset = pytest.mark.parametrize("kind", DATASETS)


@every_dataset
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_any_number_of_nodes_computes_the_same_global_sequence(kind, num_nodes):
    """Every rank goes through the batches for itself; put together they are one permutation per epoch."""
    of_seat = [
        list(batches(DATASETS[kind](97), 32, 2, seed=5, assignment=assignment)) for assignment in seats(num_nodes)
    ]
    seen = []
    for together in zip(*of_seat, strict=True):
        shares = [batch.share(assignment) for batch, assignment in zip(together, seats(num_nodes), strict=True)]
        seen += [int(sample) for share in shares if share for sample in share[0]]
    assert seen == [*permutation(5, 0, 97).tolist(), *permutation(5, 1, 97).tolist()]


@every_dataset
def test_a_changed_seat_gets_the_rows_of_that_seat(kind):
    """As after a rank was lost: the batch was fetched for another seat, and is dealt again."""
    was, now = Assignment(2, 3), Assignment(1, 2, 1, 2, (3.0, 1.0))
    for batch in batches(DATASETS[kind](97), 32, 1, seed=5, assignment=was):
        for assignment in (now, was, Assignment(), now):
            rows = assignment.rows(len(batch.indices))
            share = batch.share(assignment)
            assert (share[0].tolist() if rows else share) == (batch.indices[rows.start : rows.stop].tolist() or None)


@every_dataset
def test_a_seat_without_rows_gets_none(kind):
    nobody = Assignment(0, 2, shares=(0.0, 1.0))
    assert [batch.share(nobody) for batch in batches(DATASETS[kind](7), 3, 1, seed=0, assignment=nobody)] == [None] * 3


@every_dataset
def test_batches_know_where_they_are(kind):
    made = list(batches(DATASETS[kind](7), 3, 2, seed=0, assignment=Assignment()))
    assert [(b.epoch, b.step, b.weight, b.ends_epoch) for b in made] == [
        (epoch, step, weight, step == 2) for epoch in range(2) for step, weight in enumerate([3.0, 3.0, 1.0])
    ]


@every_dataset
def test_unshuffled_is_the_datasets_own_order_in_every_epoch(kind):
    made = batches(DATASETS[kind](7), 3, 2, seed=0, assignment=Assignment(), shuffle=False)
    assert [batch.share(Assignment())[0].tolist() for batch in made] == 2 * [[0, 1, 2], [3, 4, 5], [6]]


def test_a_source_is_told_the_epoch_and_asked_for_nothing_but_the_seats_rows():
    source, assignment = Fetching(8), Assignment(1, 2)
    epochs = [batch.share(assignment)[1].tolist() for batch in batches(source, 4, 2, seed=5, assignment=assignment)]
    assert epochs == [[0, 0], [0, 0], [1, 1], [1, 1]]
    orders = [permutation(5, epoch, 8) for epoch in range(2)]
    assert source.asked == [order[start : start + 2].tolist() for order in orders for start in (2, 6)]


def test_leaving_early_does_not_hang():
    made = batches(Fetching(97), 4, 100, seed=5, assignment=Assignment())
    assert next(made).share(Assignment())[0].tolist() == permutation(5, 0, 97)[:4].tolist()
    made.close()
    with pytest.raises(StopIteration):
        next(made)


def test_what_is_no_dataset_is_refused_with_what_would_be_one():
    with pytest.raises(ValueError, match=r"begins anew each time, got generator.*TensorDataset"):
        as_source(i for i in range(3))
    with pytest.raises(ValueError, match="empty"):
        next(batches(numbered(0), 4, 1, seed=0, assignment=Assignment()))


class OneByOne(TensorDataset):
    """Its samples are its own: each is centred by itself."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x - x.mean(), y


def test_a_dataset_that_changes_its_samples_is_asked_for_one_at_a_time():
    x, y = torch.arange(12.0).view(4, 3), torch.arange(4)
    (batch,) = batches(OneByOne(x, y), 4, 1, 0, Assignment(), shuffle=False)
    got, labels = batch.share(Assignment())
    assert torch.equal(got, torch.tensor([[-1.0, 0.0, 1.0]] * 4))
    assert torch.equal(labels, y)


def test_items_may_be_tensors_arrays_dicts_and_nested():
    for items, expected in (
        ([torch.full((3,), float(i)) for i in range(4)], torch.arange(4.0).view(4, 1).expand(4, 3)),
        (np.arange(8.0).reshape(4, 2), torch.arange(8.0, dtype=torch.float64).view(4, 2)),
        ([({"x": torch.tensor(i)}, (np.int64(i), i)) for i in range(4)], None),
    ):
        (batch,) = batches(items, 4, 1, 0, Assignment(), shuffle=False)
        got = batch.share(Assignment())
        if expected is not None:
            assert torch.equal(got, expected)
        else:
            assert got[0]["x"].tolist() == got[1][0].tolist() == got[1][1].tolist() == [0, 1, 2, 3]
            assert isinstance(got, tuple)


@pytest.mark.parametrize("wrong", [{"x": torch.zeros(4)}, "text", 5, (torch.zeros(4), torch.zeros(4))])
def test_what_is_no_dataset_is_named(wrong):
    with pytest.raises(ValueError, match=r"batches\(\).*got .*(dict|str|int|tuple).*TensorDataset"):
        next(batches(wrong, 4, 1, 0, Assignment()))


@pytest.mark.parametrize("count", [19_710_938, 10**9 + 7])
def test_no_row_is_lost_however_many_there_are(count):
    shares = (0.31, 0.07, 0.11, 0.23, 0.17, 0.11)
    ranges = [Assignment(node, 6, shares=shares).rows(count) for node in range(6)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("least", [1, 2, 3])
def test_nobody_has_fewer_rows_than_are_needed_but_none(least):
    for shares in (None, (1.0, 3.0, 2.0), (0.0, 1.0, 5.0), (5.0, 5.0, 1.0)):
        for local_size in (1, 2, 5):
            for count in (*range(1, 40), 500):
                places = [(n, 3, r, local_size, shares) for n in range(3) for r in range(local_size)]
                rows = [Assignment(*place, least=least, whole=500).rows(count) for place in places]
                assert [i for each in rows for i in each] == list(range(count))
                assert count >= 500 or all(len(each) == 0 or len(each) >= min(least, count) for each in rows)
                # a whole batch is dealt as it was asked for
                assert [Assignment(*place, least=least, whole=count).rows(count) for place in places] == [
                    Assignment(*place).rows(count) for place in places
                ]
