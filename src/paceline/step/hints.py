"""Hints about a model, logged once: its mode, its norm layers, and what the first gradient shows."""

from __future__ import annotations

from paceline.contract import GlobalBatch
from paceline.engine.checks.norm_layers import in_eval_mode, own_statistics
from paceline.report.log import log
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.step.run_state import RunState


class Hints(StepObserver):
    """Logged, and written to the event log, by the leader."""

    def __init__(self, run: RunState):
        self.run = run
        self._mode: bool | None = None  # the model's, in the last step
        self._logged = set[str]()

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """Checks before the first step, and when the mode has changed since the last."""
        run, model = self.run, self.run.job.model
        if model.training is not self._mode:
            self._mode = model.training
            self._once("mode", "mode" not in self._logged and in_eval_mode(model, run.num_steps))
            local = run.engine.divided and run.job.batch_norm == "local" and "norms" not in self._logged
            self._once("norms", local and own_statistics(model))
            codec = run.methods["codec"]
            lost = f"codec {codec!r} drops the values that it does not send; feedback/{codec} sends them in later steps"
            self._once("codec", run.codec.needs_feedback and run.world.num_nodes > 1 and lost)
        return batch

    def ends(self, summary: StepSummary) -> None:
        self._once("engine", self.run.engine.hint)

    def _once(self, key: str, text: str | bool) -> None:
        if text and key not in self._logged:
            self._logged.add(key)
            self.hint(str(text))

    def hint(self, text: str) -> None:
        if self.run.leader and not self.run.watched:
            log.warning(text)
            self.run.record.write("hint", text=text)
