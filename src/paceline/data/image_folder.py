"""Images of a folder: classes by sub-folder, parts by train/ and test/ or val/ or by a fraction, and broken images.

A broken image is one that training could not decode. To find them all, every file is decoded once. The result is kept
in a journal, so that this happens once for each state of the folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline.data.decode import decode
from paceline.data.ingest import Journal, in_order

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp")
LAYOUT = (
    "Accepted: a folder with one sub-folder per class, two classes or more, each with images "
    f"({', '.join(SUFFIXES)}); or a folder with train/ and test/ (or val/), each laid out so."
)
BLOCK = 256  # files per line of a journal

Part = Mapping[str, Sequence[str]]  # class: images by name, relative to the folder
Progress = Callable[[str, int, int], None]


def find(root: Path, test_fraction: float, seed: int, broken: Collection[str] = ()) -> tuple[Part, Part]:
    """The training and the test images by class, without the ``broken``. Opens no image.

    Raises ValueError with all problems of the folder.
    """
    errors = []
    if not 0 < test_fraction < 1:
        errors.append(f"test_fraction is {test_fraction}; give a number between 0 and 1, as in 0.2")
    if seed < 0:
        errors.append(f"seed is {seed}; give 0 or more")
    train: Part = {}
    test: Part = {}
    test_folder = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    if not root.is_dir():
        errors.append("there is no such folder; check the path")
    elif test_folder is not None and (root / "train").is_dir():
        train, test = _scan(root, "train/", broken), _scan(root, f"{test_folder.name}/", broken)
        errors += _errors("train/", train) + _errors(f"{test_folder.name}/", test)
        if alone := sorted(train.keys() ^ test.keys()):
            errors.append(f"classes in one of train/ and {test_folder.name}/ alone: {', '.join(alone)}; add or remove")
    else:
        train = _scan(root, "", broken)
        errors += _errors("it", train)
        if single := [name for name, images in train.items() if len(images) == 1]:
            errors.append(f"classes with one image, which cannot be split: {', '.join(single)}; add images")
        if not errors:
            train, test = _split(train, test_fraction, seed)
    if errors:
        listing = "\n".join(f"- {error}" for error in errors)
        without = f" (without {len(broken)} broken images)" if broken else ""
        raise ValueError(f"cannot take images from {root}{without}:\n{listing}\n{LAYOUT}")
    return train, test


def members(part: Part) -> list[str]:
    """All images of the part, class by class."""
    return [name for names in part.values() for name in names]


def digest(root: Path, names: Sequence[str], *settings: object) -> str:
    """A hash that changes when a file is added, removed or written, or a setting differs."""
    hashed = hashlib.sha256(repr(settings).encode())
    for name in names:
        stat = os.stat(f"{root}/{name}")
        hashed.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf8", "surrogateescape"))
    return hashed.hexdigest()


def check(
    root: Path, names: Sequence[str], journal: Journal, threads: int, progress: Progress | None = None
) -> dict[str, str]:
    """The images that training could not decode, with the reason."""
    results = {entry["block"]: entry["broken"] for entry in journal.done if "block" in entry}
    blocks = range(-(-len(names) // BLOCK))

    def broken(block: int) -> dict[str, str]:
        errors = {}
        for name in names[block * BLOCK : (block + 1) * BLOCK]:
            try:
                decode(read(root, name))
            except Exception as error:  # decoders of damaged files raise almost anything
                errors[name] = str(error).replace("\n", " ")
        return errors

    remaining = [block for block in blocks if block not in results]
    for block, errors in zip(remaining, in_order(broken, remaining, threads), strict=True):
        journal.write(block=block, broken=errors)
        results[block] = errors
        if progress:
            progress("check", min(len(results) * BLOCK, len(names)), len(names))
    return {name: reason for block in blocks for name, reason in results[block].items()}


def read(root: Path, name: str) -> bytes:
    with open(f"{root}/{name}", "rb") as file:
        return file.read()


def cached_check(root: Path, names: Sequence[str], threads: int, progress: Progress | None = None) -> dict[str, str]:
    """`check`, once for each state of the folder: the result is kept in the user's cache."""
    key = hashlib.sha256(str(root.resolve()).encode("utf8", "surrogateescape")).hexdigest()[:16]
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        name, state = f"checked-{key}.jsonl", digest(root, names)
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
            journal = Journal(cache / name, state)
        except (OSError, RuntimeError):  # no writable home folder: the result is not kept
            journal = Journal(Path(scratch) / name, state)
        with journal:
            return check(root, names, journal, threads, progress)


def _scan(root: Path, prefix: str, broken: Collection[str]) -> Part:
    """Classes and their images by name. Hidden entries, such as thumbnails, are left out."""
    folder = root / prefix
    part = {
        name: [
            f"{prefix}{name}/{image}"
            for image in sorted(entry.name for entry in os.scandir(folder / name) if entry.is_file())
            if image.lower().endswith(SUFFIXES) and not image.startswith(".")
        ]
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        if not name.startswith(".")
    }
    if broken:
        part = {name: [image for image in images if image not in broken] for name, images in part.items()}
    return part


def _errors(where: str, part: Part) -> list[str]:
    empty = [name for name, images in part.items() if not images]
    errors = []
    if not part:
        errors.append(f"{where} has no class sub-folders; make one per class and move the images there")
    elif len(part) == 1:
        errors.append(f"{where} has only one class, {next(iter(part))}; add a sub-folder for another")
    if empty and len(empty) == len(part):
        errors.append(f"{where} has no images in any of its {len(part)} sub-folders; add images")
    elif empty:
        errors.append(f"{where} has classes without images: {', '.join(empty)}; add images or remove these")
    return errors


def _split(part: Part, test_fraction: float, seed: int) -> tuple[Part, Part]:
    """Splits each class; at least one image of it is in each part."""
    train, test = {}, {}
    for position, (name, images) in enumerate(part.items()):
        keys = np.random.SeedSequence((seed, position)).generate_state(len(images), np.uint64)
        num_test = min(max(round(len(images) * test_fraction), 1), len(images) - 1)
        chosen = set(np.argsort(keys, kind="stable")[:num_test].tolist())
        train[name] = [image for i, image in enumerate(images) if i not in chosen]
        test[name] = [image for i, image in enumerate(images) if i in chosen]
    return train, test
