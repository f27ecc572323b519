"""A join token: the run's secret, and the last known addresses of its members.

Each member writes it to PACELINE_TICKET_FILE, where that is set, and again whenever the members change;
PACELINE_JOIN_TICKET names the one that a late node comes with. Only its owner may read it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.environment import variable
from paceline.link.net.auth import EncryptionKey


@dataclass(frozen=True)
class JoinTicket:
    """``nodes``: the fewest and the most, as PACELINE_NODES has them; ``members``: their places, the first leads;
    ``hides``: the run is encrypted."""

    secret: str
    nodes: str
    members: Sequence[str]
    hides: bool = False

    def write(self, path: Path) -> None:
        """Whole, or not at all. Nodes of one machine may write the same at once."""
        aside = path.with_name(f"{path.name}.{os.getpid()}.part")
        with contextlib.suppress(OSError):  # the members go on; who comes late finds an older one
            aside.unlink(missing_ok=True)
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # no link that lies there is followed
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(self), file)
            aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> JoinTicket:
        """Raises ValueError for what is no ticket."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            members = [str(each) for each in said["members"]]
            return cls(str(said["secret"]), str(said["nodes"]), members, said["hides"] is True)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} is no ticket of a run ({error!r}); give the ticket.json of a run that was started with --nodes"
            ) from None


def publish(members: Sequence[str], secret: bytes) -> None:
    """These are the members now."""
    if path := variable("PACELINE_TICKET_FILE"):
        nodes = os.environ.get("PACELINE_NODES", "")
        JoinTicket(secret.decode(), nodes, members, isinstance(secret, EncryptionKey)).write(Path(path))
