"""Files of checkpoints and exports are safetensors that other tools read, and theirs are read here."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.checkpoint import checkpoint, export
from paceline.checkpoint.checkpoint import write


def same(a, b):
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def test_others_read_the_weights(tmp_path):
    tied = torch.randn(3, 2)
    weights = {"b": torch.tensor(True), "a": tied, "t": tied, "e": torch.empty(0, 2), "h": torch.ones(3).bfloat16()}
    path = write(tmp_path, 0, weights, {"moments": [torch.arange(3), tied.T]})
    export.export(tmp_path / "weights.safetensors", weights)
    for file in (path / checkpoint.WEIGHTS, tmp_path / "weights.safetensors"):
        assert same(load_file(file), weights)
    assert torch.equal(load_file(path / checkpoint.STATE)["state['moments'][1]"], tied.T)
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((path / checkpoint.TREE).read_text())["step"] == 0


def test_weights_that_others_wrote_are_read(tmp_path):
    weights = {"b": torch.tensor(True), "a": torch.randn(3, 2), "h": torch.ones(3).bfloat16()}
    save_file(weights, tmp_path / "theirs.safetensors", {"made by": "hand", "size": "3"})
    found, facts = export.load(tmp_path / "theirs.safetensors")
    assert same(found, weights)
    assert facts == {"made by": "hand", "size": 3}


def test_an_export_carries_its_facts(tmp_path):
    facts = {"model": "small", "classes": ["a", "1"], "input": [1, 28, 28]}
    path = tmp_path / "new" / "w.safetensors"
    export.export(path, {"w": torch.ones(2)}, facts)
    export.export(path, {"w": torch.zeros(2)}, facts)
    weights, found = export.load(path)
    assert same(weights, {"w": torch.zeros(2)})
    assert found == {"format": "pt", **facts}
    assert [entry.name for entry in path.parent.iterdir()] == ["w.safetensors"]


def test_a_file_that_is_not_safetensors_is_told(tmp_path):
    path = tmp_path / "w.safetensors"
    export.export(path, {"w": torch.ones(2), "v": torch.ones(3)})
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    def changed(**entries):
        text = json.dumps({**header, **entries}).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    bad = [good[:n] for n in (0, 7, 8, 20, len(good) - 1)] + [good + b"\0", b"\xff" * 99, b"PK" * 200]
    bad += [changed(w=None), changed(w={}), changed(w={**entry, "dtype": "F3"}), changed(x=entry)]
    bad += [changed(w={**entry, "shape": shape}) for shape in ([3], [-2], [2**40], [2.0], ["2"], None)]
    bad += [changed(w={**entry, "data_offsets": offsets}) for offsets in ([0, 9], [4, 12], [8, 0], [0], "ab")]
    bad += [b"\x02" + bytes(7) + b"[]", (200_000).to_bytes(8, "little") + b"[" * 200_000]
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"w\.safetensors is not a complete safetensors file: \w"):
            export.load(path)
    path.write_bytes(good)
    assert list(export.load(path)[0]) == ["w", "v"]


def test_an_export_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "inside").touch()
    with pytest.raises(checkpoint.CheckpointError, match=r"cannot write \d+ bytes to .*folder"):
        export.export(path, {"w": torch.ones(2)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
