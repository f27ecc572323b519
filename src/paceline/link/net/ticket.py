"""A join token: the run's secret, and the last known addresses of its members.

Each member writes it to PACELINE_TICKET_FILE, where that is set, and again after each membership change. A joining node
reads the file that PACELINE_JOIN_TICKET names. Only the file's owner may read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.environment import variable
from paceline.link.net.auth import EncryptionKey
from paceline.report.log import log


@dataclass(frozen=True)
class JoinTicket:
    """``nodes``: minimum and maximum, as in PACELINE_NODES; ``members``: their addresses, the leader's first;
    ``hides``: the run is encrypted."""

    secret: str
    nodes: str
    members: Sequence[str]
    hides: bool = False

    def write(self, path: Path) -> None:
        """Atomic: several nodes of one machine may write the same path at once. Errors of the disk are logged."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            temporary.unlink(missing_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # follows no symbolic link
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(self), file)
            temporary.replace(path)
        except OSError as error:  # training continues; a joining node finds an older token
            log.warning(f"the join token {path} was not written ({error}); no node can join until it is")

    @classmethod
    def read(cls, path: Path) -> JoinTicket:
        """Raises ValueError for a file that is no ticket."""
        try:
            ticket = json.loads(path.read_text(encoding="utf-8"))
            members = [str(each) for each in ticket["members"]]
            return cls(str(ticket["secret"]), str(ticket["nodes"]), members, ticket["hides"] is True)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} is no ticket of a run ({error!r}); give the ticket.json of a run that was started with --nodes"
            ) from None


def publish(members: Sequence[str], secret: bytes) -> None:
    """Writes the ticket of the current members where PACELINE_TICKET_FILE is set."""
    if path := variable("PACELINE_TICKET_FILE"):
        nodes = os.environ.get("PACELINE_NODES", "")
        JoinTicket(secret.decode(), nodes, members, isinstance(secret, EncryptionKey)).write(Path(path))
