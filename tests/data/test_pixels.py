"""Pixels: bit depth and orientation, with each decoder."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from needs import module
from paceline.data import decode as decoding
from paceline.data.decode import decode
from photographs import photo


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    values = np.array([[0, 128, 129, 257, 30_000, 65_407, 65_535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    got = decode((tmp_path / "a.png").read_bytes())
    assert got[0, :, 0].tolist() == [0, 0, 1, 1, round(30_000 / 257), 255, 255]
    assert (got == got[:, :, :1]).all()


@pytest.mark.parametrize("kind", ["jpg", "png"])
@pytest.mark.parametrize("way", range(1, 9))
def test_photographs_stand_upright(tmp_path, kind, way):
    image = Image.new("RGB", (64, 32), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 32, 16))  # blue: upper left
    exif = Image.Exif()
    exif[0x0112] = way
    image.save(tmp_path / f"a.{kind}", exif=exif, **({"quality": 100} if kind == "jpg" else {}))
    got = decode((tmp_path / f"a.{kind}").read_bytes())
    # the corner in which EXIF's eight ways put what is stored upper left
    down, right = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}[way]
    assert got.shape == ((32, 64, 3) if way < 5 else (64, 32, 3))
    quarters = got.reshape(2, got.shape[0] // 2, 2, got.shape[1] // 2, 3).mean((1, 3))
    assert quarters[down, right, 2] > 200
    assert quarters[1 - down, 1 - right, 0] > 200


def test_with_and_without_simplejpeg_pixels_are_nearly_the_same(tmp_path, monkeypatch):
    module("simplejpeg")
    for size in ((500, 375), (2100, 1100)):
        data = photo(tmp_path / "a.jpg", 3, size, quality=90).read_bytes()
        fast = decode(data).astype(int)
        with monkeypatch.context() as without:
            without.setattr(decoding, "simplejpeg", None)
            slow = decode(data).astype(int)
        assert fast.shape == slow.shape
        assert abs(fast - slow).max() <= 1


def test_an_odd_but_whole_jpeg_is_taken(tmp_path):
    data = photo(tmp_path / "a.jpg").read_bytes()
    assert (decode(data[:-2] + b"\x00\x00" + data[-2:]) == decode(data)).all()  # bytes before the end mark
