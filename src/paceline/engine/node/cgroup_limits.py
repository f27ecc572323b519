"""CPU limits of a container, from cgroup v1 or v2. Sent to hosts as source: imports the standard library alone."""

from __future__ import annotations

from pathlib import Path


def cores() -> int:
    """The container's CPU quota in cores, rounded up; 0: no limit."""
    found = []
    for folder in cgroups():
        quota, _, period = read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota):
            found.append(max(1, -(-int(quota) // int(period))))
    return min(found, default=0)


def cgroups() -> list[Path]:
    """The folders of this process's cgroup and of its parents: each may set a limit."""
    folders = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        roots = [Path("/sys/fs/cgroup", name) for name in controllers.split(",")] if controllers else []
        for root in [*roots, Path("/sys/fs/cgroup")]:
            own = root / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders


def read(path: str | Path) -> str:
    """The file's text; empty where there is no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
