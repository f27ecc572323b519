"""`paceline predict`, `report`, `track` and `list`: commands that show results or methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline import registry
from paceline.cli.options import console


def predict(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, one of its checkpoints, or exported weights.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(help="Number of classes to print per image.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per image.")] = False,
) -> None:
    """Classifies images with a trained model.

    Example: paceline predict runs/photos a.jpg b.jpg
    """
    from paceline.train.classify import predict as ask

    for image, best in ask(checkpoint, images, top):
        if as_json:
            print(json.dumps({"image": str(image), "top": [{"class": c, "probability": p} for c, p in best]}))
        else:
            print(f"{image}: {', '.join(f'{name} {probability:.1%}' for name, probability in best)}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are compared side by side.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Writes one self-contained HTML page: loss, throughput, time per part of a step, the plan and its reason.

    Example: paceline report runs/* --out report.html
    """
    from paceline.report.page import page

    page.write(runs, out)
    console.print(f"report: {out}")


def track(
    folder: Annotated[Path, typer.Argument(help="The run's folder.")],
    to: Annotated[str, typer.Option(help="tensorboard, mlflow or wandb.")] = "tensorboard",
    live: Annotated[bool, typer.Option("--live", help="Follow a run that is still running.")] = False,
    quiet: Annotated[
        float | None, typer.Option(help="With --live: stop after so many seconds without an event.")
    ] = None,
) -> None:
    """Exports a run's record to an experiment tracker.

    Example: paceline track --live --to tensorboard runs/photos
    """
    from paceline.report import trackers as tracking

    console.print(f"{tracking.follow(folder, to, live, timeout_s=quiet)} values exported to {to}")


def list_() -> None:
    """Lists every engine, exchange, codec, link and model, one line each.

    Example: paceline list
    """
    found = [(room, name) for room in registry.ROOMS for name in registry.names(room)]
    width = max(len(name) for _, name in found) + 2
    for room, name in found:
        print(f"{room:10}{name:{width}}{registry.describe(room, name)}")
