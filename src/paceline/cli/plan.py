"""paceline plan"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline import plan as planning
from paceline.cli.options import DataOption, FidelityOption, ModelOption
from paceline.cli.start import check_script, show
from paceline.settings import Settings


def plan(
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
        check_script(command)
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
    show(made)
