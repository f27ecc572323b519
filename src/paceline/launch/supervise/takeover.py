"""Takeover: a detached launcher saves the state of its run on hosts, and another launcher can replace it."""

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
    """A run on hosts, without what changes from start to start (`ssh.Orders`). ``paths``, ``address``, ``needs``: as in
    `check`. ``quiet``: only the result goes to stdout. ``success``: printed at exit code 0."""

    hosts: Sequence[Host]
    way: Way
    paths: Sequence[str]
    address: str | None
    needs: Mapping[str, str]
    restarts: int
    quiet: bool
    success: str

    def check_hosts(self) -> tuple[str, int]:
        return check(self.hosts, self.way, self.paths, self.address, self.needs)

    def start(self, orders: ssh.Orders, rendezvous: tuple[str, int] | None = None) -> int:
        """Runs all nodes; returns the exit code. ``rendezvous``: its endpoint; None: the nodes of ``orders``
        train already, and their launcher was killed."""
        orders = dataclasses.replace(
            orders,
            check_hosts=self.check_hosts if self.restarts else None,
            together=trained_alone.exit_code,
            on_change=self._save_orders if detach.is_detached() else None,
        )
        detach.mark_begun()
        result = sys.stdout.buffer if self.quiet else None
        code = ssh.start(self.hosts, orders, rendezvous, result, self.restarts)
        detach.remove_orders()
        if code == 0 and self.success:
            print(shown(self.success))
        return code

    def _save_orders(self, orders: ssh.Orders) -> None:
        left_out = ("check_hosts", "together", "on_change", "way")
        saved = {name: value for name, value in vars(orders).items() if name not in left_out}
        with contextlib.suppress(OSError):  # on a full disk the run continues with the orders saved before
            detach.save_orders(json.dumps({"launch": asdict(self), "orders": saved}))

    @classmethod
    def read(cls, text: str) -> tuple[Launch, ssh.Orders]:
        saved: dict[str, Any] = json.loads(text)
        way = Way(**saved["launch"].pop("way"))
        hosts = [Host(**each) for each in saved["launch"].pop("hosts")]
        orders = ssh.Orders(way=way, **saved["orders"])
        orders.meeting = (saved["orders"]["meeting"][0], saved["orders"]["meeting"][1])
        return cls(hosts=hosts, way=way, **saved["launch"]), orders


def take_over(run: detach.Detached) -> int:
    """Replaces the killed launcher of a run, and finds the nodes that still train. Returns the run's exit code."""
    try:
        launch, orders = Launch.read((run.folder / "orders").read_text())
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"the orders that the launcher of {run.id} saved cannot be read ({error!r}); use the version of paceline "
            f"that started it, or send SIGTERM to the script on {run.about['hosts']} and resume from its checkpoint"
        ) from error
    names = ", ".join(host.name for host in launch.hosts)
    log.warning(
        f"the launcher of {run.id} was killed; this one replaces it and looks for its nodes on {names}. "
        f"The output of their processes is lost until they are restarted"
    )
    return launch.start(orders)
