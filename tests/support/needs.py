"""What tests need of the machine they run on. As a program: the packages of Debian that bring it, one a line.

A test that is skipped for want of something says `needs NAME: why`; the last lines of a run sum those up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

APT = {
    "sshd": ("openssh-server", "openssh-client"),
    "chromium": ("chromium",),
    "slurm": ("slurmctld", "slurmd", "slurm-client", "munge"),
    "namespaces": ("iproute2",),
    "git": ("git",),
}
PIP = {"playwright", "mpi", "transformers", "tensorboard", "mlflow", "wandb", "simplejpeg"}
DEV = "pip install -e '.[dev]'"


def lacking(**wanted: str | None) -> str:
    """Of things by their names, each with why it is not to be had here, the first; empty where all are."""
    return next((f"needs {name}: {why}" for name, why in wanted.items() if why), "")


def needs(**wanted: str | None) -> pytest.MarkDecorator:
    """Skips a test where one of them cannot be had."""
    import pytest  # as a program this runs before anything is installed

    return pytest.mark.skipif(bool(reason := lacking(**wanted)), reason=reason or "all is here")


def want(**wanted: str | None) -> None:
    """Likewise, within a test or a fixture."""
    if reason := lacking(**wanted):
        import pytest

        pytest.skip(reason)


def module(name: str) -> None:
    """Likewise, what Python imports."""
    import pytest

    pytest.importorskip(name, reason=lacking(**{name: "it cannot be imported here"}))


def summary(reasons: Iterable[str]) -> str:
    """How many tests were skipped for want of what, and what installs it, in a line; empty where none was."""
    names = [found[1] if (found := re.match(r"(?:Skipped: )?needs (\w+): ", each)) else "" for each in reasons]
    if not names:
        return ""
    counts = Counter(names)
    others = counts.pop("", 0)
    most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    said = [f"{count} {'needs' if count == 1 else 'need'} {name}" for name, count in most_first]
    said += [f"{others} for other reasons"] if others else []
    packages = [package for name in APT if name in counts for package in APT[name]]
    install = [f"apt-get install {' '.join(packages)}"] if packages else []
    install += [DEV] if PIP & counts.keys() else []
    tests = "test" if len(names) == 1 else "tests"
    return f"{len(names)} {tests} skipped: {', '.join(said)}" + (
        f"; install: {' && '.join(install)}" if install else ""
    )


if __name__ == "__main__":
    print("\n".join(package for packages in APT.values() for package in packages))
