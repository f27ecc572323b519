"""Steps that all processes refuse, and why: a loss or gradient that is not finite, no gradient, unlike optimizers.

The weights stay those before the step. If replicas do not synchronise on every step, a process refuses it alone.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.contract import GlobalBatch
from paceline.errors import NoGradient, NotFinite, UnlikeOptions
from paceline.messages import Decision, StepOutcome, Vote
from paceline.step.run_state import RunState


def refuse(run: RunState, outcome: StepOutcome) -> None:
    """Raises NoGradient and UnlikeOptions, in every process that knows of it."""
    vote, together, step = outcome.vote, run.exchange.consensus == "step", run.num_steps
    if outcome.decision is Decision.COMMIT and (nothing := _trains_nothing(vote, together)):
        raise NoGradient(f"step {step} trains nothing: {nothing}. Weights are those before the step")
    if vote.options_differ and together and (how := _unlike_options(run)):
        raise UnlikeOptions(
            f"the optimizer's numbers differ between processes at step {step}: {how}. Change them on all "
            f"alike, as a scheduler does. Weights are those before the step"
        )


def _trains_nothing(vote: Vote, together: bool) -> str:
    """The reason, or an empty text. That the rows of one process have no weight is no reason; that all have none, is.

    ``together``: the vote is that of all processes.
    """
    if vote.constant or (together and vote.weight and 1 not in vote.used):
        return (
            "the loss does not require grad, or no trainable parameter is part of it; look for torch.no_grad(), "
            "set_grad_enabled(False), inference_mode(), .detach() and .item() before it, and for frozen parameters"
        )
    if together and not vote.weight:
        return (
            "nothing in the global batch counts: every process's weight is 0; look at the masks, the ignored targets "
            "and the weights of classes, or leave such a batch out on all processes"
        )
    return ""


def _unlike_options(run: RunState) -> str:
    mine = json.dumps([run.identity, run.engine.options()]).encode()
    return run.engine.compare_options([json.loads(each) for each in run.control.all_gather(mine) if each])


def not_finite(run: RunState, what: str, batch: GlobalBatch, vote: Vote, snapshot: Any) -> NotFinite:
    """The error of a refused step. The search for the cause computes the step again, and rolls it back, too.

    ``what``: "loss" or "gradient". ``snapshot``: the engine's, before the step.
    """
    engine = run.engine
    engine.rollback(snapshot)
    found = engine.diagnose(batch.share(run.assignment), backward=what == "gradient")
    engine.rollback(snapshot)
    mine = f"{found} ({run.identity})".encode() if found else b""
    reports = run.control.all_gather(mine) if run.exchange.consensus == "step" else [mine]
    first = next((text.decode() for text in reports if text), "")
    where = f"; the first number that is not finite: {first}" if first else ""
    given = [group.get("lr") for group in engine.optimizer.param_groups]
    rates = ", ".join(f"{rate:g}" for rate in sorted({float(rate) for rate in given if rate is not None}))
    return NotFinite(
        f"the {what} is not finite at step {run.num_steps}: loss sum {vote.loss_sum} over weight "
        f"{vote.weight:g}, learning rate {rates or 'none'}{where}. Weights are those "
        f"before the step. Lower the learning rate, add warm-up, or join(clip=1.0)"
    )
