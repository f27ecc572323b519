"""Advice follows from measured times: it names each helpful change with its gain, and no other change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from PIL import Image

from paceline.data import images
from paceline.data.pack import pack
from paceline.train.input_advice import Costs, advise, measure


@pytest.mark.parametrize(
    ("wait_s", "costs", "decoders", "cores", "packed", "expected", "unexpected"),
    [
        # 100 rows a step of 0.1 s
        (0.001, Costs(9, 9, 9), 1, 8, False, ["not the bottleneck", "took 1%"], ["packing"]),
        (0.9, Costs(0.009, 0.0005, 0.0005), 1, 1, False, ["took 90%", "packing 9.5x"], ["instead of"]),
        (0.9, Costs(0.0, 0.0, 0.01), 1, 4, False, ["4 decoding processes or threads instead of 1 4.0x"], ["packing"]),
        (0.9, Costs(0.005, 0.001, 0.005), 1, 2, False, ["both 3.3x", "instead of 1 2.0x", "packing 1.7x"], []),
        (0.9, Costs(0.005, 0.005, 0.005), 2, 2, True, ["neither packing nor more", "smaller size"], ["x."]),
        (0.9, Costs(0.005, 0.001, 0.005), 1, 4, True, ["instead of 1 4.0x"], ["packing"]),
    ],
)
def test_only_what_helps_is_advised(wait_s, costs, decoders, cores, packed, expected, unexpected):
    text = advise(wait_s, 0.1, 100, costs, decoders, cores, packed)
    assert text.endswith(".")
    for part in expected:
        assert part in text
    for part in unexpected:
        assert part not in text


def test_no_gain_goes_beyond_what_the_step_computes():
    text = advise(0.9, 0.5, 100, Costs(0.01, 0.0, 0.0001), 1, 1, False)
    assert "packing 2.0x" in text  # 1.01 s become 0.5 s, not 0.01 s


def test_what_is_slow_is_measured_as_slow(tmp_path: Path):
    for name in ("a", "b"):
        for i in range(4):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (300, 300), (9 * i, 0, 0)).save(tmp_path / "photos" / name / f"{i}.jpg")
    folder, _ = images.load(tmp_path / "photos")

    class SlowDisk(images.ImageFolder):
        def data(self, index: int) -> bytes:
            time.sleep(0.02)
            return super().data(index)

    slow = SlowDisk(folder.paths, [0] * len(folder), folder.classes, True, 0)
    costs = measure(slow, tmp_path)
    assert 0.02 <= costs.read_s < 0.2
    assert 0 < costs.packed_read_s < 0.02
    assert costs.decode_s > 0
    assert "packing" in advise(0.9, 0.01, 100, costs, 1, 1, slow.packed)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    pack(tmp_path / "photos", tmp_path / "shards")
    packed, _ = images.load(tmp_path / "shards")
    costs = measure(packed, tmp_path)
    assert costs.read_s == costs.packed_read_s > 0
