"""Packs a folder of images into shards: few large files instead of many small ones, with the same training result.

First every image is decoded, so that all broken ones are reported at once. Then the bytes are copied unchanged, class
by class; the manifest is written last. Progress is in a journal, and every file is renamed when it is complete; so an
interrupted pack resumes where it was and produces the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from paceline.data import image_folder as folders
from paceline.data import shards
from paceline.data.decode import decode
from paceline.data.encoded_images import listing
from paceline.data.image_folder import Part, Progress
from paceline.data.ingest import Journal, in_order

SHARD_BYTES = 256 << 20
QUALITY = 92  # JPEG quality of resized images


@dataclass
class Report:
    """The result of packing. ``skipped``: broken files that were left out, with the reason."""

    num_train: int
    num_test: int
    num_shards: int
    num_bytes: int
    skipped: dict[str, str] = field(default_factory=dict)


def pack(
    folder: Path | str,
    out: Path | str,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    skip_broken: bool = False,
    size: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Packs the images that `images.load` finds with the same ``test_fraction`` and ``seed``. Resumes if called again.

    ``size``: larger images become JPEGs with this short side, in pixels (training needs 256, or more where crops
    vary); by default training from the shards is bit-equal to that from the folder. ``progress`` is called with
    ("check" | "pack", images done, images). Raises ValueError with the broken images, and for an ``out`` that contains
    other files.
    """
    root, target, num_threads = Path(folder), Path(out), threads or len(os.sched_getaffinity(0))
    if size is not None and size < 1:
        raise ValueError(f"size is the short side in pixels, 1 or more, got {size}; 256 is what training needs")
    if root.resolve() == target.resolve() or root.resolve() in target.resolve().parents:
        raise ValueError(f"the shards would be inside the folder that is packed: {target}; choose a place outside")
    train, test = folders.find(root, test_fraction, seed)
    names = sorted(folders.members(train) + folders.members(test))
    job = folders.digest(root, names, test_fraction, seed, size, shard_bytes)
    if (target / shards.MANIFEST).exists():
        return _existing(target, job)
    if target.is_dir() and not (target / shards.JOURNAL).exists() and any(target.iterdir()):
        raise ValueError(f"{target} contains other files; choose an empty or a new folder")
    with Journal(target / shards.JOURNAL, job) as journal:
        if (target / shards.MANIFEST).exists():  # another process has just finished
            return _existing(target, job)
        broken = folders.check(root, names, journal, num_threads, progress)
        if broken and not skip_broken:
            errors = {f"- {name}: {reason}" for name, reason in broken.items()}
            raise ValueError(
                f"{len(broken)} of {len(names)} images in {root} cannot be read:\n{listing(errors)}\n"
                f"Remove these files, create them again, or leave them out with skip_broken (--skip-broken)."
            )
        train, test = folders.find(root, test_fraction, seed, broken)
        counter = _Progress(progress, len(names) - len(broken))
        parts: dict[str, dict[str, Any]] = {
            name: {
                "counts": [len(members) for members in part.values()],
                "shards": list(_shards(name, part, root, target, shard_bytes, size, journal, num_threads, counter)),
            }
            for name, part in (("train", train), ("test", test))
        }
        manifest: dict[str, Any] = {
            "format": shards.FORMAT,
            "version": shards.VERSION,
            "classes": list(train),
            "parts": parts,
            "size": size,
            "skipped": broken,
            "job": job,
        }
        manifest["hash"] = shards.hash_of(manifest)
        written = {entry["name"] for part in parts.values() for entry in part["shards"]}
        for path in target.glob(f"*{shards.SUFFIX}*"):
            if path.name not in written:  # of an interrupted pack of an earlier state of the folder
                path.unlink()
        temporary = target / f"{shards.MANIFEST}.part"
        temporary.write_text(json.dumps(manifest, indent=1))
        _publish(temporary, target / shards.MANIFEST)
        journal.remove()
    return _report(manifest)


def _shards(
    part_name: str,
    part: Part,
    root: Path,
    target: Path,
    shard_bytes: int,
    size: int | None,
    journal: Journal,
    threads: int,
    counter: _Progress,
) -> Iterator[dict[str, Any]]:
    """Writes the shards that are not in the journal."""
    written_before = {entry["name"]: entry for entry in journal.done if "name" in entry}
    for number, images in enumerate(_split(root, folders.members(part), shard_bytes)):
        name = f"{part_name}-{number:05}{shards.SUFFIX}"
        entry = written_before.get(name)
        if entry is None or not (target / name).exists():
            entry = {"name": name, **_write(target / name, root, images, size, threads, counter)}
            journal.write(**entry)
        else:
            counter.add(len(images))
        yield entry


def _split(root: Path, images: Sequence[str], shard_bytes: int) -> Iterator[list[str]]:
    """Divides the images into shards by file size, so that the division is known before any shard is written."""
    cut: list[str] = []
    total = 0
    for image in images:
        num_bytes = os.stat(f"{root}/{image}").st_size
        if cut and total + num_bytes > shard_bytes:
            yield cut
            cut, total = [], 0
        cut.append(image)
        total += num_bytes
    if cut:
        yield cut


def _write(
    path: Path, root: Path, images: Sequence[str], size: int | None, threads: int, counter: _Progress
) -> dict[str, Any]:
    temporary = path.with_name(f"{path.name}.part")
    records = in_order(lambda image: _encoded(folders.read(root, image), size), images, threads)
    try:
        shards.write_records(temporary, counter.counted(records))
        entry = shards.entry_of(temporary)
        if entry["records"] != len(images):
            raise OSError(f"only {entry['records']} of {len(images)} records were written")
        _publish(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"packing stopped at {path}: {error}; {free / 1e6:.0f} MB are free there. Fix the cause (free space, the "
            f"folder of images) and pack again: it resumes here"
        ) from error
    return entry


def _encoded(data: bytes, size: int | None) -> bytes:
    """The image unchanged, or resized to a short side of ``size`` where that is smaller."""
    if size is None:
        return data
    with Image.open(io.BytesIO(data)) as header:
        if min(header.size) <= size:
            return data
    image = Image.fromarray(decode(data, size))
    short = min(image.size)
    shrunk = image.resize(
        (round(image.width * size / short), round(image.height * size / short)), Image.Resampling.BILINEAR
    )
    buffer = io.BytesIO()
    shrunk.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def _publish(temporary: Path, path: Path) -> None:
    """Syncs the file to the disk, then renames it."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _existing(target: Path, job: str) -> Report:
    manifest = shards.read_manifest(target)
    if manifest["job"] != job:
        raise ValueError(
            f"{target} holds shards of another folder, of an earlier state of it, or with other settings; "
            f"choose another place or remove it"
        )
    return _report(manifest)


def _report(manifest: dict[str, Any]) -> Report:
    parts, entries = manifest["parts"], [e for part in manifest["parts"].values() for e in part["shards"]]
    return Report(
        sum(parts["train"]["counts"]),
        sum(parts["test"]["counts"]),
        len(entries),
        sum(entry["bytes"] for entry in entries),
        manifest["skipped"],
    )


class _Progress:
    """Counts images for ``progress``."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.count = progress, total, 0

    def counted(self, records: Iterable[bytes]) -> Iterator[bytes]:
        for record in records:
            yield record
            self.add(1)

    def add(self, count: int) -> None:
        self.count += count
        if self.progress:
            self.progress("pack", self.count, self.total)
