"""The state of a training between two steps: what is trained, by which ranks, and the position in the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract import Codec, Engine, Exchange
from paceline.data.batches import Cursor
from paceline.data.load_balance import Limits, LoadBalancer
from paceline.data.sampler import Assignment
from paceline.engine.compute.precision import Scaler
from paceline.environment import LaunchEnvironment
from paceline.errors import NoGradient, NotFinite
from paceline.job import Job
from paceline.messages import Decision, StepOutcome
from paceline.report.activity import Activity
from paceline.report.record import Record
from paceline.report.step_observer import StepObserver
from paceline.step.kept_objects import KeptObjects
from paceline.transport import Control, Link, Membership

if TYPE_CHECKING:
    from paceline.step.ahead import Ahead


@dataclass
class RunState:
    """A training between two steps: alike in all processes, except for the identity and the tasks of each.

    ``members``: of the run, with the link between the nodes. ``assignment``: which rows of a batch are this process's;
    ``balances``: it follows the nodes' speed. ``number``: of this join among those of the script. ``leader``: does what
    only one process may do; ``kept``: objects of the script that are saved, too; ``speaks``: reports errors that all
    processes raise. ``watched``: by a trial, a profile or a comparison, which do not change the user's run. ``clip``:
    the global norm. ``stop_signal``: a signal received, and ``launcher_lost``: no connection to the launcher: both end
    the training after the step in which all learn of it. ``ahead``: reads the numbers of a step later.
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
    asked: tuple[str, str] = "", ""  # exchange and codec, with their options
    leader: bool = False
    speaks: bool = False
    watched: bool = False
    stop_signal: int = 0
    launcher_lost: bool = False
    num_steps: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    facts: dict[str, Any] = field(default_factory=dict)
    kept: KeptObjects = field(default_factory=KeptObjects)
    last: StepOutcome = field(default_factory=lambda: StepOutcome(Decision.COMMIT))
    interrupted: bool = False  # a step began, and was neither committed nor rolled back
    ahead: Ahead | None = None
    fixed_s: float = 0.0  # of the last step: the part that does not depend on its rows

    @property
    def link(self) -> Link:
        """To the other nodes; counts the bytes of all its lanes."""
        return self.members.link

    @property
    def shares(self) -> tuple[int, ...]:
        """Each node's rows of a whole global batch."""
        rows: tuple[int, ...] = self.assignment.rows_per_node(self.job.batch_size)
        return rows

    def settle(self) -> None:
        """Waits for an update that is not applied, or not read, yet. Raises NotFinite, NoGradient, LinkError."""
        try:
            if self.ahead:
                self.ahead.read()
            self.engine.wait_pending()
        except (NotFinite, NoGradient) as error:
            error.reported = not self.speaks  # type: ignore[union-attr]
            raise
