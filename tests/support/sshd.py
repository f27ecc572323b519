"""A real sshd on a free port of this machine, with keys of its own, and hosts that are all this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import launching
import paceline
from paceline.launch.local import free_port

HERE = Path(__file__).parent
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
GOOD = "one", "two", "three"


def unavailable() -> str | None:
    missing = [name for name in ("ssh", "ssh-keygen") if not shutil.which(name)] + ([] if SSHD else ["sshd"])
    return f"there is no {' and no '.join(missing)} on this machine" if missing else None


class Sshd:
    """`ssh` is a client's command line that knows the hosts in GOOD, and these, which cannot take part:

    stranger (host key unknown), changed (another host key), locked (no key accepted), asking (takes passwords alone),
    either (takes keys, not this one, and passwords), shut (nothing listens), silent (never answers), hung (a login that
    says nothing), nowhere (no such name).
    """

    def __enter__(self) -> Sshd:
        self._temporary = tempfile.TemporaryDirectory(prefix="paceline-test-sshd-")
        self.folder = Path(self._temporary.name)
        if os.getuid() == 0:  # sshd insists on it where root starts it; it stays, since another may be using it
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for name in ("host", "user", "other", "hung"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        self._silent = socket.create_server(("127.0.0.1", 0))
        self.port, self._asking, self._either = free_port(), free_port(), free_port()
        self._configure()
        command = [str(SSHD), "-D", "-E", str(self.folder / "log"), "-f", str(self.folder / "sshd_config")]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.ssh = f"ssh -F {self.folder / 'config'}"
        end = time.monotonic() + 10
        trying = [*self.ssh.split(), "one", "true"]
        while (tried := subprocess.run(trying, capture_output=True, text=True, check=False)).returncode:
            log = self.folder / "log"
            told = f"sshd does not answer: {tried.stderr}{log.read_text() if log.exists() else ''}"
            assert self.process.poll() is None, told
            assert time.monotonic() < end, told
            time.sleep(0.05)
        return self

    def _configure(self) -> None:
        key = (self.folder / "host.pub").read_text().split()[:2]
        other = (self.folder / "other.pub").read_text().split()[:2]
        (self.folder / "known").write_text(f"paceline-test {' '.join(key)}\n")
        (self.folder / "wrong").write_text(f"paceline-test {' '.join(other)}\n")
        hung = f'command="exec cat > /dev/null" {(self.folder / "hung.pub").read_text()}'  # it ends with its line
        (self.folder / "authorized").write_text((self.folder / "user.pub").read_text() + hung)
        path = launching.python_path(Path(paceline.__file__).parents[1])
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nPort {self._asking}\nPort {self._either}\nListenAddress 127.0.0.1\nListenAddress ::1\n"
            f"HostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nPermitRootLogin yes\nAcceptEnv *\nMaxStartups 100\n"
            f"SetEnv PYTHONPATH={path} XDG_CACHE_HOME={self.folder}\n"
            f"Match LocalPort {self._asking}\n  PasswordAuthentication yes\n  PubkeyAuthentication no\n"
            f"Match LocalPort {self._either}\n  PasswordAuthentication yes\n"
        )
        (self.folder / "config").write_text(
            f"Host asking\n  Port {self._asking}\nHost hung\n  IdentityFile {self.folder}/hung\n"
            f"Host either\n  Port {self._either}\n  IdentityFile {self.folder}/other\n"
            f"Host stranger\n  UserKnownHostsFile /dev/null\nHost changed\n  UserKnownHostsFile {self.folder}/wrong\n"
            f"Host locked\n  IdentityFile {self.folder}/other\nHost shut\n  Port {free_port()}\n"
            f"Host silent\n  Port {self._silent.getsockname()[1]}\nHost nowhere\n  HostName nowhere.invalid\n"
            f"Host * !locked !either !hung\n  IdentityFile {self.folder}/user\n"
            f"Host *\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  HostKeyAlias paceline-test\n  UserKnownHostsFile {self.folder}/known\n"
            f"  GlobalKnownHostsFile /dev/null\n  UpdateHostKeys no\n"
        )

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(10)
        self._silent.close()
        self._temporary.cleanup()
