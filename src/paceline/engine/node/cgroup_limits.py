"""What a container's limits leave of a machine, from cgroup v1 or v2. Sent to hosts as source: nothing but Python."""

from __future__ import annotations

from pathlib import Path


def cores() -> int:
    """Cores' worth of time that a container may use, rounded up; 0: any."""
    found = []
    for folder in cgroups():
        quota, _, period = read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota):
            found.append(max(1, -(-int(quota) // int(period))))
    return min(found, default=0)


def cgroups() -> list[Path]:
    """From this process's own group up to the root: any of them may limit."""
    folders = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        roots = [Path("/sys/fs/cgroup", name) for name in controllers.split(",")] if controllers else []
        for root in [*roots, Path("/sys/fs/cgroup")]:
            own = root / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders


def read(path: str | Path) -> str:
    """Nothing where there is no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
