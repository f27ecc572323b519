"""`paceline train`: trains a model by name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.checkpoint.run_lock import check_free
from paceline.cli import options, over_ssh, prepare
from paceline.cli.options import listed
from paceline.launch.hosts import parse
from paceline.planner.planner import Plan
from paceline.registry import CODEC, EXCHANGE
from paceline.train.settings import Settings


def train(
    model: options.Model = None,
    data: options.Data = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch size: over all processes and nodes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd and lars.")] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    optimizer: Annotated[str, typer.Option(help="sgd, adam, adamw or lars.")] = "sgd",
    lr_scaling: Annotated[
        str, typer.Option(help="Learning-rate scaling from the model's default batch to this one: none, linear, sqrt.")
    ] = "none",
    warmup: Annotated[float, typer.Option(help="Warm-up: epochs in which the learning rate rises.")] = 0.0,
    decay: Annotated[
        str, typer.Option(help="Learning-rate schedule after warm-up: none, cosine, poly or step.")
    ] = "none",
    clip: Annotated[float | None, typer.Option(help="Clip gradients to this global norm.")] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step, to save memory.")] = 1,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: as the plan says.")] = None,
    fidelity: options.Fidelity = "exact",
    batch_norm: Annotated[str, typer.Option(help="Batch statistics: local to each process, or sync.")] = "local",
    exchange: Annotated[str, typer.Option(help="Gradient synchronisation between nodes.")] = EXCHANGE,
    codec: Annotated[str, typer.Option(help="Gradient compression between nodes.")] = CODEC,
    shares: options.Shares = None,
    reproducible: options.Reproducible = False,
    plan: options.Plan = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode images; 0: threads.")] = 0,
    test_fraction: options.TestFraction = 0.2,
    skip_broken: options.SkipBroken = False,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds give equal runs.")] = 0,
    out: options.Out = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the run in this folder with its saved options; --epochs may be increased."),
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints, besides one per epoch.")] = None,
    keep: Annotated[int, typer.Option(help="Number of checkpoints to keep.")] = 2,
    named: options.Hosts = None,
    nodes: options.Nodes = None,
    wait: options.Wait = None,
    restarts: options.Restarts = None,
    env: options.Env = None,
    python: options.Python = None,
    address: options.Address = None,
    ssh_command: options.Ssh = "ssh",
    send: options.Send = False,
    encrypt: options.Encrypt = False,
    detach: options.Detach = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
) -> None:
    """Trains a model with the fastest configuration for this machine; without arguments, on an embedded sample.

    Examples:

    paceline train

    paceline train --model alexnet --data ./photos --epochs 5 --out runs/photos

    paceline train --resume runs/photos

    paceline train -H hostA,hostB --send --data ./photos --detach
    """
    hosts = listed(named)
    given: dict[str, Any] = {**locals(), "json": as_json}
    settings = Settings(**{field.name: given[field.name] for field in dataclasses.fields(Settings)})
    if resume:
        settings = _resumed(settings, resume)
    plan = prepare.reproducible_plan(plan, reproducible)
    prepare.check_alone(hosts, send, None, detach)
    prepare.require_encryption(settings.encrypt)
    prepare.set_wait(wait)
    how = prepare.Start(hosts, nodes, restarts, env, python, address, ssh_command, send)
    _check_folder(out, resume)
    if detach:
        prepare.run_detached(["train", settings.model_name], hosts)
    raise typer.Exit(_start(settings, plan, out, resume, how))


def _resumed(given: Settings, run: Path) -> Settings:
    """The saved settings of the run in this folder. Raises ValueError if other options are given."""
    if other := given.others_than("epochs", "json", "encrypt"):
        raise ValueError(
            f"--resume continues a run with its own settings: only --epochs, --plan, --encrypt, --json and how it is "
            f"started (-H, --send, --detach ...) may be given with it, not {', '.join(other)}"
        )
    saved = Settings.read(run)
    epochs, encrypt = given.epochs or saved.epochs, given.encrypt or saved.encrypt
    return dataclasses.replace(saved, epochs=epochs, encrypt=encrypt, json=given.json)


def _check_folder(out: Path | None, resume: Path | None) -> None:
    """Raises ValueError if the folder belongs to another run or is not writable."""
    if "RANK" in os.environ:
        return  # launchers restart runs with the same options, and the run itself checks the checkpoints
    if out and not resume and any(out.glob("checkpoint-*")):
        raise ValueError(f"{out} holds another run's checkpoints; give another --out, or continue it: --resume {out}")
    prepare.check_writable(resume or out or Path("runs"))


def _start(settings: Settings, plan: str, out: Path | None, resume: Path | None, how: prepare.Start) -> int:
    """Trains on this machine, on hosts, or as one process of another launcher. Returns an exit code."""
    out = resume or out
    own = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.model_name.replace(':', '.')}"
    if "RANK" in os.environ:
        _train_here(settings, plan, out or own)
        return 0
    command = ["-m", "paceline.train.run", settings.to_json()]
    if resume and plan == "auto" and (resume / "plan.toml").exists():
        plan = str(resume / "plan.toml")
        made = Plan.read(plan)
        if how.hosts and made.hosts.keys() - {host.name for host in parse(how.hosts)}:
            plan = made.chosen  # other hosts than before: all use the plan's common configuration
    if how.hosts:
        return over_ssh.start(how, command, plan, settings.fidelity, out or own, settings)
    made = prepare.find_or_make_plan(command, plan, settings.fidelity, settings, settings.json)
    out = out or _fresh(own)
    check_free(out)
    settings.write(out)
    return prepare.start(command, made, out, how, quiet=settings.json)


def _train_here(settings: Settings, plan: str, out: Path) -> None:
    from paceline.train import run as job

    if os.environ["RANK"] == "0":
        settings.check_same_run(out)
        check_free(out)
        settings.write(out)
    os.environ["PACELINE_FOLDER"] = str(out)
    if plan != "auto":
        os.environ["PACELINE_ENGINE"] = prepare.check_configuration(plan)
    job.run(settings)


def _fresh(named: Path) -> Path:
    """A new folder, also if two runs start within one second."""
    for number in range(1, 100):
        out = named if number == 1 else named.with_name(f"{named.name}-{number}")
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out
    raise ValueError(f"there are 99 runs named {named} already; give --out")
