"""Which images a folder holds: classes by sub-folder, parts by train/ and test/ or val/ or by a fraction, broken ones.

A broken image is one that training could not decode. To find all of them every file is decoded once;
what was found is kept in a journal, so that it happens once per state of the folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline.data.decode import decode
from paceline.data.journal import Journal
from paceline.data.parallel import in_order

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp")
LAYOUT = (
    "Accepted: a folder with one sub-folder per class, two classes or more, each with images "
    f"({', '.join(SUFFIXES)}); or a folder with train/ and test/ (or val/), each laid out so."
)
BLOCK = 256  # files per line of a journal

Part = Mapping[str, Sequence[Path]]
Progress = Callable[[str, int, int], None]


def find(root: Path, test_fraction: float, seed: int, broken: Collection[Path] = ()) -> tuple[Part, Part]:
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
        train, test = _scan(root / "train", broken), _scan(held_out, broken)
        faults += _faults("train/", train) + _faults(f"{held_out.name}/", test)
        if odd := sorted(train.keys() ^ test.keys()):
            faults.append(f"classes in one of train/ and {held_out.name}/ alone: {', '.join(odd)}; add or remove")
    else:
        train = _scan(root, broken)
        faults += _faults("it", train)
        if lone := [name for name, paths in train.items() if len(paths) == 1]:
            faults.append(f"classes with one image, which cannot be split: {', '.join(lone)}; add images")
        if not faults:
            train, test = _split(train, test_fraction, seed)
    if faults:
        listing = "\n".join(f"- {fault}" for fault in faults)
        without = f" (without {len(broken)} broken images)" if broken else ""
        raise ValueError(f"cannot take images from {root}{without}:\n{listing}\n{LAYOUT}")
    return train, test


def members(part: Part) -> list[Path]:
    """All its images, class by class."""
    return [path for paths in part.values() for path in paths]


def digest(root: Path, paths: Sequence[Path], *settings: object) -> str:
    """Changes when a file is added, removed or written, or a setting differs."""
    seen = hashlib.sha256(repr(settings).encode())
    for path in paths:
        stat = path.stat()
        seen.update(f"{path.relative_to(root)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf8", "surrogateescape"))
    return seen.hexdigest()


def check(
    root: Path, paths: Sequence[Path], journal: Journal, threads: int, progress: Progress | None = None
) -> dict[Path, str]:
    """The images that cannot be decoded, and why: as training would decode them."""
    known = {entry["block"]: entry["broken"] for entry in journal.done if "block" in entry}
    blocks = range(-(-len(paths) // BLOCK))

    def broken(block: int) -> dict[str, str]:
        faults = {}
        for path in paths[block * BLOCK : (block + 1) * BLOCK]:
            try:
                decode(path.read_bytes())
            except Exception as error:  # decoders of damaged files raise almost anything
                faults[str(path.relative_to(root))] = str(error).replace("\n", " ")
        return faults

    left = [block for block in blocks if block not in known]
    for block, faults in zip(left, in_order(broken, left, threads), strict=True):
        journal.write(block=block, broken=faults)
        known[block] = faults
        if progress:
            progress("check", min(len(known) * BLOCK, len(paths)), len(paths))
    return {root / name: reason for block in blocks for name, reason in known[block].items()}


def cached_check(root: Path, paths: Sequence[Path], threads: int, progress: Progress | None = None) -> dict[Path, str]:
    """`check`, once per state of the folder: the answer is kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    name = hashlib.sha256(str(root.resolve()).encode("utf8", "surrogateescape")).hexdigest()[:16]
    with Journal(cache / f"checked-{name}.jsonl", digest(root, paths)) as journal:
        return check(root, paths, journal, threads, progress)


def _scan(folder: Path, broken: Collection[Path]) -> Part:
    """Classes and their images by name. Hidden entries are left out: tools leave thumbnails and the like."""
    found = {
        name: [
            folder / name / image
            for image in sorted(entry.name for entry in os.scandir(folder / name) if entry.is_file())
            if image.lower().endswith(SUFFIXES) and not image.startswith(".")
        ]
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        if not name.startswith(".")
    }
    if broken:
        found = {name: [path for path in paths if path not in broken] for name, paths in found.items()}
    return found


def _faults(where: str, found: Part) -> list[str]:
    empty = [name for name, paths in found.items() if not paths]
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
    for position, (name, paths) in enumerate(found.items()):
        keys = np.random.SeedSequence((seed, position)).generate_state(len(paths), np.uint64)
        num_test = min(max(round(len(paths) * test_fraction), 1), len(paths) - 1)
        chosen = set(np.argsort(keys, kind="stable")[:num_test].tolist())
        train[name] = [path for at, path in enumerate(paths) if at not in chosen]
        test[name] = [path for at, path in enumerate(paths) if at in chosen]
    return train, test
