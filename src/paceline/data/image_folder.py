"""Which images a folder holds: classes by sub-folder, parts by train/ and test/ or val/ or by a fraction, broken ones.

A broken image is one that training could not decode. To find all of them every file is decoded once;
what was found is kept in a journal, so that it happens once per state of the folder.
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
    """The training and the test images by class, without the ``broken``. Opens none.

    Raises ValueError listing all that is wrong with the folder.
    """
    faults = []
    if not 0 < test_fraction < 1:
        faults.append(f"test_fraction is {test_fraction}; give a number between 0 and 1, as in 0.2")
    if seed < 0:
        faults.append(f"seed is {seed}; give 0 or more")
    train: Part = {}
    test: Part = {}
    held_out = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    if not root.is_dir():
        faults.append("there is no such folder; check the path")
    elif held_out is not None and (root / "train").is_dir():
        train, test = _scan(root, "train/", broken), _scan(root, f"{held_out.name}/", broken)
        faults += _faults("train/", train) + _faults(f"{held_out.name}/", test)
        if odd := sorted(train.keys() ^ test.keys()):
            faults.append(f"classes in one of train/ and {held_out.name}/ alone: {', '.join(odd)}; add or remove")
    else:
        train = _scan(root, "", broken)
        faults += _faults("it", train)
        if lone := [name for name, images in train.items() if len(images) == 1]:
            faults.append(f"classes with one image, which cannot be split: {', '.join(lone)}; add images")
        if not faults:
            train, test = _split(train, test_fraction, seed)
    if faults:
        listing = "\n".join(f"- {fault}" for fault in faults)
        without = f" (without {len(broken)} broken images)" if broken else ""
        raise ValueError(f"cannot take images from {root}{without}:\n{listing}\n{LAYOUT}")
    return train, test


def members(part: Part) -> list[str]:
    """All its images, class by class."""
    return [name for names in part.values() for name in names]


def digest(root: Path, names: Sequence[str], *settings: object) -> str:
    """Changes when a file is added, removed or written, or a setting differs."""
    seen = hashlib.sha256(repr(settings).encode())
    for name in names:
        stat = os.stat(f"{root}/{name}")
        seen.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf8", "surrogateescape"))
    return seen.hexdigest()


def check(
    root: Path, names: Sequence[str], journal: Journal, threads: int, progress: Progress | None = None
) -> dict[str, str]:
    """The images that cannot be decoded, and why: as training would decode them."""
    known = {entry["block"]: entry["broken"] for entry in journal.done if "block" in entry}
    blocks = range(-(-len(names) // BLOCK))

    def broken(block: int) -> dict[str, str]:
        faults = {}
        for name in names[block * BLOCK : (block + 1) * BLOCK]:
            try:
                decode(read(root, name))
            except Exception as error:  # decoders of damaged files raise almost anything
                faults[name] = str(error).replace("\n", " ")
        return faults

    left = [block for block in blocks if block not in known]
    for block, faults in zip(left, in_order(broken, left, threads), strict=True):
        journal.write(block=block, broken=faults)
        known[block] = faults
        if progress:
            progress("check", min(len(known) * BLOCK, len(names)), len(names))
    return {name: reason for block in blocks for name, reason in known[block].items()}


def read(root: Path, name: str) -> bytes:
    with open(f"{root}/{name}", "rb") as file:
        return file.read()


def cached_check(root: Path, names: Sequence[str], threads: int, progress: Progress | None = None) -> dict[str, str]:
    """`check`, once per state of the folder: the answer is kept in the user's cache."""
    key = hashlib.sha256(str(root.resolve()).encode("utf8", "surrogateescape")).hexdigest()[:16]
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        name, state = f"checked-{key}.jsonl", digest(root, names)
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
            journal = Journal(cache / name, state)
        except (OSError, RuntimeError):  # no home, or none that can be written: the answer is not kept
            journal = Journal(Path(scratch) / name, state)
        with journal:
            return check(root, names, journal, threads, progress)


def _scan(root: Path, within: str, broken: Collection[str]) -> Part:
    """Classes and their images by name. Hidden entries are left out: tools leave thumbnails and the like."""
    folder = root / within
    found = {
        name: [
            f"{within}{name}/{image}"
            for image in sorted(entry.name for entry in os.scandir(folder / name) if entry.is_file())
            if image.lower().endswith(SUFFIXES) and not image.startswith(".")
        ]
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        if not name.startswith(".")
    }
    if broken:
        found = {name: [image for image in images if image not in broken] for name, images in found.items()}
    return found


def _faults(where: str, found: Part) -> list[str]:
    empty = [name for name, images in found.items() if not images]
    faults = []
    if not found:
        faults.append(f"{where} has no class sub-folders; make one per class and move the images there")
    elif len(found) == 1:
        faults.append(f"{where} has only one class, {next(iter(found))}; add a sub-folder for another")
    if empty and len(empty) == len(found):
        faults.append(f"{where} has no images in any of its {len(found)} sub-folders; add images")
    elif empty:
        faults.append(f"{where} has classes without images: {', '.join(empty)}; add images or remove these")
    return faults


def _split(found: Part, test_fraction: float, seed: int) -> tuple[Part, Part]:
    """Every class keeps at least one image on either side."""
    train, test = {}, {}
    for position, (name, images) in enumerate(found.items()):
        keys = np.random.SeedSequence((seed, position)).generate_state(len(images), np.uint64)
        num_test = min(max(round(len(images) * test_fraction), 1), len(images) - 1)
        chosen = set(np.argsort(keys, kind="stable")[:num_test].tolist())
        train[name] = [image for at, image in enumerate(images) if at not in chosen]
        test[name] = [image for at, image in enumerate(images) if at in chosen]
    return train, test
