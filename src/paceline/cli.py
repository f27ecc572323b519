"""Parse, call, print; no logic. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline import __version__, find, world
from paceline import plan as planning
from paceline.balance import wanted
from paceline.launch import local, ssh
from paceline.launch.check import check
from paceline.launch.hosts import Way, parse, row
from paceline.plan import Plan
from paceline.probe.survey import survey
from paceline.settings import Settings

app = typer.Typer(
    help="Trains PyTorch models as fast as the machines you already have allow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console(highlight=False, soft_wrap=True)
AFTER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
PLAN = "auto (measured once, then kept), a plan file, or a row such as threads:2, processes:2+channels_last."

ModelOption = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(find.names('models'))}; or package.module:function.")
]
DataOption = Annotated[
    str | None, typer.Option(help="Folder with one sub-folder of images per class, or what `pack` wrote.")
]
PlanOption = Annotated[str, typer.Option("--plan", "--engine", help=PLAN)]
FidelityOption = Annotated[str, typer.Option(help="What may be chosen: exact, rounded (16 bits), approximate.")]
SharesOption = Annotated[
    str | None, typer.Option(help="Rows of each node: measured (also without it), equal, or as 3,1.")
]
OutOption = Annotated[Path | None, typer.Option(help="The run's folder: record, checkpoints, weights, plan.")]
HostsOption = Annotated[
    str | None, typer.Option("-H", "--hosts", help="Over ssh on each of these: hostA,user@hostB, or hostA:2,hostB:2.")
]
EnvOption = Annotated[str | None, typer.Option("--env", help="With -H: variables that go along, A,B.")]
PythonOption = Annotated[
    str | None, typer.Option("--python", help="With -H: the interpreter there, if not this one's path.")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="With -H: the first host's, as the others reach it; else as ssh did.")
]
SshOption = Annotated[
    str, typer.Option("--ssh", envvar="PACELINE_SSH", help="With -H: the client and its options, 'ssh -F file'.")
]


def main() -> None:
    """A user's mistake is one message on stderr and exit code 2."""
    try:
        world.adopt()
        app()
    except (ValueError, ConnectionError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the versions.")] = False) -> None:
    if version:
        print(f"paceline {__version__}, torch {importlib.metadata.version('torch')}")
        raise typer.Exit


@app.command()
def train(
    model: ModelOption = None,
    data: DataOption = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch: over all processes and nodes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd and lars.")] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    optimizer: Annotated[str, typer.Option(help="sgd, adam, adamw or lars.")] = "sgd",
    lr_scaling: Annotated[str, typer.Option(help="With the batch over the model's own: none, linear, sqrt.")] = "none",
    warmup: Annotated[float, typer.Option(help="Epochs in which the learning rate rises.")] = 0.0,
    decay: Annotated[str, typer.Option(help="Then: none, cosine, poly or step.")] = "none",
    clip: Annotated[float | None, typer.Option(help="Clip gradients by this global norm.")] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step, for memory.")] = 1,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; else what the plan says.")] = None,
    fidelity: FidelityOption = "exact",
    batch_norm: Annotated[str, typer.Option(help="Statistics: local to each process, or sync.")] = "local",
    exchange: Annotated[str, typer.Option(help="How nodes agree, where there are several.")] = "allreduce",
    codec: Annotated[str, typer.Option(help="What a gradient looks like on the wire.")] = "none",
    shares: SharesOption = None,
    plan: PlanOption = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode images; 0: threads.")] = 0,
    test_fraction: Annotated[float, typer.Option(help="Held out, where there is no test/ folder.")] = 0.2,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave unreadable images out.")] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal runs.")] = 0,
    out: OutOption = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, as it was asked for; --epochs may be more.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints, besides each epoch's.")] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay.")] = 2,
    hosts: HostsOption = None,
    env: EnvOption = None,
    python: PythonOption = None,
    address: AddressOption = None,
    ssh_command: SshOption = "ssh",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
) -> None:
    """Trains a model the fastest way this machine allows; without arguments, on an embedded sample.

    Examples:

    paceline train

    paceline train --model alexnet --data ./photos --epochs 5 --out runs/photos

    paceline train --resume runs/photos
    """
    asked: dict[str, Any] = {**locals(), "json": as_json}
    given = {field.name: asked[field.name] for field in dataclasses.fields(Settings)}
    settings = Settings(**given)
    if resume:
        if other := settings.others_than("epochs", "json"):
            raise ValueError(
                f"--resume goes on as the run was asked for; beside it --epochs, --plan and --json may be given, not "
                f"{', '.join(other)}"
            )
        settings = dataclasses.replace(Settings.read(resume), json=as_json)
        settings.epochs = epochs or settings.epochs
    out = resume or out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.model_name.replace(':', '.')}"
    if out.exists() and not resume and any(out.glob("checkpoint-*")):
        raise ValueError(f"{out} holds another run's checkpoints; give another --out, or go on with --resume {out}")
    if hosts:
        _check_alone()
    if "RANK" in os.environ:
        from paceline import train as job

        if os.environ["RANK"] == "0":
            settings.write(out)
        os.environ["PACELINE_FOLDER"] = str(out)
        if plan != "auto":
            os.environ["PACELINE_ENGINE"] = _row(plan)
        job.run(settings)
        return
    command = ["-m", "paceline.train", settings.to_json()]
    if resume and plan == "auto" and (resume / "plan.toml").exists():
        plan = str(resume / "plan.toml")
    if hosts:
        if settings.json:
            raise ValueError(
                "--json prints nothing but one object, and -H a host's name before each line; leave one out"
            )
        way = Way(ssh_command, python or sys.executable)
        paths = [settings.data] if settings.data else []
        raise typer.Exit(_start_over_ssh(hosts, way, command, plan, out, env, address, paths, settings))
    made = _made(command, plan, settings.fidelity, settings, settings.json)
    settings.write(out)
    raise typer.Exit(_start(command, made, out, quiet=settings.json))


