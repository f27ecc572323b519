"""Takeover: what a detached launcher knows of its run on hosts is kept, so that another can replace it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.launch import detach, ssh
from paceline.launch.doctor.preflight import check
from paceline.launch.hosts import Host, Way
from paceline.launch.output import shown
from paceline.launch.supervise import trained_alone
from paceline.report.log import log


@dataclass(frozen=True)
class Launch:
    """A run on hosts, but for what changes from start to start (`ssh.Orders`). ``paths``, ``address``, ``needs``: as of
    `check`. ``quiet``: only its result goes to stdout. ``success``: printed at exit code 0."""

    hosts: Sequence[Host]
    way: Way
    paths: Sequence[str]
    address: str | None
    needs: Mapping[str, str]
    restarts: int
    quiet: bool
    success: str

    def meet(self) -> tuple[str, int]:
        return check(self.hosts, self.way, self.paths, self.address, self.needs)

    def start(self, orders: ssh.Orders, meeting: tuple[str, int] | None = None) -> int:
        """``meeting``: where the nodes meet; None: the nodes of ``orders`` were started, and their launcher was
        killed."""
        orders = dataclasses.replace(
            orders,
            meet=self.meet if self.restarts else None,
            together=trained_alone.exit_code,
            keep=self._keep if detach.left() else None,
        )
        detach.begun()
        result = sys.stdout.buffer if self.quiet else None
        code = ssh.start(self.hosts, orders, meeting, result, self.restarts)
        detach.forget_orders()
        if code == 0 and self.success:
            print(shown(self.success))
        return code

    def _keep(self, orders: ssh.Orders) -> None:
        left_out = ("meet", "together", "keep", "way")
        kept = {name: value for name, value in vars(orders).items() if name not in left_out}
        with contextlib.suppress(OSError):  # on a full disk the run continues; what was kept before stays
            detach.keep_orders(json.dumps({"launch": asdict(self), "orders": kept}))

    @classmethod
    def read(cls, text: str) -> tuple[Launch, ssh.Orders]:
        kept: dict[str, Any] = json.loads(text)
        way = Way(**kept["launch"].pop("way"))
        hosts = [Host(**each) for each in kept["launch"].pop("hosts")]
        orders = ssh.Orders(way=way, **kept["orders"])
        orders.meeting = (kept["orders"]["meeting"][0], kept["orders"]["meeting"][1])
        return cls(hosts=hosts, way=way, **kept["launch"]), orders


def take_over(run: detach.Detached) -> int:
    """In the place of its launcher, which was killed: finds its nodes where they train. Returns the run's exit code."""
    try:
        launch, orders = Launch.read((run.folder / "orders").read_text())
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"what the launcher of {run.id} kept cannot be read ({error!r}); use the version of paceline that started "
            f"it, or end its nodes by SIGTERM to the script on {run.about['hosts']} and resume from its checkpoint"
        ) from error
    names = ", ".join(host.name for host in launch.hosts)
    log.warning(
        f"the launcher of {run.id} was killed; this one replaces it and looks for its nodes on {names}. "
        f"What their processes print is lost until they are started again"
    )
    return launch.start(orders)
