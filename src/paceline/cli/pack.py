"""`paceline pack`: packs a folder of images into shards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli import options
from paceline.cli.options import console


def pack(
    folder: Annotated[Path, typer.Argument(help="Folder with one sub-folder of images per class.")],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    skip_broken: options.SkipBroken = False,
    size: Annotated[
        int | None, typer.Option(help="Shrink the short side of images to this, in pixels (256 is enough).")
    ] = None,
    test_fraction: options.TestFraction = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the train/test split.")] = 0,
) -> None:
    """Packs many small image files into few large shards with checksums; after an interruption, run it again.

    Example: paceline pack ./photos ./shards && paceline train --data ./shards
    """
    from paceline.data import pack as packing

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("packing", total=None)
        made = packing.pack(
            folder,
            out,
            skip_broken=skip_broken,
            size=size,
            test_fraction=test_fraction,
            seed=seed,
            progress=lambda doing, done, total: progress.update(bar, description=doing, completed=done, total=total),
        )
    for path, why in made.skipped.items():
        print(f"left out {path}: {why}", file=sys.stderr)
    console.print(
        f"{out}: {made.num_train} images to train on, {made.num_test} to test, {made.num_shards} shards, "
        f"{made.num_bytes / 1e6:.0f} MB{f', {len(made.skipped)} broken images left out' if made.skipped else ''}"
    )