@app.command(name="plan", context_settings=AFTER)
def plan_(
    context: typer.Context,
    script: Annotated[str | None, typer.Argument(help="A script with its arguments; or none, and --model.")] = None,
    model: ModelOption = None,
    data: DataOption = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch.")] = None,
    fidelity: FidelityOption = "exact",
    budget: Annotated[float | None, typer.Option(help="Seconds; then only the most promising are tried.")] = None,
    rows: Annotated[str | None, typer.Option(help="Only these, separated by spaces or commas.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as TOML, for train --plan FILE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predicts and measures every way to train a job on this machine, and says why the losers lost.

    Examples:

    paceline plan --model alexnet --batch-size 32 --data ./photos --out plan.toml

    paceline plan --fidelity rounded train.py --my-option 3
    """
    if script:
        command = [script, *context.args]
        _check_script(command)
    else:
        command = ["-m", "paceline.train", Settings(model=model, data=data, batch_size=batch_size).to_json()]
    with Console(stderr=True).status("measuring") as status:
        made = planning.make(
            command,
            fidelity=fidelity,
            budget_s=budget,
            thorough=budget is None,
            rows=rows.replace(",", " ").split() if rows else None,
            show=status.update,
        )
    if out:
        made.write(out)
    if as_json:
        print(made.to_json())
        return
    _show(made)


@app.command(context_settings=AFTER)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script with its own arguments, or -m and a module.")],
    plan: PlanOption = "auto",
    fidelity: FidelityOption = "exact",
    shares: SharesOption = None,
    out: OutOption = None,
    hosts: HostsOption = None,
    env: EnvOption = None,
    python: PythonOption = None,
    address: AddressOption = None,
    ssh_command: SshOption = "ssh",
) -> None:
    """Starts a script everywhere it should run.

    Examples:

    paceline run examples/own_loop.py

    paceline run --plan processes:2 --out runs/mine train.py --my-option 3

    paceline run -H hostA,hostB train.py
    """
    command = [script, *context.args]
    _check_script(command)
    wanted(shares or "measured")
    if hosts:
        _check_alone()
        way = Way(ssh_command, python or sys.executable)
        paths = [] if script == "-m" else [script]
        raise typer.Exit(_start_over_ssh(hosts, way, command, plan, out, env, address, paths, shares=shares))
    raise typer.Exit(_start(command, _made(command, plan, fidelity), out, shares=shares))


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="Folder with one sub-folder of images per class.")],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave unreadable images out.")] = False,
    size: Annotated[int | None, typer.Option(help="Shrink to this short side, in pixels (256 is enough).")] = None,
    test_fraction: Annotated[float, typer.Option(help="Held out, where there is no test/ folder.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of what is held out.")] = 0,
) -> None:
    """Many small files become few large shards, checked; run it again after an interruption and it goes on.

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


@app.command()
def predict(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, one of its checkpoints, or exported weights.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    top: Annotated[int, typer.Option(help="Classes to name per image.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per image.")] = False,
) -> None:
    """What images show, by a trained model.

    Example: paceline predict runs/photos a.jpg b.jpg
    """
    from paceline.predict import predict as ask

    for image, best in ask(checkpoint, images, top):
        if as_json:
            print(json.dumps({"image": str(image), "top": [{"class": c, "probability": p} for c, p in best]}))
        else:
            print(f"{image}: {', '.join(f'{name} {probability:.1%}' for name, probability in best)}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are shown side by side.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page: loss, speed, where the time goes, the plan and its reason.

    Example: paceline report runs/* --out report.html
    """
    from paceline.report import page

    page.write(runs, out)
    console.print(f"report: {out}")


@app.command()
def track(
    folder: Annotated[Path, typer.Argument(help="The run's folder.")],
    to: Annotated[str, typer.Option(help="tensorboard, mlflow or wandb.")] = "tensorboard",
    live: Annotated[bool, typer.Option("--live", help="Follow a run that is still going.")] = False,
) -> None:
    """Passes a run's record on to a tracker.

    Example: paceline track --live --to tensorboard runs/photos
    """
    from paceline.report import track as tracking

    console.print(f"{tracking.follow(folder, to, live)} numbers passed on to {to}")


@app.command(context_settings=AFTER)
def verify(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script that calls paceline.join, with its own arguments.")],
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 10,
    nodes: Annotated[int, typer.Option(help="Nodes to pretend on this machine, outside a launcher.")] = 2,
    engine: Annotated[str, typer.Option(help="Each node's engine.")] = "sequential",
    float32: Annotated[
        bool, typer.Option("--float32", help="Compare in float32, for what float64 cannot run.")
    ] = False,
) -> None:
    """N nodes against one process: is the result the same, within what tolerance?

    Under a launcher (RANK is set) this process's node is one of the N. Dropout is switched off.

    Example: paceline verify --engine processes:2 examples/own_loop.py
    """
    from paceline import verify as verification

    command = [script, *context.args]
    _check_script(command)
    dtype = "float32" if float32 else "float64"
    find.parse("engine", engine)
    compared = verification.verify([sys.executable, *command], steps, nodes, engine, dtype)
    if compared is None:
        return
    console.print(
        f"{compared.steps} steps in {dtype}, dropout off: largest relative difference of the loss {compared.loss:.1e}, "
        f"of a parameter {compared.weight:.1e} ({compared.worst}); tolerance {compared.tolerance:.0e}"
    )
    if compared.batch_norm and not compared.same:
        console.print("the model normalises over batches, and each process over its own rows (exact, local BN)")
    console.print("[green]the same[/green]" if compared.same else "[red]NOT the same[/red]")
    raise typer.Exit(0 if compared.same else 1)


@app.command(name="list")
def list_() -> None:
    """Every engine, exchange, codec, link and model: one line each.

    Example: paceline list
    """
    for room in find.ROOMS:
        for name in find.names(room):
            print(f"{room:10}{name:14}{find.describe(room, name)}")


@app.command()
def bench(
    suite: Annotated[
        str, typer.Argument(help="local: this machine against torch by hand and DDP. links: sums against gloo's.")
    ],
    only: Annotated[str | None, typer.Option(help="Tasks or algorithms, separated by commas; see the record.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 7,
    processes: Annotated[int, typer.Option(help="links: processes that add up, all on this machine.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Folder for the record.")] = None,
) -> None:
    """The benchmark suite: contenders by turns, kept as a record.

    Examples:

    paceline bench local --only exact,factors --out benchmarks/mine

    paceline bench links --processes 8
    """
    from paceline.bench import links
    from paceline.bench import local as one_machine

    suites: dict[str, tuple[Any, Any]] = {
        "local": (one_machine.run, one_machine.write),
        "links": (functools.partial(links.run, processes=processes), links.write),
    }
    if suite not in suites:
        raise ValueError(f"no suite named {suite!r}; known: {', '.join(suites)}")
    start, write = suites[suite]
    findings = []
    with Console(stderr=True).status("measuring") as status:
        for finding in start(only.split(",") if only else [], rounds, status.update):
            findings.append(finding)
            mark = "reached" if finding.reached else "NOT reached"
            console.print(f"{finding.what}: {finding.figure}, demanded {finding.demanded}: {mark}")
            if out:
                write(findings, rounds, out)
    if out:
        console.print(f"record: {out}")


def _made(
    command: list[str], wanted: str, fidelity: str, settings: Settings | None = None, quiet: bool = False
) -> Plan:
    """The plan asked for: a file's, a row by itself, the one kept for this command, or a new one."""
    if wanted != "auto":
        return Plan.read(wanted) if Path(wanted).is_file() else Plan(_row(wanted), "as asked for")
    screen = Console(stderr=quiet, highlight=False, soft_wrap=True)
    machine = survey()
    if not quiet:
        screen.print(f"machine: {machine}, torch {importlib.metadata.version('torch')}")
    made, stale = planning.cached(command, fidelity, machine)
    if made:
        os.environ.update(planning.promise(made, command))
    if stale:
        screen.print(f"{stale}; measuring again")
    if made is None:
        if settings:
            from paceline.train import check, sources

            check(settings)
            sources(settings)  # before anything is measured; with a plan at hand, the run itself does
        with Console(stderr=True).status("measuring") as status:
            made = planning.make(command, fidelity=fidelity, show=status.update)
        if not quiet:
            _show(made, "tried")
    elif not quiet:
        screen.print(f"plan: [bold]{made.chosen}[/bold] ({made.reason}; measured {made.date})")
    return made


def _show(made: Plan, which: str = "all") -> None:
    rows = [row for row in made.rows if which == "all" or row.measured_s is not None]
    screen = console if console.is_terminal else Console(highlight=False, width=160)
    screen.print(planning.table(dataclasses.replace(made, rows=tuple(rows))))
    if others := len(made.rows) - len(rows):
        console.print(f"{others} others were not tried; `paceline plan` measures them too")
    console.print(f"plan: [bold]{made.chosen}[/bold] ({made.reason})")


def _row(text: str) -> str:
    """Raises ValueError for what is neither a plan file nor a row."""
    from paceline.engine.numerics import parse_row

    if text.endswith(".toml"):
        raise ValueError(f"there is no plan file {text!r}; write one with: paceline plan --out {text}")
    engine, _ = parse_row(text)
    find.parse("engine", engine)
    return text


def _start(command: list[str], made: Plan, out: Path | None, quiet: bool = False, shares: str | None = None) -> int:
    environment = {"PACELINE_SHARES": shares} if shares else {}
    if out:
        out.mkdir(parents=True, exist_ok=True)
        made.write(out / "plan.toml")
        environment["PACELINE_FOLDER"] = str(out)
    code = local.start([sys.executable, *command], made.chosen, environment=environment)
    if code == 0 and out and not quiet:
        console.print(f"run: {out}")
    return code


def _start_over_ssh(
    hosts: str,
    way: Way,
    command: list[str],
    plan: str,
    out: Path | None,
    names: str | None,
    address: str | None,
    paths: list[str],
    settings: Settings | None = None,
    shares: str | None = None,
) -> int:
    nodes = parse(hosts)
    engine = os.environ.get("PACELINE_ENGINE", "") if plan == "auto" else plan
    if engine:
        engine = Plan.read(engine).chosen if Path(engine).is_file() else _row(engine)
    chosen, environment = row(nodes, engine), ssh.carried(names.replace(",", " ").split() if names else ())
    if shares:
        environment["PACELINE_SHARES"] = shares
    if out:
        environment["PACELINE_FOLDER"] = str(out)
    meeting = check(nodes, way, paths, address)
    if settings and out:
        settings.write(out)
    code = ssh.start(nodes, command, chosen, way, environment, meeting)
    if code == 0 and out:
        console.print(f"run: {out} on {nodes[0].name}")
    return code


def _check_alone() -> None:
    if "RANK" in os.environ:
        raise ValueError(
            f"-H starts every node from one process, and a launcher started this one as one of several "
            f"(RANK={os.environ['RANK']}); leave out -H or that launcher, or unset RANK"
        )


def _check_script(command: list[str]) -> None:
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("-m needs a module name, as in: paceline run -m package.module")
    elif not Path(command[0]).is_file():
        raise ValueError(f"no script at {command[0]!r}; give the path of a Python file, or -m and a module")
