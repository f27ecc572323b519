"""Image folders: pixels are as specified, for any number of threads, and errors are listed."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.images import MEAN, STD, ImageFolder, load


def noise(path: Path, size: tuple[int, int] = (300, 260), seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # coarse blocks survive JPEG, and differ everywhere at the scale of a crop's shift
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    Image.fromarray(coarse).resize(size).save(path)
    return path


def plain(path: Path, mode: str, colour: object, size: tuple[int, int] = (300, 260)) -> Path:
    Image.new(mode, size, colour).save(path, quality=100)
    return path


def source(*paths: Path, train: bool = False, seed: int = 0, threads: int | None = 1) -> ImageFolder:
    return ImageFolder(paths, [0] * len(paths), ("a",), train, seed, threads)


def bytes_of(images: torch.Tensor) -> torch.Tensor:
    return (images * STD + MEAN) * 255


def tree(root: Path, **counts: int) -> Path:
    """Folders of 1x1 images; a double underscore in a name separates nested folders."""
    for name, count in counts.items():
        folder = root / name.replace("__", "/")
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (1, 1)).save(folder / f"{number:03}.png")
    return root


def names(folder: ImageFolder) -> list[str]:
    return ["/".join(Path(path).parts[-2:]) for path in folder.paths]


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return [noise(tmp_path / f"{i}.{'png' if i % 2 else 'jpg'}", (300 + 20 * i, 280), i) for i in range(5)]


def test_a_sample_is_the_same_alone_in_a_batch_and_in_threads(photos) -> None:
    alone = [source(*photos, train=True).fetch([i], 3)[0][0] for i in range(5)]
    for threads, order in ((1, [4, 0, 2, 1, 3]), (4, [0, 1, 2, 3, 4]), (None, [2, 2, 3])):
        images, _ = source(*photos, train=True, threads=threads).fetch(order, 3)
        assert torch.equal(images, torch.stack([alone[i] for i in order]))
    images, _ = source(*photos, train=True).fetch(np.array([1, 4]), 3)
    assert torch.equal(images, torch.stack([alone[1], alone[4]]))


def test_augmentation_changes_with_epoch_seed_and_index(photos) -> None:
    photo = photos[0]
    base, other = source(photo, photo, train=True).fetch([0, 1], 0)[0]
    assert not torch.equal(base, other)
    assert not torch.equal(base, source(photo, train=True).fetch([0], 1)[0][0])
    assert not torch.equal(base, source(photo, train=True, seed=1).fetch([0], 0)[0][0])


def test_test_images_are_not_augmented(photos) -> None:
    first = source(*photos, seed=0).fetch(range(5), 0)[0]
    assert torch.equal(first, source(*photos, seed=9).fetch(range(5), 7)[0])


def test_a_source_travels_to_another_process(photos) -> None:
    kept = source(*photos, train=True)
    assert torch.equal(pickle.loads(pickle.dumps(kept)).fetch([0, 3], 2)[0], kept.fetch([0, 3], 2)[0])


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("size", [(256, 256), (640, 480), (100, 333), (1, 1)])
def test_one_colour_is_normalised_in_closed_form(tmp_path, train, size) -> None:
    images, labels = source(plain(tmp_path / "a.png", "RGB", (255, 0, 51), size), train=train).fetch([0], 0)
    assert images.shape == (1, 3, 224, 224)
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert labels.tolist() == [0]
    assert labels.dtype == torch.int64
    for channel, value in enumerate([(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]):
        torch.testing.assert_close(images[0, channel], torch.full((224, 224), value))


def test_test_images_keep_the_centre(tmp_path) -> None:
    columns, rows = np.meshgrid(np.arange(256), np.arange(256))
    pixels = np.stack([columns, rows, columns ^ rows], 2).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    images, _ = source(tmp_path / "a.png").fetch([0], 0)
    expected = torch.from_numpy(pixels[16:240, 16:240]).permute(2, 0, 1).float()
    torch.testing.assert_close(bytes_of(images[0]), expected, atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("size", "is_whole"), [((512, 700), True), ((256, 640), True), ((300, 260), False), ((180, 120), False)]
)
def test_the_crop_is_that_of_the_whole_image_resized(tmp_path, size, is_whole) -> None:
    """Exact up to rounding where the crop's corners are whole pixels of the file, else to half a pixel."""
    noise(tmp_path / "a.png", size)
    width, height = (256 * side // min(size) for side in size)
    with Image.open(tmp_path / "a.png") as image:
        whole = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    left, top = (width - 224) // 2, (height - 224) // 2
    expected = torch.from_numpy(whole[top : top + 224, left : left + 224].copy()).permute(2, 0, 1).float()
    images, _ = source(tmp_path / "a.png").fetch([0], 0)
    inside = slice(1, -1)  # at the rim there are no pixels beyond the crop to mix in
    far = (bytes_of(images[0]) - expected)[:, inside, inside].abs()
    with Image.open(tmp_path / "a.png") as image:
        pixels = np.asarray(image).astype(int)
    steepest = max(np.abs(np.diff(pixels, axis=axis)).max() for axis in (0, 1))
    assert far.max() <= (1.01 if is_whole else 1.01 + steepest)  # half a pixel along either axis


def test_large_jpegs_are_read_small_and_look_the_same(tmp_path) -> None:
    noise(tmp_path / "a.png", (2000, 1500))
    with Image.open(tmp_path / "a.png") as image:
        image.save(tmp_path / "a.jpg", quality=95)
    exact, fast = bytes_of(source(tmp_path / "a.png", tmp_path / "a.jpg").fetch([0, 1], 0)[0])
    assert (exact - fast).abs().mean() < 2  # of 255


def test_training_crops_move_everywhere_and_half_are_mirrored(tmp_path) -> None:
    # red tells the column, green the row; 256 wide and high, so that nothing is resampled
    columns, rows = np.meshgrid(np.arange(256), np.arange(256))
    Image.fromarray(np.stack([columns, rows, 0 * rows], 2).astype(np.uint8)).save(tmp_path / "a.png")
    pupil = source(tmp_path / "a.png", train=True)
    lefts, tops, num_mirrored, num_epochs = set(), set(), 0, 400
    for epoch in range(num_epochs):
        red, green, _ = bytes_of(pupil.fetch([0], epoch)[0][0]).round()
        num_mirrored += int(red[0, 0] > red[0, -1])
        assert abs(red[0, 0] - red[0, -1]) == abs(green[0, 0] - green[-1, 0]) == 223
        lefts.add(int(red.min()))
        tops.add(int(green.min()))
    assert abs(num_mirrored - num_epochs / 2) < 5 * (num_epochs / 4) ** 0.5  # five standard deviations
    # 400 fair draws leave out one of 33 places about once in 7000 times
    assert lefts == tops == set(range(33))


@pytest.mark.parametrize(
    ("name", "mode", "colour", "expected"),
    [
        ("a.png", "L", 100, (100, 100, 100)),
        ("a.jpg", "L", 100, (100, 100, 100)),
        ("a.png", "1", 1, (255, 255, 255)),
        ("a.png", "LA", (100, 255), (100, 100, 100)),
        ("a.png", "RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("a.jpg", "CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("a.jpg", "RGB", (200, 100, 50), (200, 100, 50)),
    ],
)
def test_all_kinds_of_pixels_become_red_green_blue(tmp_path, name, mode, colour, expected) -> None:
    images, _ = source(plain(tmp_path / name, mode, colour)).fetch([0], 0)
    wanted = torch.tensor(expected).float().view(3, 1, 1).expand(3, 224, 224)
    torch.testing.assert_close(bytes_of(images[0]), wanted, atol=2.0, rtol=0)


def test_palettes_are_looked_up_even_with_transparency(tmp_path) -> None:
    image = Image.new("P", (300, 300), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "a.png", transparency=b"\x80\xff")
    images, _ = source(tmp_path / "a.png").fetch([0], 0)
    assert bytes_of(images[0]).round().amax((1, 2)).tolist() == [10, 20, 30]
    assert bytes_of(images[0]).round().amin((1, 2)).tolist() == [10, 20, 30]


def test_animations_give_their_first_frame(tmp_path) -> None:
    frames = [Image.new("RGB", (300, 300), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    images, _ = source(tmp_path / "a.gif").fetch([0], 0)
    assert bytes_of(images[0]).round().amax((1, 2)).tolist() == [255, 0, 0]


@pytest.mark.parametrize("threads", [1, 4])
def test_every_damaged_image_of_a_batch_is_named(tmp_path, photos, threads) -> None:
    whole = noise(tmp_path / "whole.jpg").read_bytes()
    damaged = {
        "empty.jpg": b"",
        "cut.jpg": whole[: len(whole) // 2],
        "text.jpg": b"no image at all",
        "cut.png": noise(tmp_path / "whole.png").read_bytes()[:2000],
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
    paths = [*photos, *(tmp_path / name for name in damaged), tmp_path / "gone.png"]
    with pytest.raises(ValueError, match="cannot read 5 of 10 images") as caught:
        source(*paths, threads=threads).fetch(range(len(paths)), 0)
    for name, reason in {
        "empty.jpg": "is empty",
        "cut.jpg": "truncated",
        "text.jpg": "no image",
        "cut.png": "truncated",
        "gone.png": "No such file",
    }.items():
        assert any(f"{tmp_path / name}: " in line and reason in line for line in str(caught.value).splitlines())
    assert not any(str(photo) in str(caught.value) for photo in photos)
    assert "Remove these files" in str(caught.value)


def test_loading_opens_no_image(tmp_path) -> None:
    for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"damaged")
    train, test = load(tmp_path)
    assert len(train) + len(test) == 4
    with pytest.raises(ValueError, match=r"cannot read 1 of 1 images"):
        test.fetch([0], 0)


def test_the_split_is_disjoint_complete_and_class_by_class(tmp_path) -> None:
    tree(tmp_path, cat=10, dog=25, emu=2)
    train, test = load(tmp_path)
    assert train.classes == test.classes == ("cat", "dog", "emu")
    assert not set(names(train)) & set(names(test))
    everything = [f"{path.parent.name}/{path.name}" for path in tmp_path.rglob("*.png")]
    assert sorted(names(train) + names(test)) == sorted(everything)
    # a fifth of each, and at least one
    assert torch.bincount(test.fetch(range(len(test)), 0)[1]).tolist() == [2, 5, 1]
    assert torch.bincount(train.fetch(range(len(train)), 0)[1]).tolist() == [8, 20, 1]


def test_the_split_follows_from_seed_and_names_alone(tmp_path) -> None:
    first = load(tree(tmp_path / "first", dog=30, cat=30), seed=5)
    same = load(tree(tmp_path / "same", cat=30, dog=30), seed=5)
    assert [names(part) for part in first] == [names(part) for part in same]
    assert names(load(tmp_path / "first", seed=6)[1]) != names(first[1])
    assert len(load(tmp_path / "first", test_fraction=0.5)[1]) == 30


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_given_parts_are_kept(tmp_path, held_out) -> None:
    tree(tmp_path, train__a=3, train__b=2, **{f"{held_out}__a": 1, f"{held_out}__b": 4})
    train, test = load(tmp_path)
    assert {Path(path).parts[-3] for path in train.paths} == {"train"}
    assert {Path(path).parts[-3] for path in test.paths} == {held_out}
    assert train.fetch(range(5), 0)[1].tolist() == [0, 0, 0, 1, 1]
    assert test.fetch(range(5), 0)[1].tolist() == [0, 1, 1, 1, 1]


def test_what_is_no_image_is_left_out(tmp_path) -> None:
    tree(tmp_path, a=2, b=2, **{".hidden": 1})
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "a" / "Thumbs.db").write_text("x")
    (tmp_path / "a" / "._000.png").write_text("x")
    (tmp_path / "a" / "LAST.JPEG").write_text("x")
    train, test = load(tmp_path)
    assert train.classes == ("a", "b")
    assert sorted(names(train) + names(test)) == ["a/000.png", "a/001.png", "a/LAST.JPEG", "b/000.png", "b/001.png"]


def test_a_missing_folder_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"absent:\n- there is no such folder"):
        load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ({}, ["no class sub-folders"]),
        ({"a": 3}, ["only one class, a"]),
        ({"a": 3, "b": 0, "c": 2, "d": 0}, ["classes without images: b, d"]),
        ({"a": 0, "b": 0}, ["no images in any of its 2 sub-folders"]),
        ({"a": 0}, ["only one class, a", "no images in any of its 1 sub-folders"]),
        ({"a": 3, "b": 1, "c": 0}, ["classes without images: c", "cannot be split: b"]),
        ({"train__a": 2, "train__b": 0, "test__a": 1}, ["train/ has classes without images: b", "test/ has only"]),
        ({"train__a": 1, "train__b": 1, "val__a": 1, "val__c": 1}, ["in one of train/ and val/ alone: b, c"]),
    ],
)
def test_all_faults_of_a_folder_are_told_at_once(tmp_path, counts, parts) -> None:
    with pytest.raises(ValueError, match="Accepted: a folder with one sub-folder per class") as caught:
        load(tree(tmp_path, **counts))
    assert str(tmp_path) in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert str(caught.value).count("\n- ") >= len(parts)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2, float("nan")])
def test_settings_out_of_range_are_told_along_with_the_rest(tmp_path, fraction) -> None:
    with pytest.raises(ValueError, match="test_fraction is") as caught:
        load(tmp_path, test_fraction=fraction, seed=-1)
    assert "seed is -1" in str(caught.value)
    assert "no class sub-folders" in str(caught.value)
