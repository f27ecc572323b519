"""paceline train"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.checkpoint.run_lock import free
from paceline.cli.options import (
    AddressOption,
    DataOption,
    DetachOption,
    EncryptOption,
    EnvOption,
    FidelityOption,
    HostsOption,
    ModelOption,
    NodesOption,
    OutOption,
    PlanOption,
    PythonOption,
    ReproducibleOption,
    RestartsOption,
    SendOption,
    SharesOption,
    SkipBrokenOption,
    SshOption,
    TestFractionOption,
    WaitOption,
    listed,
)
from paceline.cli.prepare import (
    Start,
    check_alone,
    check_writable,
    hide,
    leave,
    ready,
    row,
    start,
    start_over_ssh,
    steady,
    waits,
)
from paceline.launch.hosts import parse
from paceline.planner.planner import Plan
from paceline.registry import CODEC, EXCHANGE
from paceline.train.settings import Settings


def train(
    model: ModelOption = None,
    data: DataOption = None,
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
    fidelity: FidelityOption = "exact",
    batch_norm: Annotated[str, typer.Option(help="Batch statistics: local to each process, or sync.")] = "local",
    exchange: Annotated[str, typer.Option(help="Gradient synchronisation between nodes.")] = EXCHANGE,
    codec: Annotated[str, typer.Option(help="Gradient compression between nodes.")] = CODEC,
    shares: SharesOption = None,
    reproducible: ReproducibleOption = False,
    plan: PlanOption = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode images; 0: threads.")] = 0,
    test_fraction: TestFractionOption = 0.2,
    skip_broken: SkipBrokenOption = False,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds give equal runs.")] = 0,
    out: OutOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume the run in this folder with its saved options; --epochs may be increased."),
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints, besides one per epoch.")] = None,
    keep: Annotated[int, typer.Option(help="Number of checkpoints to keep.")] = 2,
    named: HostsOption = None,
    nodes: NodesOption = None,
    wait: WaitOption = None,
    restarts: RestartsOption = None,
    env: EnvOption = None,
    python: PythonOption = None,
    address: AddressOption = None,
    ssh_command: SshOption = "ssh",
    send: SendOption = False,
    encrypt: EncryptOption = False,
    detach: DetachOption = False,
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
    asked: dict[str, Any] = {**locals(), "json": as_json}
    settings = Settings(**{field.name: asked[field.name] for field in dataclasses.fields(Settings)})
    if resume:
        settings = _gone_on_with(settings, resume)
    plan = steady(plan, reproducible)
    check_alone(hosts, send, None, detach)
    hide(settings.encrypt)
    waits(wait)
    how = Start(hosts, nodes, restarts, env, python, address, ssh_command, send)
    _check_folder(out, resume)
    if detach:
        leave(["train", settings.model_name], hosts)
    raise typer.Exit(_start(settings, plan, out, resume, how))


def _gone_on_with(asked: Settings, run: Path) -> Settings:
    """The settings of a run that is resumed. Raises ValueError where it was asked for anything else."""
    if other := asked.others_than("epochs", "json", "encrypt"):
        raise ValueError(
            f"--resume continues a run with its own settings: only --epochs, --plan, --encrypt, --json and how it is "
            f"started (-H, --send, --detach ...) may be given with it, not {', '.join(other)}"
        )
    kept = Settings.read(run)
    epochs, encrypt = asked.epochs or kept.epochs, asked.encrypt or kept.encrypt
    return dataclasses.replace(kept, epochs=epochs, encrypt=encrypt, json=asked.json)


def _check_folder(out: Path | None, resume: Path | None) -> None:
    """Raises ValueError for a folder of another run, or one that cannot be written."""
    if "RANK" in os.environ:
        return  # a launcher starts a run again by the same words, and the run itself looks whose its checkpoints are
    if out and not resume and any(out.glob("checkpoint-*")):
        raise ValueError(f"{out} holds another run's checkpoints; give another --out, or go on with --resume {out}")
    check_writable(resume or out or Path("runs"))


def _start(settings: Settings, plan: str, out: Path | None, resume: Path | None, how: Start) -> int:
    """Here, on hosts, or as one process of those that another launcher has started. Returns an exit code."""
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
            plan = made.chosen  # others than before: on all of them what most did
    if how.hosts:
        return start_over_ssh(how, command, plan, settings.fidelity, out or own, settings)
    made = ready(command, plan, settings.fidelity, settings, settings.json)
    out = out or _fresh(own)
    free(out)
    settings.write(out)
    return start(command, made, out, how, quiet=settings.json)


def _train_here(settings: Settings, plan: str, out: Path) -> None:
    from paceline.train import run as job

    if os.environ["RANK"] == "0":
        settings.claim(out)
        free(out)
        settings.write(out)
    os.environ["PACELINE_FOLDER"] = str(out)
    if plan != "auto":
        os.environ["PACELINE_ENGINE"] = row(plan)
    job.run(settings)


def _fresh(named: Path) -> Path:
    """A folder of its own, also where two runs begin in one second."""
    for number in range(1, 100):
        out = named if number == 1 else named.with_name(f"{named.name}-{number}")
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out
    raise ValueError(f"there are a hundred runs named {named}; give --out")
