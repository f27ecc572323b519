"""The state of a training between two steps: what is trained, by which ranks, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract import Codec, Engine, Exchange
from paceline.data.batches import Cursor
from paceline.data.load_balance import Limits, LoadBalancer
from paceline.data.sampler import Assignment
from paceline.engine.compute.precision import Scaler
from paceline.environment import LaunchEnvironment
from paceline.errors import NotFinite
from paceline.job import Job
from paceline.messages import Decision, StepOutcome
from paceline.report.activity import Activity
from paceline.report.record import Record
from paceline.report.step_observer import StepObserver
from paceline.transport import Control, Link, Membership


@dataclass
class RunState:
    """A training between two steps: alike in all processes, but for who each of them is, and what it has to do.

    ``members``: of the nodes, with the link between them. ``assignment``: whose rows of a batch are this process's;
    ``balances``: it follows the nodes' speed. ``number``: of this join among those of the script.
    ``leader``: it does what one of all has to do; ``speaks``: it says what all are told. ``watched``: by a trial, a
    profile or a comparison, which leave the user's run alone. ``clip``: the global norm. ``stop_signal``: a signal, and
    ``launcher_lost``: the launcher is gone: both end the training after the step in which all know.
    """

    job: Job
    world: LaunchEnvironment
    engine: Engine
    exchange: Exchange
    control: Control
    codec: Codec
    members: Membership
    assignment: Assignment
    limits: Limits = field(default_factory=lambda: Limits((), ()))
    balance: LoadBalancer | None = None
    balances: bool = False
    identity: str = "this process"
    clip: float | None = None
    scaler: Scaler = field(default_factory=lambda: Scaler(1.0))
    record: Record = field(default_factory=Record)
    activity: Activity = field(default_factory=Activity)
    observers: list[StepObserver] = field(default_factory=list)
    number: int = 0
    folder: Path | None = None
    methods: dict[str, str] = field(default_factory=dict)
    row: str = ""
    leader: bool = False
    speaks: bool = False
    watched: bool = False
    stop_signal: int = 0
    launcher_lost: bool = False
    num_steps: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    facts: dict[str, Any] = field(default_factory=dict)
    last: StepOutcome = field(default_factory=lambda: StepOutcome(Decision.COMMIT))
    torn: bool = False  # a step began, and was not agreed on
    fixed_s: float = 0.0  # of the last step: what its rows do not change

    @property
    def link(self) -> Link:
        """To the other nodes, with the bytes of all its lanes."""
        return self.members.link

    @property
    def shares(self) -> tuple[int, ...]:
        """Each node's rows of a whole global batch."""
        dealt: tuple[int, ...] = self.assignment.rows_per_node(self.job.batch_size)
        return dealt

    def settle(self) -> None:
        """Waits for an update that is still coming. Raises NotFinite, LinkError."""
        try:
            self.engine.wait_pending()
        except NotFinite as error:
            error.reported = not self.speaks  # type: ignore[attr-defined]
            raise
