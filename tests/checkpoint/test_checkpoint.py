"""A checkpoint is read back bit for bit; an unsupported value is named by its path; old ones are removed."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from paceline.checkpoint import export, tensor_file
from paceline.checkpoint.checkpoint import Draft, newest, read, read_newest, write

DTYPES = [*tensor_file.CODES, torch.complex128, torch.float8_e5m2fnuz]


def bits(tensor):
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten()).view(torch.uint8).tolist()


def same(a, b):
    """Equal in type and bits at every level; ``b`` is the value that was read."""
    if isinstance(a, torch.Tensor):
        a = a.detach().resolve_conj().resolve_neg()
        return type(b) is torch.Tensor and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def some_tensor(rng):
    shape = [rng.choice((0, 1, 2, 3, 7)) for _ in range(rng.randrange(4))]
    dtype = rng.choice(DTYPES)
    length = math.prod(shape) * dtype.itemsize
    values = [rng.randrange(2 if dtype is torch.bool else 256) for _ in range(length)]
    tensor = torch.tensor(values, dtype=torch.uint8).view(dtype).view(shape)
    changes = [lambda t: t, lambda t: t.T if t.dim() == 2 else t, lambda t: t[::2] if t.dim() else t]
    if dtype in (torch.float32, torch.float64):
        changes.append(torch.nn.Parameter)
    if dtype in (torch.complex64, torch.complex128):
        changes.append(lambda t: t.conj())
    return rng.choice(changes)(tensor)


def some_array(rng):
    dtype = np.dtype(rng.choice(["f2", "<f4", ">f8", "i1", ">i4", "u8", "?", "c16", "M8[ns]", "m8[D]", "U3", "S2"]))
    shape = [rng.choice((0, 1, 2, 5)) for _ in range(rng.randrange(3))]
    if dtype.kind == "U":
        return np.array(rng.choice(["", "a", "abc"])).astype(dtype)
    array = np.zeros(shape, dtype)
    if dtype.kind != "?":
        array = np.frombuffer(rng.randbytes(array.nbytes), dtype).reshape(shape)
    return rng.choice([array, array.T, array.copy(), np.zeros(1, dtype)[0]])


def some_tree(rng, depth=0):
    leaves = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice((0, -1, 1, 2**63 - 1, 2**63, -(2**63), -(2**64), 10**5000, rng.getrandbits(200))),
        lambda: rng.choice((0.0, -0.0, 0.1, 5e-324, 1e308, 1e22, math.inf, -math.inf, math.nan, rng.gauss(0, 1))),
        lambda: struct.unpack("d", struct.pack("Q", rng.getrandbits(64)))[0],
        lambda: rng.choice(("", "x", "é \u2028 \U0001f6b4", "__metadata__", 'a"]\n\\', "\0", "tensor", "dict")),
        lambda: rng.randbytes(rng.choice((0, 1, 9))),
        lambda: some_tensor(rng),
        lambda: some_array(rng),
    ]
    if depth > 4 or rng.random() < 0.4:
        return rng.choice(leaves)()
    parts = [some_tree(rng, depth + 1) for _ in range(rng.randrange(5))]
    keys = [rng.choice(("tensor", "int", "0", 0, -7, 2**70, "", "a'b", f"key {i}", i)) for i in range(len(parts))]
    kinds = [list, tuple, lambda parts: dict(zip(keys, parts, strict=True))]
    kinds.append(lambda parts: OrderedDict(zip(keys, parts, strict=True)))
    kinds.append(lambda parts: Counter(keys))
    return rng.choice(kinds)(parts)


@pytest.mark.parametrize("seed", range(10))
def test_any_tree_comes_back_bit_for_bit(tmp_path, seed):
    rng = random.Random(seed)
    for step in range(12):
        state = [some_tree(rng) for _ in range(6)]
        weights = {name: some_tensor(rng) for name in ("a.weight", "b", "é", "", "state[0]")}
        weights = {name: value for name, value in weights.items() if value.dtype in tensor_file.CODES}
        found = read(write(tmp_path, step, weights, state))
        assert found.step == step
        assert same(state, found.state)
        assert list(found.weights) == list(weights)
        assert all(same(value, found.weights[name]) for name, value in weights.items())


def test_same_can_tell_apart():
    pairs = [(0.0, -0.0), (1, True), (1, 1.0), ((), []), ("a", b"a"), ({1: 2}, {"1": 2}), (np.float32(1), 1.0)]
    pairs += [({}, OrderedDict()), (torch.zeros(1), torch.zeros(1, 1)), (torch.tensor(0.0), torch.tensor(-0.0))]
    assert not any(same(a, b) for a, b in pairs)


def test_every_tensor_has_memory_of_its_own(tmp_path):
    whole = torch.arange(10.0)
    found = read(write(tmp_path, 0, {"w": whole}, [whole[:5], whole[5:], whole.numpy()]))
    for part in (found.weights["w"], found.state[0], found.state[1]):
        assert part.untyped_storage().nbytes() == part.numel() * 4
        part.zero_()
    found.state[2][0] = 7
    assert whole.tolist() == list(range(10))


def test_an_optimizer_and_a_scheduler_go_on_from_what_is_read(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 5])

    def step(model, optimizer, scheduler):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()

    one, other = make(), make()
    for _ in range(3):
        step(*one)
    state = {"rng": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    state |= {"optimizer": one[1].state_dict(), "scheduler": one[2].state_dict()}
    found = read(write(tmp_path, 3, one[0].state_dict(), state))
    for _ in range(3):
        step(*one)
    other[0].load_state_dict(found.weights)
    other[1].load_state_dict(found.state["optimizer"])
    other[2].load_state_dict(found.state["scheduler"])
    torch.set_rng_state(found.state["rng"])
    random.setstate(found.state["python"])
    for _ in range(3):
        step(*other)
    assert same(dict(one[0].state_dict()), dict(other[0].state_dict()))
    assert same(one[1].state_dict(), other[1].state_dict())
    assert other[2].get_last_lr() == one[2].get_last_lr()


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("state", "place", "what"),
    [
        ({"a": [0, {"b": object()}]}, r"state\['a'\]\[1\]\['b'\]", "builtins.object"),
        ({"a": {1: {2}}}, r"state\['a'\]\[1\]", "set"),
        ({"f": torch.nn.functional.relu}, r"state\['f'\]", "function"),
        ((Pair(1, 2),), r"state\[0\]", "Pair"),
        ([torch.float32], r"state\[0\]", "torch.dtype"),
        ([torch.empty(2, device="meta")], r"state\[0\]", "meta"),
        ({"x": np.array([None])}, r"state\['x'\]", "object"),
        ({"x": np.zeros(1, "i4,f8")}, r"state\['x'\]", "f8"),
        ({"x": {1.5: 0}}, r"state\['x'\]", r"key 1\.5, a float"),
        ({"x": {True: 0}}, r"state\['x'\]", "key True, a bool"),
    ],
)
def test_what_cannot_be_kept_is_named_by_its_place_and_nothing_is_written(tmp_path, state, place, what):
    with pytest.raises(ValueError, match=f"{place} .*{what}"):
        write(tmp_path, 0, {}, state)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_contains_itself_is_told(tmp_path):
    loop = []
    loop += [loop, loop]
    with pytest.raises(ValueError, match="contains itself"):
        write(tmp_path, 0, {}, {"a": loop})


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"w": torch.zeros(1, dtype=torch.complex128)}, "'w' is torch.complex128, .* it can float64"),
        ({"w": 3}, "'w' is a int, not a tensor"),
        ({"__metadata__": torch.zeros(1)}, "cannot be named '__metadata__'"),
        ({3: torch.zeros(1)}, "cannot be named 3"),
    ],
)
def test_weights_that_safetensors_cannot_hold_are_named(tmp_path, weights, what):
    with pytest.raises(ValueError, match=what):
        write(tmp_path, 0, weights, None)
    with pytest.raises(ValueError, match=what):
        export.export(tmp_path / "w.safetensors", weights)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "keep", "message"), [(-1, 2, "step=-1"), (0, 0, "keep=0")])
def test_a_wrong_step_or_keep_is_told(tmp_path, step, keep, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, step, {}, None, keep)


# Which stay.


def steps(run):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in run.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_stay(tmp_path, keep):
    for step in range(5):
        assert write(tmp_path, step, {}, step, keep) == newest(tmp_path)
        assert steps(tmp_path) == list(range(5))[max(0, step + 1 - keep) : step + 1]


def test_what_is_not_whole_does_not_count(tmp_path):
    """The two newest complete checkpoints stay, and damaged ones between them; all older ones are removed."""
    for step in (1, 2, 3):
        write(tmp_path, step, {"w": torch.ones(5)}, None, keep=3)
    torn = tmp_path / "checkpoint-00000002" / "weights.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    (tmp_path / "checkpoint-00000003" / "checkpoint.json").unlink()
    write(tmp_path, 4, {}, None)
    assert steps(tmp_path) == [1, 2, 3, 4]
    write(tmp_path, 5, {}, None)
    assert steps(tmp_path) == [4, 5]
    Draft(6, {}, None).write(tmp_path, damaged={"checkpoint-00000005"})
    assert steps(tmp_path) == [4, 5, 6]
    Draft(6, {}, None).write(tmp_path, damaged={"checkpoint-00000006"})
    assert steps(tmp_path) == [5, 6], "what has just been written is whole"


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_one_always_stays(tmp_path, seed):
    """With any damaged checkpoints, and from any earlier step at which a run resumes."""
    dice, last = random.Random(seed), 0
    for _ in range(30):
        step = max(0, last + dice.choice((1, 1, 1, 2, -3)))
        keep = dice.choice((1, 2, 3))
        before = read_newest(tmp_path)
        write(tmp_path, step, {"w": torch.full((3,), float(step))}, None, keep)
        found = read_newest(tmp_path)
        assert found.step == max(step, before.step if before else 0)
        for path in tmp_path.iterdir():
            if path.name != f"checkpoint-{step:08d}" and dice.random() < 0.3:
                (path / "weights.safetensors").write_bytes(b"")
        last = step


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        write(tmp_path, step, {}, None)
        assert read_newest(tmp_path).step == step


def test_the_one_just_written_stays_where_newer_ones_are(tmp_path):
    for step in (100, 200, 50):
        write(tmp_path, step, {}, None, keep=1)
    assert steps(tmp_path) == [50, 200]
    write(tmp_path, 60, {}, None, keep=1)
    assert steps(tmp_path) == [60, 200]


def test_the_same_step_is_replaced(tmp_path):
    for turn in range(3):
        path = write(tmp_path, 7, {"w": torch.tensor(turn)}, turn)
        assert (read(path).state, read(path).weights["w"].item()) == (turn, turn)
    assert steps(tmp_path) == [7]


def test_a_run_without_checkpoints_has_none(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()  # not a name of ours
    for run in (tmp_path, tmp_path / "absent"):
        assert newest(run) is None
        assert read_newest(run) is None
    with pytest.raises(ValueError, match=r"there is no checkpoint .*absent; accepted: .*checkpoint-NNNNNNNN"):
        read(tmp_path / "absent")


def test_facts_and_versions_are_told(tmp_path):
    found = read(write(tmp_path, 1, {}, {"facts": {"model": "small"}}))
    assert found.facts == {"model": "small"}
    assert found.versions["torch"] == torch.__version__
    assert read(write(tmp_path, 1, {}, [])).facts == {}
