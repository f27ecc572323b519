"""An ssh that is none: it reaches this machine, in a home folder of the test's own, and may do anything before."""

from __future__ import annotations

import os
from pathlib import Path

import paceline
from paceline.launch.hosts import Way

ON = 'exec sh -c "$last"'  # as sshd goes on


class Near:
    """``home``: where a login there begins. Called with what a login does, gives the way to such a host."""

    def __init__(self, folder: Path):
        self.home, self._client, self._work = folder / "home", folder / "client", folder
        self.home.mkdir()

    def __call__(self, login: str = ON) -> Way:
        # an empty part of it would be the folder where the login begins
        path = os.pathsep.join(filter(None, (str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        self._client.write_text(
            f"#!/bin/sh\nexport HOME='{self.home}' XDG_CACHE_HOME='{self.home}' PYTHONPATH='{path}'\n"
            f"export SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22'\ncd '{self.home}'\nfor last; do :; done\n{login}\n"
        )
        self._client.chmod(0o755)
        return Way(str(self._client), folder=str(self._work))
